-- Returns what has changed since a version of generation `known`, at most `limit` workers and as many
-- cards; everything from the start (since 0) if that generation has ended. By place: the generation,
-- the versions between which it was read, the last version, the time, {worker, version} * n
-- and their records, {worker removed, version} * n, {model, version} * n and their cards. On the last
-- page, which reaches version `goal` (0: the last one), also: the number of workers, {worker silent
-- for `silent_ms`, last heartbeat} * n, the failures and the leader, and the workers and the models
-- that changed after this page.
local now, last, current = clock(), tonumber(call('GET', counter) or 0), call('GET', generation) or ''
if current ~= known or since > last then since, goal = 0, 0 end
if goal == 0 then goal = last end

local function text(version) return string.format('%.0f', version) end

local function bound(index)            -- the version of the last entry on a page
  local found = call('ZRANGEBYSCORE', index, '(' .. text(since), '+inf', 'WITHSCORES', 'LIMIT', limit - 1, 1)
  return tonumber(found[2]) or last
end
local upto = math.min(bound(changes), bound(card_changes))

local function changed(index, hash)
  local found, names = call('ZRANGEBYSCORE', index, '(' .. text(since), text(upto), 'WITHSCORES'), {}
  for at = 1, #found, 2 do names[#names + 1] = found[at] end
  return found, #names > 0 and call('HMGET', hash, unpack(names)) or {}
end
local ids, records = changed(changes, workers)
local models, contents = changed(card_changes, cards)
local removed = call('ZRANGEBYSCORE', gone, '(' .. text(since), text(upto), 'WITHSCORES')
local page = {current, text(since), text(upto), text(last), now, ids, records, removed, models, contents}
if upto < goal then return page end
page[11] = call('ZCARD', changes)
page[12] = call('ZRANGEBYSCORE', heard, '-inf', now - silent_ms, 'WITHSCORES')
page[13] = call('HGETALL', failures)
page[14] = call('HMGET', leader, 'scheduler', 'fence', 'plan', 'plan_ms', 'desired', 'cold_starts')
page[15] = call('ZRANGEBYSCORE', changes, '(' .. text(upto), '+inf')
page[16] = call('ZRANGEBYSCORE', card_changes, '(' .. text(upto), '+inf')
return page
