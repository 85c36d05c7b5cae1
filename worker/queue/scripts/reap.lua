local expired = redis.call('ZRANGEBYSCORE', key('leases'), '-inf', now(), 'LIMIT', 0, ask.limit)
for _, id in ipairs(expired) do
  local item = load(id)
  if not item then
    redis.call('ZREM', key('leases'), id)
  elseif tombstoned(id) then
    answer_cancelled(item)
  else
    add_event(item, pack_event({
      type = 'lease_lost',
      request_id = id,
      attempt = item.attempt,
      worker = item.worker,
      alone = item.suspects == id,
    }), false)
    remove_lease(item, -item.charge)
    close(item, 'lost')
    redis.call('HDEL', key('item', id), 'token')
  end
end
return expired
