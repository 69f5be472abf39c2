-- Returns {queued tokens, leased tokens, interactive jobs, bulk jobs, and for each tenant the jobs
-- of either class that precede one enqueued now}: those with a start tag up to the one that
-- `enqueue` would assign.
local state = call('HMGET', meta, 'queued', 'leased', 'vi', 'vb')
local answer = { tonumber(state[1] or 0), tonumber(state[2] or 0), call('ZCARD', interactive), call('ZCARD', bulk) }

local function before(queue, tags, virtual, tenant)
  local start = math.max(tonumber(virtual or 0), tonumber(call('HGET', tags, tenant) or 0))
  answer[#answer + 1] = call('ZCOUNT', queue, '-inf', start)
end

for at = tenants, #ARGV do
  before(interactive, tags_i, state[3], ARGV[at])
  before(bulk, tags_b, state[4], ARGV[at])
end
return answer
