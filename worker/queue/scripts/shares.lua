-- Lower classes and urgent requests save up a share of what others are handed while they wait,
-- and come first as long as they have any.
local lanes = {
  { name = 'urgent', share = ask.escalation_share },
  { name = 'standard', share = ask.standard_share },
  { name = 'batch', share = ask.batch_share },
}
for _, lane in ipairs(lanes) do
  lane.credit = tonumber(redis.call('HGET', key('credits'), lane.name) or '0')
end

local function waiting(class)
  return redis.call('EXISTS', key('backlog', class)) == 1
end

local function pick()
  for _, lane in ipairs(lanes) do
    if lane.credit > 0 then
      local item
      if lane.name == 'urgent' then
        item = pick_urgent()
      else
        item = pick_of_class(lane.name)
      end
      if item then
        return item, lane
      end
    end
  end
  for _, class in ipairs(CLASSES) do
    local item = pick_of_class(class)
    if item then
      return item, nil
    end
  end
  return nil
end

local function settle_shares(item, picked_by)
  local urgent = redis.call('ZCOUNT', key('deadlines'), time, time + ask.escalation_seconds) > 0
  local standard = waiting('standard')
  local contended = {
    urgent = urgent,
    standard = standard and waiting('interactive'),
    batch = waiting('batch') and (standard or waiting('interactive')),
  }
  for _, lane in ipairs(lanes) do
    if contended[lane.name] then
      lane.credit = lane.credit + lane.share * item.tokens
      if lane == picked_by or lane.name == item.class then
        lane.credit = lane.credit - item.tokens
      end
      lane.credit = math.max(-ask.credit_limit, math.min(ask.credit_limit, lane.credit))
    else
      lane.credit = math.min(lane.credit, 0)
    end
  end
end
