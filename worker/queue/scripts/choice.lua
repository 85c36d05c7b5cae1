-- Which ready request goes next to the worker that asks. Capacity only shrinks within a claim, so
-- a tenant whose requests do not fit is not looked at again.

local CLASSES = { 'interactive', 'standard', 'batch' }
local time = now()
local expiry = time + ask.lease_seconds
local free_kv, free_rank = ask.kv_tokens, ask.adapter_rank
local taken, items, handed, hindered = {}, {}, {}, {}
local blocked, skipped = {}, {}
local resident = {}
local last = {}
local lengths = {}
for _, digest in ipairs(ask.resident) do
  resident[digest] = true
end

local function mean_length(item)
  local name = item.tenant .. '\0' .. item.digest
  if not lengths[name] then
    local mean = redis.call('GET', key('length', name))
    lengths[name] = tonumber(mean or ask.default_output_tokens)
  end
  return lengths[name]
end

local function look_up(id)
  if items[id] == nil then
    local item = load(id) or false
    if item then
      local mean = mean_length(item)
      item.predicted = math.max(item.least, math.min(item.most, math.ceil(mean)))
      item.kv = item.prompt + item.n * item.predicted
      item.tokens = item.prompt + ask.output_price * item.n * item.predicted
    end
    items[id] = item
  end
  return items[id]
end

local function is_resident(item)
  return item.digest == '' or resident[item.digest]
end

local function is_idle()
  return ask.running == 0 and #taken == 0
end

-- A prediction is no need: an idle worker gets what it can at least begin.
local function has_room_for(item)
  if not is_resident(item) and item.rank > free_rank then
    return false
  end
  return item.kv <= free_kv or (is_idle() and item.prompt + item.n <= free_kv)
end

local function fits(item)
  return (item.suspects == '' or is_idle()) and has_room_for(item)
end

local function fits_when_idle(item)
  return item.prompt + item.n <= ask.most_kv_tokens and item.rank <= ask.most_adapter_rank
end

local function block(item)
  local below = false
  for _, class in ipairs(CLASSES) do
    below = below or class == item.class
    blocked[class] = blocked[class] or below
  end
end

-- One worker at a time drains for a request that was passed over too often.
local function reserve(item)
  redis.call('HSET', key('item', item.id), 'holder', ask.worker, 'held_until', expiry)
  redis.call('HSET', key('reserved'), ask.worker, item.id)
  block(item)
end

-- 2 for an adapter that is there already, 1 for the prefix of what its tenant was just handed.
local function rating(item)
  local shares = item.prefix ~= '' and item.prefix == last.prefix and item.tenant == last.tenant
  return (is_resident(item) and 2 or 0) + (shares and 1 or 0)
end

local function best_rating(tenant)
  return (tenant == last.tenant and last.prefix ~= '') and 3 or 2
end

-- The head of a tenant's line: true when nothing of its class may go before it.
local function must_wait_for(head)
  if head.passes < ask.pass_over_limit or not fits_when_idle(head) then
    return false
  end
  return not head.holder or head.holder == ask.worker or head.held_until < time
end

local function pick_of_tenant(class, tenant)
  local members = redis.call('ZRANGE', key('ready', class, tenant), 0, ask.look_ahead - 1)
  local head, best
  for _, member in ipairs(members) do
    local item = look_up(string.sub(member, 17))
    if not item then
      drop_member(class, tenant, member)
    else
      local fit = fits(item)
      if not head then
        head = item
        if fit and head.passes >= ask.pass_over_limit then
          return head
        elseif not fit and must_wait_for(head) then
          reserve(head)
          return nil
        end
      end
      if fit and (not best or rating(item) > rating(best)) then
        best = item
        if rating(best) == best_rating(tenant) then
          break
        end
      end
    end
  end
  if head and best ~= head and fits_when_idle(head) then
    hindered[head.id] = class
  end
  return best
end

local function pick_of_class(class)
  local tenants = redis.call('ZRANGE', key('backlog', class), 0, ask.tenant_look_ahead - 1)
  for _, tenant in ipairs(tenants) do
    local line = class .. ':' .. tenant
    if blocked[class] then
      return nil
    elseif not skipped[line] then
      local item = pick_of_tenant(class, tenant)
      if item then
        return item
      end
      skipped[line] = true
    end
  end
  return nil
end

local function pick_urgent()
  local ids = redis.call('ZRANGEBYSCORE', key('deadlines'), time, time + ask.escalation_seconds,
    'LIMIT', 0, ask.look_ahead)
  for _, id in ipairs(ids) do
    local item = look_up(id)
    if item and not blocked[item.class] and fits(item) then
      return item
    end
  end
  return nil
end
