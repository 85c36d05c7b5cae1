-- Takes out the ids that are ready, without an event. Answers them.

local taken = {}
for _, id in ipairs(ask.ids) do
  local item = load(id)
  if item and item.state == 'ready' then
    withdraw(item)
    redis.call('DEL', key('item', id))
    taken[#taken + 1] = id
  end
end
return taken
