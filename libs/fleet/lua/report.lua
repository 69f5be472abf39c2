-- new_cards: {model, card} * n. Returns the time.
local now = clock()
if leaving then call('HDEL', workers, worker_id) else call('HSET', workers, worker_id, now .. ' ' .. heartbeat) end
call('PEXPIRE', workers, DAY)
for at = new_cards, #ARGV, 2 do call('HSET', cards, ARGV[at], ARGV[at + 1]) end
call('PEXPIRE', cards, 7 * DAY)
return now
