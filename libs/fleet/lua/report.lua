-- repeated: the version of the stored record that this heartbeat repeats, of generation `known`;
-- '': store the heartbeat. new_cards: {model, card} * n, of which the first `changed` replace others.
-- on_disk: the models on its disk, '' if those of this tag are stored already. A heartbeat with
-- another tag is not stored: the worker's next one has its models on disk.
-- Returns the time, whether they are stored, the generation, the version of the record (0: there is
-- none; -1: the record is another one by now, or lost, so the heartbeat is needed in full), and that
-- of the first card.
local now = clock()
local has_list, version = 1, tonumber(repeated)
if leaving then
  has_list, version = 0, remove(worker_id)
elseif version then
  if call('GET', generation) ~= known or call('ZSCORE', changes, worker_id) ~= repeated or call('HEXISTS', workers, worker_id) == 0 then
    return {now, 0, '', -1, 0}
  end
  if tag ~= '' and call('HGET', tags, worker_id) ~= tag then return {now, 0, known, 0, 0} end
else
  if tag == '' then
    call('HDEL', lists, worker_id)
    call('HDEL', tags, worker_id)
    has_list = 0
  elseif on_disk ~= '' then
    call('HSET', lists, worker_id, tag .. ' ' .. on_disk)
    call('HSET', tags, worker_id, tag)
  elseif call('HGET', tags, worker_id) ~= tag then
    return {now, 0, '', 0, 0}
  end
  version = next_version(1)
  call('HSET', workers, worker_id, now .. ' ' .. heartbeat)
  call('ZADD', changes, string.format('%.0f', version), worker_id)
  call('ZREM', gone, worker_id)
end
if not leaving then
  call('ZADD', heard, now, worker_id)
  call('HSET', usage, worker_id, used)
end
local written = {}
for at = new_cards, #ARGV, 2 do
  if (at - new_cards) / 2 < changed then
    call('HSET', cards, ARGV[at], ARGV[at + 1])
    written[#written + 1] = ARGV[at]
  elseif call('HSETNX', cards, ARGV[at], ARGV[at + 1]) == 1 then
    written[#written + 1] = ARGV[at]
  end
end
local first = 0
if #written > 0 then
  first = next_version(#written)
  for at, model in ipairs(written) do call('ZADD', card_changes, string.format('%.0f', first + at - 1), model) end
end
expire()
return {now, has_list, call('GET', generation) or '', version, first}
