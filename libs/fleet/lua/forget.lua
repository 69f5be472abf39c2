-- Removes a worker without a heartbeat since `heard_ms`. Returns 1, or 0 if it has one or is
-- unknown.
local value = redis.call('HGET', workers, worker_id)
if not value or string.match(value, '^(%d+) ') ~= heard_ms then return 0 end
redis.call('HDEL', lists, worker_id)
redis.call('HDEL', tags, worker_id)
return redis.call('HDEL', workers, worker_id)
