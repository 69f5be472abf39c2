-- 1. Recover the jobs of expired leases.
-- 2. Drop expired and finished jobs among the first `limit` of each class.
-- 3. If that was the whole lane, recount the gauges and drop payloads without a queue entry or
--    lease: their routers find them missing, and queue them again.
local now, live, lives, queued, leased, expired = clock(now_ms), {}, 0, 0, 0, 0
reap(now, max_attempts, dead_letter_limit, lane, dead_result)
local complete = call('ZCARD', interactive) <= limit and call('ZCARD', bulk) <= limit
for _, queue in ipairs({ interactive, bulk }) do
  for _, member in ipairs(call('ZRANGE', queue, 0, limit - 1)) do
    local id, tokens, deadline = parse(member)
    if deadline <= now or call('HEXISTS', payload, id) == 0 then
      if finish({ id })[1] then expired = expired + 1 else call('ZREM', queue, member) end
    else
      live[id], lives, queued = true, lives + 1, queued + tokens
    end
  end
end

if complete then
  for _, batch_id in ipairs(call('HKEYS', batches)) do
    if call('ZSCORE', leases, batch_id) then
      local jobs = cmsgpack.unpack(call('HGET', batches, batch_id))
      leased = leased + jobs[1]
      for i = 2, #jobs, 2 do
        local id = parse(jobs[i])
        if not live[id] and holds(jobs[i], id) then live[id], lives = true, lives + 1 end
      end
    else
      call('HDEL', batches, batch_id)
    end
  end
  for _, batch_id in ipairs(call('ZRANGE', leases, 0, -1)) do
    if call('HEXISTS', batches, batch_id) == 0 then call('ZREM', leases, batch_id) end
  end
  if call('HLEN', payload) > lives then
    for _, id in ipairs(call('HKEYS', payload)) do
      if not live[id] and finish({ id })[1] then expired = expired + 1 end
    end
  end
  call('HSET', meta, 'queued', queued, 'leased', leased)
end
count('expired', expired)

local virtual = call('HMGET', meta, 'vi', 'vb')
for position, tags in ipairs({ tags_i, tags_b }) do     -- drop finish tags in the past
  local all, past = call('HGETALL', tags), {}
  for i = 1, #all, 2 do
    if tonumber(all[i + 1]) <= tonumber(virtual[position] or 0) then past[#past + 1] = all[i] end
  end
  write('HDEL', tags, past)
end
if call('EXISTS', interactive, bulk, leases) == 0 then
  settle()
else
  call('PEXPIRE', meta, DAY)
  call('ZADD', index, now, lane)
end
return expired
