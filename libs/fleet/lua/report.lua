-- new_cards: {model, card} * n, of which the first `changed` replace others. on_disk: the models on
-- its disk, '' if those of this tag are stored already. Returns the time, and whether they are
-- stored. A heartbeat with another tag is not stored: the worker's next one has its models on disk.
local now = clock()
local has_list = 0
if leaving then
  for _, key in ipairs({workers, lists, tags}) do call('HDEL', key, worker_id) end
else
  if tag == '' then
    call('HDEL', lists, worker_id)
    call('HDEL', tags, worker_id)
  elseif on_disk ~= '' then
    call('HSET', lists, worker_id, tag .. ' ' .. on_disk)
    call('HSET', tags, worker_id, tag)
    has_list = 1
  elseif call('HGET', tags, worker_id) == tag then
    has_list = 1
  else
    return {now, 0}
  end
  call('HSET', workers, worker_id, now .. ' ' .. heartbeat)
end
for _, key in ipairs({workers, lists, tags}) do call('PEXPIRE', key, DAY) end
local written = changed
for at = new_cards, #ARGV, 2 do
  if (at - new_cards) / 2 < changed then
    call('HSET', cards, ARGV[at], ARGV[at + 1])
  else
    written = written + call('HSETNX', cards, ARGV[at], ARGV[at + 1])
  end
end
if written > 0 then
  local time = call('TIME')
  call('SET', cards_revision, time[1] .. '.' .. time[2])
end
call('PEXPIRE', cards, 7 * DAY)
call('PEXPIRE', cards_revision, 7 * DAY)
return {now, has_list}
