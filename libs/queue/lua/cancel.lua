-- Returns how many jobs it ended, and notifies each worker that holds one of them (WorkerWakeup):
-- the reply to its next heartbeat names them. Jobs for which another router waits now are left
-- alone.
local ids, own, workers, cancelled = { unpack(ARGV, job_ids) }, {}, {}, 0
for position, router in ipairs((lookup(ids))) do
  if router == router_id then own[#own + 1] = ids[position] end
end
if #own == 0 then return 0 end
for _, held in ipairs(call('HMGET', holders, unpack(own))) do
  if held then workers[string.match(string.match(held, '^[^\t]*'), '^(.-) *$')] = true end
end
for _, router in ipairs(finish(own)) do cancelled = cancelled + (router and 1 or 0) end
count('cancelled', cancelled)
settle()
for worker in pairs(workers) do call('PUBLISH', channel, '!' .. worker) end
return cancelled
