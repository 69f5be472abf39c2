-- Returns the routers that have been silent for longer than `last_ms`, and forgets them.
local now = clock()
call('ZADD', routers, now, router_id)
call('PEXPIRE', routers, DAY)
local silent = call('ZRANGEBYSCORE', routers, '-inf', now - last_ms)
call('ZREMRANGEBYSCORE', routers, '-inf', now - last_ms)
return silent
