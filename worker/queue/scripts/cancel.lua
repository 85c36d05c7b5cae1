-- Answers the ids that were ready; leased ones are told to their workers.

local ready, running = {}, {}
for _, id in ipairs(ask.ids) do
  redis.call('SET', key('tomb', id), '1', 'PX', milliseconds(ask.tombstone_seconds))
  local item = load(id)
  if item and item.state == 'ready' then
    answer_cancelled(item)
    ready[#ready + 1] = id
  elseif item and item.state == 'leased' then
    running[#running + 1] = id
  end
end
if #running > 0 then
  redis.call('PUBLISH', key('cancels'), cmsgpack.pack(running))
end
return ready
