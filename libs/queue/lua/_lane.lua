-- Functions shared by a lane's scripts; each script includes only those that it calls
-- (libs/queue/scripts.py).
-- Redis refuses writes that need memory when it is full, but lets a script continue that has
-- already written. So scripts that remove work delete before they add, and a full Redis can still
-- be drained.
local call = redis.call
local DAY, REPLY_MS = 86400000, 120000

local function clock(given)            -- Unix ms, by Redis' own clock unless a test gives one
  if given >= 0 then return given end
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function parse(member)           -- <i|b>:<tokens>:<deadline ms>:<job id>
  local tokens, deadline, id = string.match(member, '^.:(%d+):(%d+):(.*)$')
  return id, tonumber(tokens), tonumber(deadline)
end

local function queue_of(member)
  return string.byte(member) == 105 and interactive or bulk
end

local function write(command, key, values)   -- Lua can pass about 8000 values in a call
  for first = 1, #values, 4000 do
    call(command, key, unpack(values, first, math.min(first + 3999, #values)))
  end
end

local function count(field, amount)
  if amount ~= 0 then call('HINCRBY', meta, field, amount) end
end

local function lookup(ids)             -- each id's router and member; false if its job is finished or unknown
  local routers, members, size = {}, {}, 0
  for first = 1, #ids, 4000 do
    for _, value in ipairs(call('HMGET', owner, unpack(ids, first, math.min(first + 3999, #ids)))) do
      local stop = value and string.find(value, '\0', 1, true)
      size = size + 1
      routers[size] = stop and string.sub(value, 1, stop - 1) or false
      members[size] = stop and string.sub(value, stop + 1) or false
    end
  end
  return routers, members
end

local function holds(member, id)       -- is the job unfinished, and not a later one with the same id?
  local value = call('HGET', owner, id)
  return value and string.sub(value, -#member - 1) == '\0' .. member
end

local function finish(ids)             -- ends jobs anywhere: each one's router ('': unknown), or false if it had ended
  local ended, freed, routers, members = {}, 0, lookup(ids)
  for position, member in ipairs(members) do
    ended[position] = false
    if call('HDEL', payload, ids[position]) == 1 then
      ended[position] = routers[position] or ''
      if member and call('ZREM', queue_of(member), member) == 1 then
        local _, tokens = parse(member)
        freed = freed + tokens
      end
    end
  end
  write('HDEL', owner, ids)
  if call('EXISTS', attempts) == 1 then write('HDEL', attempts, ids) end
  write('HDEL', holders, ids)
  write('HDEL', tenant_of, ids)
  count('queued', -freed)
  return ended
end

local function collect(answers, router, id, result)   -- answers: router -> list for push
  if router == '' then return end
  local list = answers[router] or {}
  list[#list + 1], answers[router] = id .. '\0' .. result, list
end

local function push(answers)           -- each answer: <job id> NUL <result>
  for router, list in pairs(answers) do
    write('RPUSH', replies .. router, list)
    call('PEXPIRE', replies .. router, REPLY_MS)
  end
end

local function holding(worker_id, batch_id)   -- an entry of `holders`
  return worker_id .. '\t' .. batch_id .. '\n'
end

local function was_given(ids, worker_id, batch_id)   -- for each id: did this worker's lease of that name hold the job?
  local is, mine, members = {}, '\n' .. holding(worker_id, batch_id), nil
  local function is_leased(id)         -- for jobs without holders: a job that was queued again
    if not members then
      members = {}
      local packed = call('HGET', batches, batch_id)
      local jobs = packed and cmsgpack.unpack(packed) or {}
      for i = 2, #jobs, 2 do members[parse(jobs[i])] = true end
    end
    return members[id] or false
  end
  for first = 1, #ids, 4000 do
    for _, value in ipairs(call('HMGET', holders, unpack(ids, first, math.min(first + 3999, #ids)))) do
      local at = #is + 1
      if not value then
        is[at] = is_leased(ids[at])
      else
        is[at] = string.find('\n' .. value, mine, 1, true) ~= nil
      end
    end
  end
  return is
end

local function is_of(jobs, worker_id, batch_id)   -- is this lease the worker's? An empty one is any worker's
  for i = 2, #jobs, 2 do
    local id = parse(jobs[i])
    if holds(jobs[i], id) then return was_given({ id }, worker_id, batch_id)[1] end
  end
  return true
end

local function unlease(batch_id, worker_id)   -- ends a lease; its jobs, or nil if it had ended or is another worker's
  local packed = call('HGET', batches, batch_id)
  local jobs = packed and cmsgpack.unpack(packed)
  if jobs and worker_id and not is_of(jobs, worker_id, batch_id) then return nil end
  if call('ZREM', leases, batch_id) == 0 or not jobs then return nil end
  call('HDEL', batches, batch_id)
  count('leased', -jobs[1])
  return jobs
end

local function requeue(member, tag)    -- the old tag keeps it near the head
  local id, tokens = parse(member)
  if call('ZADD', queue_of(member), 'NX', tag, member) == 1 then count('queued', tokens) end
end

local function bury(id, tries, limit, lane, answers, result)
  collect(answers, finish({ id })[1], id, result)
  count('dead', 1)
  call('XADD', dead, 'MAXLEN', '~', limit, '*', 'lane', lane, 'job', id, 'attempts', tries)
  call('PEXPIRE', dead, 7 * DAY)
end

local function recover(ended, max_attempts, limit, lane, result)   -- jobs of dead workers return, or are given up
  local answers, back = {}, 0
  for _, batch_id in ipairs(ended) do
    local jobs = unlease(batch_id) or {}
    for i = 2, #jobs, 2 do
      local id = parse(jobs[i])
      if holds(jobs[i], id) then
        local tries = call('HINCRBY', attempts, id, 1)
        if tries >= max_attempts then
          bury(id, tries, limit, lane, answers, result)
        else
          requeue(jobs[i], jobs[i + 1])
          back = back + 1
        end
      end
    end
  end
  push(answers)
  return back
end

local function reap(now, max_attempts, limit, lane, result)   -- recovers the jobs of expired leases
  recover(call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 8), max_attempts, limit, lane, result)
end

local function watch(watcher, now)     -- a router's id: it counts the lane as empty until it is notified
  -- With a '+' before it, the lane may have jobs, but only of tenants that the router's pulls
  -- exclude.
  -- Not `call`: a full Redis refuses it, and reminders notify the router instead.
  if redis.pcall('ZADD', watchers, now, watcher) == 1 then call('PEXPIRE', watchers, DAY) end
end

local function notify_watchers(channel, router_id, message, is_new)   -- all but the router that calls
  local routers, over = {}, {}
  for _, watcher in ipairs(call('ZRANGE', watchers, 0, -1)) do
    local router = string.match(watcher, '^%+?(.*)$')
    -- Pulls that exclude tenants have read the jobs that another pull leaves.
    if router ~= router_id and (is_new or router == watcher) then
      routers[router], over[#over + 1] = true, watcher
    end
  end
  for router in pairs(routers) do call('PUBLISH', channel .. ':' .. router, message) end
  write('ZREM', watchers, over)        -- each reads the lane before it watches it again
end

local function settle()                -- an idle lane keeps only its counters, which expire
  if call('EXISTS', interactive, bulk, leases) > 0 then return end
  call('DEL', payload, owner, attempts, tags_i, tags_b, batches, holders, tenant_of)
  call('HDEL', meta, 'vi', 'vb', 'credit', 'queued', 'leased')
end
