if redis.call('GET', claim) ~= worker_id then return 0 end
return redis.call('PEXPIRE', claim, last_ms)
