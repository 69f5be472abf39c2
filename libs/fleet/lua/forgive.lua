-- Forgets the failures after half of their backoff. Returns how many.
local now, forgiven = clock(), 0
for at = fields, #ARGV do
  local failure, count = call('HGET', failures, ARGV[at]), tonumber(call('HGET', strikes, ARGV[at]) or 1)
  local half = last_ms * 2 ^ math.min(count - 1, doublings) / 2
  if failure and tonumber(string.match(failure, '^(%d+) ')) <= now + half then
    forgiven = forgiven + call('HDEL', failures, ARGV[at])
  end
end
return forgiven
