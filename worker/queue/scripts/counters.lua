-- Virtual token counters of the tenants of one class (VTC, arXiv 2401.00588).
--
--   backlog  tenants with ready requests   } a tenant is in one or both of these,
--   busy     tenants with leased requests  }
--   idle     or, while its counter is above the floor, in this: its past use is not forgotten

local function lowest(set)
  local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
  return first[2] and tonumber(first[2])
end

-- What a tenant is lifted to when it comes back, so that idling earns no credit: the lowest
-- counter of those that wait, else of those that run, else that of the last one that left.
local function floor_of(class)
  return lowest(key('backlog', class))
    or lowest(key('busy', class))
    or tonumber(redis.call('HGET', key('floors'), class) or '0')
end

local function counter_of(class, tenant)
  local counter = redis.call('ZSCORE', key('backlog', class), tenant)
    or redis.call('ZSCORE', key('busy', class), tenant)
    or redis.call('ZSCORE', key('idle', class), tenant)
  return counter and tonumber(counter)
end

local function set_counter(class, tenant, counter)
  for _, set in ipairs({ 'backlog', 'busy', 'idle' }) do
    redis.call('ZADD', key(set, class), 'XX', counter, tenant)
  end
end

local function charge(class, tenant, tokens)
  set_counter(class, tenant, counter_of(class, tenant) + tokens)
end

local function join_backlog(class, tenant)
  if redis.call('ZSCORE', key('backlog', class), tenant) then
    return
  end
  local floor = floor_of(class)
  local counter = math.max(counter_of(class, tenant) or floor, floor)
  redis.call('ZADD', key('backlog', class), counter, tenant)
  set_counter(class, tenant, counter)
  redis.call('ZREM', key('idle', class), tenant)
end

local function join_busy(class, tenant)
  redis.call('ZADD', key('busy', class), counter_of(class, tenant), tenant)
end

local function leave(set, class, tenant)
  local counter = counter_of(class, tenant)
  redis.call('ZREM', key(set, class), tenant)
  if counter_of(class, tenant) then
    return
  end
  local others = lowest(key('backlog', class)) or lowest(key('busy', class))
  if others then
    redis.call('ZADD', key('idle', class), counter, tenant)
  else
    redis.call('HSET', key('floors'), class, counter)
  end
  redis.call('ZREMRANGEBYSCORE', key('idle', class), '-inf', others or counter)
end

-- Doubles count exactly only so far: move all counters of a class back by the lowest.
local function rebase(class, limit)
  local floor = floor_of(class)
  if floor <= limit then
    return
  end
  for _, set in ipairs({ 'backlog', 'busy', 'idle' }) do
    local entries = redis.call('ZRANGE', key(set, class), 0, -1, 'WITHSCORES')
    for i = 1, #entries, 2 do
      redis.call('ZADD', key(set, class), tonumber(entries[i + 1]) - floor, entries[i])
    end
  end
  redis.call('HSET', key('floors'), class, 0)
end
