-- Renews the lead of the holder of this fencing number, or takes a free lead. Returns the number,
-- or 0 if another leads.
-- Numbers are at least the time in seconds, so that they still rise after Redis lost its data.
local held = tonumber(call('HGET', leader, 'fence'))
if held and (held ~= fence or call('HGET', leader, 'scheduler') ~= scheduler_id) then return 0 end
if not held then
  local now = clock()
  fence = math.max(math.floor(now / 1000), tonumber(call('GET', fences) or 0) + 1, fence + 1)
  call('SET', fences, string.format('%d', fence), 'PX', DAY)
  call('HSET', leader, 'fence', string.format('%d', fence), 'scheduler', scheduler_id, 'plan', '0', 'plan_ms', now)
end
call('PEXPIRE', leader, last_ms)
return fence
