if redis.call('GET', claim) ~= worker_id then return 0 end
return redis.call('DEL', claim)
