-- Writes a router's aliases back if Redis has lost them, or has older ones.
-- values: {name, revision and Alias} * n.
if tonumber(redis.call('HGET', aliases, ':revision') or 0) >= revision then return 0 end
redis.call('DEL', aliases)
redis.call('HSET', aliases, ':revision', string.format('%d', revision))
for at = values, #ARGV, 2 do redis.call('HSET', aliases, ARGV[at], ARGV[at + 1]) end
return 1
