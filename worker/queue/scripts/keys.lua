-- KEYS[1] is the model's prefix; every key of the model starts with it and shares its hash tag.
--
--   item:ID                hash  meta (msgpack of QueuedItem), payload, state, member, token, ...
--   ready:CLASS:TENANT     zset  member (sequence .. id) by order
--   backlog|busy|idle:CLASS zset tenant by virtual token counter, see counters.lua
--   floors, held:CLASS     hash  counter of the last tenant that left; leases per tenant
--   leases, deadlines      zset  id by expiry; id by deadline, while ready
--   depth, credits         hash  counts per state and class; share saved up per class
--   length:TENANT\0DIGEST  string, expiring: running mean of output lengths
--   tomb:ID                string, expiring
--   events, dead, tokens:ID stream
--   suspects:GROUP         zset  member by order, while ready: who may run together
--   confined:WORKER        string, expiring: the group of suspects that it runs
--   reserved               hash  worker -> id: drains for it
--   claim:WORKER           string, expiring: the last claim, to answer it again

local ask = cmsgpack.unpack(ARGV[1])

local function key(...)
  return table.concat({ KEYS[1], ... }, ':')
end

local function now()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

local function milliseconds(seconds)
  return string.format('%.0f', math.max(1, seconds * 1000))
end
