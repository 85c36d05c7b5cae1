-- ask.worker, ask.ids, ask.tokens; answers {lost ids, cancelled ids}.

local lost, cancelled = {}, {}
local expiry = now() + ask.lease_seconds
for i, id in ipairs(ask.ids) do
  local item = load(id)
  if item and item.state == 'leased' and item.token == ask.tokens[i] then
    redis.call('ZADD', key('leases'), expiry, id)
    if tombstoned(id) then
      cancelled[#cancelled + 1] = id
    end
  else
    lost[#lost + 1] = id
  end
end
redis.call('PEXPIRE', key('confined', ask.worker), milliseconds(ask.lease_seconds))
return { lost, cancelled }
