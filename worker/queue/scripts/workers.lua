-- Answers {announcement, seen at} of each live worker; the others are removed.

local live = {}
local entries = redis.call('ZRANGE', key('seen'), 0, -1, 'WITHSCORES')
local oldest = now() - ask.seconds
for i = 1, #entries, 2 do
  local worker, seen_at = entries[i], entries[i + 1]
  if tonumber(seen_at) < oldest then
    redis.call('ZREM', key('seen'), worker)
    redis.call('HDEL', key('info'), worker)
  else
    live[#live + 1] = { redis.call('HGET', key('info'), worker), seen_at }
  end
end
return live
