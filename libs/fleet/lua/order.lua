-- fence: of the scheduler that gives the order (0: an operator).
-- claim_ms: take the claim for the worker, unless another that is not among `known` has it (0: no
-- claim).
-- Numbers are times, so that they still rise after Redis lost its data.
-- Returns the number; 0: another worker has the claim; -1: another scheduler leads.
if fence > 0 and tonumber(call('HGET', leader, 'fence')) ~= fence then return -1 end
if claim_ms > 0 then
  local holder = call('GET', claim)
  local is_known = holder == worker_id
  for at = known, #ARGV do is_known = is_known or ARGV[at] == holder end
  if holder and not is_known then return 0 end
  call('SET', claim, worker_id, 'PX', claim_ms)
end
local now, last = clock(), call('ZRANGE', orders, -1, -1, 'WITHSCORES')[2]
local number = math.max(now, (tonumber(last) or 0) + 1)
call('ZREMRANGEBYSCORE', orders, '-inf', now - DAY)
call('ZADD', orders, number, string.format('%d ', number) .. directive)
call('PEXPIRE', orders, DAY)
call('PUBLISH', channel, wakeup)
return number
