"""The Redis operations of the registry that must happen whole. Times are Redis' own, so routers' clocks do not matter."""

from __future__ import annotations

from libs.queue.scripts import Reply, Rest, script

LIBRARY = """
local call = redis.call
local DAY = 86400000

local function clock()                 -- Unix ms
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""


@script("workers", "cards", library=LIBRARY)
async def report(*, worker_id: str, heartbeat: bytes, leaving: bool, new_cards: Rest) -> Reply:
    """
    -- new_cards: {model, card} * n. Answers the time.
    local now = clock()
    if leaving then call('HDEL', workers, worker_id) else call('HSET', workers, worker_id, now .. ' ' .. heartbeat) end
    call('PEXPIRE', workers, DAY)
    for at = new_cards, #ARGV, 2 do call('HSET', cards, ARGV[at], ARGV[at + 1]) end
    call('PEXPIRE', cards, 7 * DAY)
    return now
    """


@script("failures", library=LIBRARY)
async def record_failure(*, field: str, failure: bytes, last_ms: int) -> Reply:
    """
    call('HSET', failures, field, clock() + last_ms .. ' ' .. failure)
    call('PEXPIRE', failures, DAY)
    """


@script("claim")
async def renew_claim(*, worker_id: str, last_ms: int) -> Reply:
    """
    if redis.call('GET', claim) ~= worker_id then return 0 end
    return redis.call('PEXPIRE', claim, last_ms)
    """


@script("claim")
async def release_claim(*, worker_id: str) -> Reply:
    """
    if redis.call('GET', claim) ~= worker_id then return 0 end
    return redis.call('DEL', claim)
    """


@script("orders", library=LIBRARY)
async def order(*, directive: bytes) -> Reply:
    """
    -- Numbers are times, so that they still rise after Redis lost its data. Answers the number.
    local now, last = clock(), call('ZRANGE', orders, -1, -1, 'WITHSCORES')[2]
    local number = math.max(now, (tonumber(last) or 0) + 1)
    call('ZREMRANGEBYSCORE', orders, '-inf', now - DAY)
    call('ZADD', orders, number, string.format('%d ', number) .. directive)
    call('PEXPIRE', orders, DAY)
    return number
    """


@script("routers", library=LIBRARY)
async def beat(*, router_id: str, last_ms: int) -> Reply:
    """
    -- Answers the routers that have been silent for longer than `last_ms`, and forgets them.
    local now = clock()
    call('ZADD', routers, now, router_id)
    call('PEXPIRE', routers, DAY)
    local silent = call('ZRANGEBYSCORE', routers, '-inf', now - last_ms)
    call('ZREMRANGEBYSCORE', routers, '-inf', now - last_ms)
    return silent
    """
