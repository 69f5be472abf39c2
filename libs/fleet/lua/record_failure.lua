-- doublings: maximum doublings of the time, one with every further failure; 0: never, and failures
-- are not counted.
if doublings > 0 then
  last_ms = last_ms * 2 ^ math.min(call('HINCRBY', strikes, field, 1) - 1, doublings)
  call('PEXPIRE', strikes, 2 * DAY)
end
call('HSET', failures, field, string.format('%d ', clock() + last_ms) .. failure)
call('PEXPIRE', failures, DAY)
