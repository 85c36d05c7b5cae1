-- ask.said lists {id, token, kind, usage} in order; ARGV[i + 1] is the event of the i-th. Answers
-- 1 for each that was taken. `usage` is nil unless the request was answered: then the predicted
-- charge stands.

local function correction_for(item, usage)
  if not usage then
    return 0
  end
  local actual = usage.prompt + ask.output_price * usage.completion
  local name = key('length', item.tenant .. '\0' .. item.digest)
  local length = usage.completion / item.n
  local mean = tonumber(redis.call('GET', name) or length)
  mean = mean + ask.length_smoothing * (length - mean)
  redis.call('SET', name, string.format('%.17g', mean), 'PX', milliseconds(ask.length_seconds))
  return actual / item.weight - item.charge
end

local function deliver(said, event)
  local item = load(said.id)
  if not item or item.token ~= said.token then
    return 0
  elseif item.state == 'finished' then
    return said.kind == 'terminal' and 1 or 0
  elseif item.state ~= 'leased' then
    return 0
  end
  if said.kind == 'delta' then
    add_tokens(item.id, event)
    return 1
  end
  add_event(item, event, said.kind == 'terminal')
  if said.kind == 'terminal' then
    remove_lease(item, correction_for(item, said.usage))
    close(item, 'finished')
  end
  return 1
end

local taken = {}
for i, said in ipairs(ask.said) do
  taken[i] = deliver(said, ARGV[i + 1])
end
return taken
