-- ask.usage is nil unless the request was answered: then the predicted charge stands.

local item = load(ask.id)
if not item or item.token ~= ask.token then
  return 0
elseif item.state == 'finished' then
  return 1
elseif item.state ~= 'leased' then
  return 0
end

add_event(item, ARGV[2], true)
local correction = 0
if ask.usage then
  local actual = ask.usage.prompt + ask.output_price * ask.usage.completion
  correction = actual / item.weight - item.charge
  local field = item.tenant .. '\0' .. item.digest
  local length = ask.usage.completion / item.n
  local mean = tonumber(redis.call('HGET', key('lengths'), field) or length)
  redis.call('HSET', key('lengths'), field, mean + ask.length_smoothing * (length - mean))
end
remove_lease(item, correction)
close(item, 'finished')
return 1
