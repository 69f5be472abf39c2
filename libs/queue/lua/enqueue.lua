-- groups: {jobs, tokens of the group in later calls, {id, tenant, weight, tokens, deadline, class,
-- payload} * jobs} * groups
-- everywhere: notify all routers and schedulers if the lane was empty, not only its watchers.
-- Returns 1 or 0 for each group: admitted or not. max_tokens < 0: no limit, for the later calls of
-- a group.
local state = call('HMGET', meta, 'queued', 'vi', 'vb')
local queued, virtual = tonumber(state[1] or 0), { i = tonumber(state[2] or 0), b = tonumber(state[3] or 0) }
local tags, members, payloads, owners, names = { i = {}, b = {} }, { i = {}, b = {} }, {}, {}, {}
local fresh, added, added_tokens = {}, 0, 0

local function add(at)
  local id, tenant, tokens, class = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 3]), ARGV[at + 5]
  local last = tags[class][tenant] or tonumber(call('HGET', class == 'i' and tags_i or tags_b, tenant) or 0)
  local start = math.max(virtual[class], last)
  tags[class][tenant] = start + tokens / math.max(tonumber(ARGV[at + 2]), 1e-6)
  local list, member = members[class], class .. ':' .. ARGV[at + 3] .. ':' .. ARGV[at + 4] .. ':' .. id
  list[#list + 1], list[#list + 2] = start, member
  payloads[#payloads + 1], payloads[#payloads + 2] = id, ARGV[at + 6]
  owners[#owners + 1], owners[#owners + 2] = id, router_id .. '\0' .. member
  if class == 'i' then names[#names + 1], names[#names + 2] = id, tenant end
  fresh[id], added, added_tokens = true, added + 1, added_tokens + tokens
end

local function admit(first, last, later)
  local ids, new, known, renewed, seen, need = {}, {}, {}, {}, {}, later
  for at = first, last, 7 do ids[#ids + 1] = ARGV[at] end
  local _, members = lookup(ids)
  for position, member in ipairs(members) do
    local id, at = ids[position], first + 7 * (position - 1)
    if member then
      known[#known + 1], known[#known + 2] = id, router_id .. '\0' .. member
      renewed[#renewed + 1], renewed[#renewed + 2] = id, ARGV[at + 6]
    elseif not fresh[id] and not seen[id] then
      new[#new + 1], seen[id], need = at, true, need + tonumber(ARGV[at + 3])
    end
  end
  -- A group without new jobs is a client's retry: only the router changes that gets its answers
  -- and, named in the payload, its streamed text.
  if #new > 0 and max_tokens >= 0 and queued + added_tokens + need > max_tokens then return 0 end
  for _, at in ipairs(new) do add(at) end
  write('HSET', owner, known)
  write('HSET', payload, renewed)
  return 1
end

local admitted, at = {}, groups
while at <= #ARGV do
  local first, later = at + 2, tonumber(ARGV[at + 1])
  at = first + 7 * ARGV[at]
  admitted[#admitted + 1] = admit(first, at - 1, later)
end
if added == 0 then return admitted end
for class, list in pairs(members) do
  write('ZADD', class == 'i' and interactive or bulk, list)
  local flat = {}
  for tenant, tag in pairs(tags[class]) do
    flat[#flat + 1], flat[#flat + 2] = tenant, string.format('%.17g', tag)
  end
  write('HSET', class == 'i' and tags_i or tags_b, flat)
end
write('HSET', payload, payloads)
write('HSET', owner, owners)
write('HSET', tenant_of, names)
count('queued', added_tokens)
count('enqueued', added)
count('enqueued_tokens', added_tokens)
call('PEXPIRE', meta, DAY)
call('ZADD', index, clock(now_ms), lane)
if notify then
  local was_empty = call('ZCARD', interactive) + call('ZCARD', bulk) == added
  if was_empty and (everywhere or call('EXISTS', watchers) == 0) then
    call('PUBLISH', channel, lane)
  else
    notify_watchers(channel, router_id, lane, true)
  end
end
return admitted
