-- Removes a worker that has not been heard of since `heard_ms`. Answers 1, or 0 if it has, or is not known.
local value = redis.call('HGET', workers, worker_id)
if not value or string.match(value, '^(%d+) ') ~= heard_ms then return 0 end
return redis.call('HDEL', workers, worker_id)
