-- doublings: how often the time doubles with every further failure at most; 0: it does not, and failures are not counted.
if doublings > 0 then
  last_ms = last_ms * 2 ^ math.min(call('HINCRBY', strikes, field, 1) - 1, doublings)
  call('PEXPIRE', strikes, 2 * DAY)
end
call('HSET', failures, field, string.format('%d ', clock() + last_ms) .. failure)
call('PEXPIRE', failures, DAY)
