for _, id in ipairs(ask.ids) do
  local item = load(id)
  if item then
    withdraw(item)
    redis.call('DEL', key('item', id))
  end
end
return 0
