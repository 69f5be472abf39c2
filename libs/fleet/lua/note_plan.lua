-- desired and cold_starts: JSON objects, workers and seconds by pool.
-- changed: {model, note, or '' to drop the model's} * n. replace: drop all others.
-- Returns 0 if another scheduler leads.
if tonumber(call('HGET', leader, 'fence')) ~= fence then return 0 end
call('HSET', leader, 'plan', plan, 'plan_ms', clock(), 'desired', desired, 'cold_starts', cold_starts)
if replace then call('DEL', notes) end
for at = changed, #ARGV, 2 do
  if ARGV[at + 1] == '' then call('HDEL', notes, ARGV[at]) else call('HSET', notes, ARGV[at], ARGV[at + 1]) end
end
call('PEXPIRE', notes, DAY)
return 1
