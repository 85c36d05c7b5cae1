-- A record's life: ready <-> leased -> finished (answered) or lost (its lease expired) or dead.

local function load(id)
  local fields = redis.call('HMGET', key('item', id), 'meta', 'state', 'member', 'token', 'worker',
    'charge', 'passes', 'holder', 'held_until')
  if not fields[2] then
    return nil
  end
  local item = cmsgpack.unpack(fields[1])
  item.state, item.member, item.token, item.worker = fields[2], fields[3], fields[4], fields[5]
  item.charge = tonumber(fields[6] or '0')
  item.passes = tonumber(fields[7] or '0')
  item.holder, item.held_until = fields[8], tonumber(fields[9] or '0')
  item.class = item.request_class
  return item
end

local function count(state, class, by)
  redis.call('HINCRBY', key('depth'), state .. ':' .. class, by)
end

local function drop_member(class, tenant, member)
  local ready = key('ready', class, tenant)
  redis.call('ZREM', ready, member)
  count('ready', class, -1)
  if redis.call('EXISTS', ready) == 0 then
    leave('backlog', class, tenant)
  end
end

local function add_ready(item)
  join_backlog(item.class, item.tenant)
  redis.call('ZADD', key('ready', item.class, item.tenant), item.order, item.member)
  if item.deadline and item.class ~= 'interactive' then
    redis.call('ZADD', key('deadlines'), item.deadline, item.id)
  end
  if item.suspects ~= '' then
    redis.call('ZADD', key('suspects', item.suspects), item.order, item.member)
  end
  redis.call('HSET', key('item', item.id), 'state', 'ready')
  count('ready', item.class, 1)
end

local function remove_ready(item)
  redis.call('ZREM', key('deadlines'), item.id)
  redis.call('ZREM', key('suspects', item.suspects), item.member)
  drop_member(item.class, item.tenant, item.member)
end

local function add_lease(item, worker, token, expiry, tokens)
  redis.call('ZADD', key('leases'), expiry, item.id)
  redis.call('HINCRBY', key('held', item.class), item.tenant, 1)
  join_busy(item.class, item.tenant)
  charge(item.class, item.tenant, tokens)
  redis.call('HSET', key('item', item.id), 'state', 'leased', 'worker', worker, 'token', token,
    'charge', tokens)
  redis.call('HDEL', key('item', item.id), 'passes', 'holder', 'held_until')
  count('leased', item.class, 1)
end

-- `correction` is added to the tenant's counter: minus the charge refunds it.
local function remove_lease(item, correction)
  redis.call('ZREM', key('leases'), item.id)
  charge(item.class, item.tenant, correction)
  if redis.call('HINCRBY', key('held', item.class), item.tenant, -1) <= 0 then
    redis.call('HDEL', key('held', item.class), item.tenant)
    leave('busy', item.class, item.tenant)
  end
  count('leased', item.class, -1)
end

local function withdraw(item)
  if item.state == 'ready' then
    remove_ready(item)
  elseif item.state == 'leased' then
    remove_lease(item, -item.charge)
  end
end

local function close(item, state)
  redis.call('HDEL', key('item', item.id), 'payload')
  redis.call('HSET', key('item', item.id), 'state', state)
end

local function tombstoned(id)
  return redis.call('EXISTS', key('tomb', id)) == 1
end

-- The channel of the same name tells who follows it.
local function add_tokens(id, event)
  local stream = key('tokens', id)
  redis.call('XADD', stream, 'MAXLEN', '~', ask.token_stream_limit, '*', 'event', event)
  redis.call('PEXPIRE', stream, milliseconds(ask.token_stream_seconds))
  redis.call('PUBLISH', stream, '')
end

-- The first write of a script, where it can be: a server out of memory refuses only that one.
local function add_event(item, event, terminal)
  redis.call('XADD', key('events'), '*', 'event', event)
  if terminal and item.stream then
    add_tokens(item.id, event)
  end
end

local function pack_event(fields)
  return string.char(VERSION) .. cmsgpack.pack(fields)
end

local function answer_cancelled(item)
  local event = { type = 'cancelled', request_id = item.id, attempt = item.attempt }
  add_event(item, pack_event(event), true)
  withdraw(item)
  close(item, 'finished')
end
