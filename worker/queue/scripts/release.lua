local item = load(ask.id)
if not item or item.token ~= ask.token then
  return 0
elseif item.state == 'ready' then
  return 1
elseif item.state ~= 'leased' then
  return 0
end
if tombstoned(item.id) then
  answer_cancelled(item)
  return 1
end
-- Ready before the lease goes, so that the tenant never looks idle in between.
charge(item.class, item.tenant, -item.charge)
add_ready(item)
remove_lease(item, 0)
redis.call('PUBLISH', key('arrivals'), '')
return 1
