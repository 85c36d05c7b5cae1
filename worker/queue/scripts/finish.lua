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
  local name = key('length', item.tenant .. '\0' .. item.digest)
  local length = ask.usage.completion / item.n
  local mean = tonumber(redis.call('GET', name) or length)
  mean = mean + ask.length_smoothing * (length - mean)
  redis.call('SET', name, string.format('%.17g', mean), 'PX', milliseconds(ask.length_seconds))
end
remove_lease(item, correction)
close(item, 'finished')
return 1
