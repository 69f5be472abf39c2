-- Leases the next jobs of a lane to a worker.
-- A router that learns here that the lane is empty becomes its watcher: it need not read the lane
-- again until it is notified. So does one with a pull that excludes tenants, whatever that finds.
-- exclude_tenants: exclude these tenants; with any, bulk is excluded, too.
-- Returns {1, more, tokens, id, tokens, attempts, payload, id, ...}, or {0, more, next lease expiry
-- or -1}.
-- Cases, in order:
-- 1. The batch is leased already: the reply was lost, so return the batch again.
-- 2. Expired leases are recovered; their jobs are queued again or given up.
-- 3. Some tenants are excluded: lease other interactive jobs among the first 128.
-- 4. Bulk has credit and interactive jobs wait: lease bulk up to the credit, then interactive jobs.
-- 5. Otherwise lease interactive jobs, and bulk jobs once no interactive job is left.
-- 6. Nothing was leased: return the next lease expiry.
local now = clock(now_ms)
local answer, jobs, held, size, sum, alone = { 1, 0, 0 }, { 0 }, {}, 0, 0, false
local rounds, suspects, expired, removed_tokens = 16, false, 0, 0
local holder = holding(worker_id, batch_id)
local takes_others = exclude_tenants <= #ARGV
local watcher = takes_others and '+' .. router_id or router_id

local function include(id, tokens, tries, blob)
  local at = #answer
  answer[at + 1], answer[at + 2], answer[at + 3], answer[at + 4] = id, tokens, tries, blob
end

local packed = call('HGET', batches, batch_id)
if packed then                     -- case 1
  jobs = cmsgpack.unpack(packed)
  if not is_of(jobs, worker_id, batch_id) then
    watch(watcher, now)
    return { 0, 0, -1 }
  end
  call('ZADD', leases, 'XX', now + lease_ms, batch_id)
  for i = 2, #jobs, 2 do
    local id, tokens = parse(jobs[i])
    local blob = call('HGET', payload, id)
    if blob then include(id, tokens, tonumber(call('HGET', attempts, id) or 0), blob) end
  end
  answer[2], answer[3] = call('EXISTS', interactive, bulk) > 0 and 1 or 0, jobs[1]
  if answer[2] == 0 or takes_others then watch(watcher, now) end
  return answer
end

local function fits(tokens, tries, room, credit)
  if credit and tokens > room then return false end
  if size == 0 then return true end        -- the first job is leased whatever its size
  return tries == 0 and sum + tokens <= budget_tokens
end

local function consider(member, tag, room, credit)   -- tokens leased (nil: the job must wait), tokens to remove
  local id, tokens, deadline = parse(member)
  if deadline <= now then
    if not finish({ id })[1] then return 0, tokens end
    expired = expired + 1
    return 0, 0
  end
  local tries = suspects and tonumber(call('HGET', attempts, id) or 0) or 0
  if not fits(tokens, tries, room, credit) then return nil end
  local blob = call('HGET', payload, id)
  if not blob then return 0, tokens end    -- Redis lost part of its data
  include(id, tokens, tries, blob)
  local at = 2 * size
  -- An earlier, expired lease still counts: a slow worker may yet answer.
  local before = tries > 0 and call('HGET', holders, id) or ''
  -- Redis stores a hash with values of 65 bytes or more as a table; it searches shorter ones
  -- linearly.
  jobs[at + 2], jobs[at + 3], held[at + 1] = member, tag, id
  held[at + 2] = string.format('%-65s', holder .. string.match(before, '^(.-) *$'))
  size, sum, alone = size + 1, sum + tokens, tries > 0
  return tokens, tokens
end

