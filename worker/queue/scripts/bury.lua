-- A leased request that its worker cannot decode: kept for an operator, handed out to nobody.

local item = load(ask.id)
if not item or item.state ~= 'leased' or item.token ~= ask.token then
  return 0
end
redis.call('XADD', key('dead'), 'MAXLEN', '~', ask.dead_letter_limit, '*', 'kind', 'request',
  'request_id', ask.id, 'reason', ask.reason, 'data', ARGV[2])
remove_lease(item, -item.charge)
close(item, 'dead')
redis.call('HDEL', key('item', ask.id), 'token')
return 1
