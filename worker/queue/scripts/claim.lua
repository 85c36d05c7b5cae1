-- Hands out what fits ask's capacity together; see RequestQueue.claim and QueueSettings.

local function lease_of(item)
  local payload = redis.call('HGET', key('item', item.id), 'payload')
  local expires = redis.call('ZSCORE', key('leases'), item.id)
  return { item.id, payload, expires, redis.call('HGET', key('item', item.id), 'predicted') }
end

-- The same token again means that the answer was lost on its way.
local function answered_before()
  local last = redis.call('GET', key('claim', ask.worker))
  local claim = last and cmsgpack.unpack(last)
  if not claim or claim.token ~= ask.token then
    return nil
  end
  local leases = {}
  for _, id in ipairs(claim.ids) do
    local item = load(id)
    if item and item.state == 'leased' and item.token == ask.token then
      leases[#leases + 1] = lease_of(item)
    end
  end
  return leases
end

local function take(item, picked_by)
  settle_shares(item, picked_by)
  add_lease(item, ask.worker, ask.token, expiry, item.tokens / item.weight)
  remove_ready(item)
  redis.call('HSET', key('item', item.id), 'predicted', item.predicted)
  free_kv = free_kv - item.kv
  if not is_resident(item) then
    free_rank = free_rank - item.rank
    resident[item.digest] = true
  end
  last = item
  handed[item.class] = true
  hindered[item.id] = nil
  items[item.id] = nil
  taken[#taken + 1] = item
end

local function reserved()
  local id = redis.call('HGET', key('reserved'), ask.worker)
  if not id then
    return nil
  end
  local item = look_up(id)
  local waits = item and item.state == 'ready' and item.holder == ask.worker
  if waits and fits(item) then
    return item
  elseif waits and fits_when_idle(item) then
    reserve(item)
    return nil
  elseif waits then
    redis.call('HDEL', key('item', id), 'holder', 'held_until')
    items[id] = nil
  end
  redis.call('HDEL', key('reserved'), ask.worker)
  return nil
end

-- Suspects run with their like and nobody else, so that whoever kills a worker is among them.
local function take_suspects(group)
  local last_one = ask.requests + ask.look_ahead
  for _, member in ipairs(redis.call('ZRANGE', key('suspects', group), 0, last_one)) do
    local item = look_up(string.sub(member, 17))
    if #taken >= ask.requests then
      break
    elseif not item then
      redis.call('ZREM', key('suspects', group), member)
    elseif tombstoned(item.id) then
      answer_cancelled(item)
      items[item.id] = nil
    elseif has_room_for(item) then
      take(item, nil)
    end
  end
  redis.call('SET', key('confined', ask.worker), group, 'PX', milliseconds(ask.lease_seconds))
end

local function take_others()
  local item, lane = reserved(), nil
  while #taken < ask.requests do
    if not item then
      item, lane = pick()
    end
    if not item then
      return
    elseif tombstoned(item.id) then
      answer_cancelled(item)
      items[item.id] = nil
    else
      take(item, lane)
      if item.suspects ~= '' then
        return take_suspects(item.suspects)
      end
    end
    item, lane = nil, nil
  end
end

local before = answered_before()
if before then
  return before
elseif redis.call('XLEN', key('events')) > ask.stream_limit then
  return {}
end

for _, class in ipairs(CLASSES) do
  rebase(class, ask.rebase_at)
end
local group = ask.running > 0 and redis.call('GET', key('confined', ask.worker))
if group then
  take_suspects(group)
else
  redis.call('DEL', key('confined', ask.worker))
  take_others()
end

local ids, leases = {}, {}
for i, one in ipairs(taken) do
  ids[i] = one.id
  leases[i] = lease_of(one)
end
for id, class in pairs(hindered) do
  if handed[class] then
    redis.call('HINCRBY', key('item', id), 'passes', 1)
  end
end
for _, one in ipairs(lanes) do
  redis.call('HSET', key('credits'), one.name, one.credit)
end
redis.call('SET', key('claim', ask.worker), cmsgpack.pack({ token = ask.token, ids = ids }), 'PX',
  milliseconds(ask.lease_seconds))
return leases
