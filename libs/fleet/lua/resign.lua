if tonumber(redis.call('HGET', leader, 'fence')) ~= fence then return 0 end
return redis.call('DEL', leader)
