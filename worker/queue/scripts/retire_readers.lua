-- Forgets consumers of ask.group that have read nothing for ask.seconds and hold nothing: each
-- collector has a name of its own, and the names of dead ones would stay for ever. One that holds
-- entries stays until they were claimed: deleting it would lose them.

local retired = 0
if redis.call('EXISTS', key('events')) == 0 then
  return retired
end
for _, fields in ipairs(redis.call('XINFO', 'CONSUMERS', key('events'), ask.group)) do
  local consumer = {}
  for i = 1, #fields, 2 do
    consumer[fields[i]] = fields[i + 1]
  end
  if consumer.pending == 0 and consumer.idle >= ask.seconds * 1000 then
    redis.call('XGROUP', 'DELCONSUMER', key('events'), ask.group, consumer.name)
    retired = retired + 1
  end
end
return retired
