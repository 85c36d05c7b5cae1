-- ARGV[2..] alternates: a packed QueuedItem, and its GenerateRequest's bytes.

local function enqueue(meta, payload)
  local item = cmsgpack.unpack(meta)
  local old = load(item.id)
  if old and old.attempt >= item.attempt then
    return 'duplicate'
  end
  if tombstoned(item.id) then
    return 'cancelled'
  end
  if old then
    withdraw(old)
    redis.call('DEL', key('item', item.id))
  end
  -- Requests of equal order run first come, first served.
  local sequence = redis.call('INCR', key('sequence'))
  item.class = item.request_class
  item.member = string.format('%016.0f', sequence) .. item.id
  redis.call('HSET', key('item', item.id), 'meta', meta, 'payload', payload, 'member', item.member)
  add_ready(item)
  return 'enqueued'
end

local outcomes, arrived = {}, false
for i = 2, #ARGV, 2 do
  local outcome = enqueue(ARGV[i], ARGV[i + 1])
  outcomes[#outcomes + 1] = outcome
  arrived = arrived or outcome == 'enqueued'
end
if arrived then
  redis.call('PUBLISH', key('arrivals'), '')
end
return outcomes
