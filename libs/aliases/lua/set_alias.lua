-- value: a serialised Alias; '' removes the alias.
-- expected: the revision that the alias must have; 0: it must not exist; -1: any.
-- most: the maximum number of aliases.
-- Returns the revision; 0: the alias has another revision; -1: the alias to remove does not exist;
-- -2: the mesh has `most` aliases. A call that is repeated because its answer was lost finds its
-- value, or no alias to remove: that is not a conflict.
-- Revisions are times, so that they still rise after Redis lost its data.
local stored = call('HGET', aliases, name)
if value == '' and not stored then return -1 end
local revision = stored and tonumber(string.match(stored, '^(%d+) ')) or 0
if expected >= 0 and revision ~= expected then
  local is_repeated = stored and string.sub(stored, string.find(stored, ' ', 1, true) + 1) == value
  return is_repeated and revision or 0
end
if not stored and call('HLEN', aliases) > most then return -2 end   -- one field is the revision
local last = tonumber(call('HGET', aliases, ':revision') or 0)
local number = string.format('%d', math.max(clock(), last + 1))
call('HSET', aliases, ':revision', number)
call('HDEL', aliases, ':empty_since')
if value == '' then
  call('HDEL', aliases, name)
else
  call('HSET', aliases, name, number .. ' ' .. value)
end
return tonumber(number)
