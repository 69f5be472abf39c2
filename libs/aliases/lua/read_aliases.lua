-- known: the revision of the aliases that the router uses now.
-- Returns the stored revision, the milliseconds since routers first found no aliases (0: aliases
-- exist), and the whole hash unless the router has it already.
local revision = tonumber(call('HGET', aliases, ':revision') or 0)
call('HSET', readers, router_id, string.format('%d %d', clock(), known))
call('PEXPIRE', readers, DAY)
local empty = 0
if revision == 0 then
  local since = tonumber(call('HGET', aliases, ':empty_since'))
  if not since then
    since = clock()
    call('HSET', aliases, ':empty_since', string.format('%d', since))
  end
  empty = clock() - since
end
if revision <= known then return {revision, empty} end
return {revision, empty, call('HGETALL', aliases)}