local function take(queue, credit)         -- leases from the head of one class; tokens leased and the last start tag
  local taken, last = 0, nil
  while rounds > 0 and size < budget_jobs and not alone do
    rounds = rounds - 1
    local heads = call('ZRANGE', queue, 0, math.min(64, budget_jobs - size) - 1, 'WITHSCORES')
    local over, stop = {}, #heads == 0
    for i = 1, #heads, 2 do
      local leased, tokens = consider(heads[i], heads[i + 1], (credit or 0) - taken, credit)
      stop = not leased
      if stop then break end
      if leased > 0 then taken, last = taken + leased, heads[i + 1] end
      if tokens > 0 then over[#over + 1], removed_tokens = heads[i], removed_tokens + tokens end
      stop = alone
      if stop then break end
    end
    write('ZREM', queue, over)
    if stop then break end
  end
  return taken, last
end

local function take_others()               -- case 3; virtual time stays, because excluded tenants were due
  local ids, left, taken, over = {}, {}, 0, {}
  for at = exclude_tenants, #ARGV do left[ARGV[at]] = true end
  local heads = call('ZRANGE', interactive, 0, 127, 'WITHSCORES')
  for i = 1, #heads, 2 do ids[#ids + 1] = (parse(heads[i])) end
  local names = #ids > 0 and call('HMGET', tenant_of, unpack(ids)) or {}
  for i, tenant in ipairs(names) do
    if size == budget_jobs or alone then break end
    if tenant and not left[tenant] then
      local leased, tokens = consider(heads[2 * i - 1], heads[2 * i], 0, nil)
      if not leased then break end
      taken = taken + leased
      if tokens > 0 then over[#over + 1], removed_tokens = heads[2 * i - 1], removed_tokens + tokens end
    end
  end
  write('ZREM', interactive, over)
  return taken
end

-- case 2
reap(now, max_attempts, dead_letter_limit, lane, dead_result)
suspects = call('EXISTS', attempts) == 1
local state = call('HMGET', meta, 'vi', 'vb', 'credit')
local credit, bulk_taken, bulk_last, later_taken, later_last = tonumber(state[3] or 0), 0, nil, 0, nil
local interactive_taken, interactive_last = 0, nil
if takes_others then
  interactive_taken = take_others()  -- case 3
else
  -- case 4: credit is a ninth of the interactive tokens leased while bulk waited, so a tenth of
  -- all.
  if credit > 0 and call('ZCARD', interactive) > 0 then bulk_taken, bulk_last = take(bulk, credit) end
  -- case 5
  interactive_taken, interactive_last = take(interactive, nil)
  if call('ZCARD', interactive) == 0 then later_taken, later_last = take(bulk, nil) end
end
bulk_taken, bulk_last = bulk_taken + later_taken, later_last or bulk_last

count('expired', expired)
count('queued', -removed_tokens)
local head = call('ZRANGE', bulk, 0, 0)[1]
local _, head_tokens = parse(head or '')
answer[2] = (head or call('ZCARD', interactive) > 0) and 1 or 0
if size == 0 then                  -- case 6
  settle()
  watch(watcher, now)
  local expiry = call('ZRANGE', leases, 0, 0, 'WITHSCORES')[2]
  return { 0, takes_others and 0 or answer[2], expiry and tonumber(expiry) or -1 }
end
jobs[1], answer[3] = sum, sum
call('ZADD', leases, now + lease_ms, batch_id)
call('HSET', batches, batch_id, cmsgpack.pack(jobs))
write('HSET', holders, held)
count('leased', sum)
-- Virtual time never decreases, though requeued jobs have old tags.
if interactive_last and tonumber(interactive_last) > tonumber(state[1] or 0) then call('HSET', meta, 'vi', interactive_last) end
if bulk_last and tonumber(bulk_last) > tonumber(state[2] or 0) then call('HSET', meta, 'vb', bulk_last) end
if head then                       -- keep at most one batch of credit, or the size of the next job
  local saved = math.max(credit - bulk_taken, 0) + interactive_taken / 9
  call('HSET', meta, 'credit', math.min(saved, math.max(budget_tokens, head_tokens)))
elseif credit > 0 then
  call('HDEL', meta, 'credit')
end
if answer[2] == 0 or takes_others then
  watch(watcher, now)
elseif notify then
  notify_watchers(channel, router_id, '!\t' .. lane, false)   -- WakeupLeft
end
return answer
