-- Returns '0' and charges, or the seconds until it would pass, as text: Redis truncates numbers.
local at, paid = clock(now), call('HMGET', debts, 'requests', 'tokens')
local wait, requests_paid = until_passes(tonumber(paid[1] or 0), at, requests, requests_per_second, burst)
local wait_tokens, tokens_paid = until_passes(tonumber(paid[2] or 0), at, tokens, tokens_per_second, burst)
wait = math.max(wait, wait_tokens)
-- Ignore waits below the resolution: a double of this size has steps of a quarter of a microsecond.
if wait > 0.000001 and requests > 0 then return string.format('%.6f', wait) end
call('HSET', debts, 'requests', string.format('%.6f', requests_paid), 'tokens', string.format('%.6f', tokens_paid))
call('PEXPIRE', debts, math.ceil(math.max(requests_paid - at, tokens_paid - at, 0) * 1000) + 1000)
return '0'
