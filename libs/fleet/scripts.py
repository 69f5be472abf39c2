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


@script("workers")
async def forget(*, worker_id: str, heard_ms: str) -> Reply:
    """
    -- Removes a worker that has not been heard of since `heard_ms`. Answers 1, or 0 if it has, or is not known.
    local value = redis.call('HGET', workers, worker_id)
    if not value or string.match(value, '^(%d+) ') ~= heard_ms then return 0 end
    return redis.call('HDEL', workers, worker_id)
    """


@script("failures", "strikes", library=LIBRARY)
async def record_failure(*, field: str, failure: bytes, last_ms: int, doublings: int) -> Reply:
    """
    -- doublings: how often the time doubles with every further failure at most; 0: it does not, and failures are not counted.
    if doublings > 0 then
      last_ms = last_ms * 2 ^ math.min(call('HINCRBY', strikes, field, 1) - 1, doublings)
      call('PEXPIRE', strikes, 2 * DAY)
    end
    call('HSET', failures, field, string.format('%d ', clock() + last_ms) .. failure)
    call('PEXPIRE', failures, DAY)
    """


@script("failures", "strikes", library=LIBRARY)
async def forgive(*, last_ms: int, doublings: int, fields: Rest) -> Reply:
    """
    -- Forgets those failures of which half the time is over. Answers how many.
    local now, forgiven = clock(), 0
    for at = fields, #ARGV do
      local failure, count = call('HGET', failures, ARGV[at]), tonumber(call('HGET', strikes, ARGV[at]) or 1)
      local half = last_ms * 2 ^ math.min(count - 1, doublings) / 2
      if failure and tonumber(string.match(failure, '^(%d+) ')) <= now + half then
        forgiven = forgiven + call('HDEL', failures, ARGV[at])
      end
    end
    return forgiven
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


@script("orders", "leader", "claim", library=LIBRARY)
async def order(*, directive: bytes, bell: str, ring: str, worker_id: str, fence: int, claim_ms: int, known: Rest) -> Reply:
    """
    -- fence: of the scheduler that gives the order (0: an operator does). claim_ms: take the claim for the worker, unless another
    -- that is not among `known` has it (0: no claim). Numbers are times, so that they still rise after Redis lost its data.
    -- Answers the number; 0: another worker has the claim; -1: another scheduler leads.
    if fence > 0 and tonumber(call('HGET', leader, 'fence')) ~= fence then return -1 end
    if claim_ms > 0 then
      local holder = call('GET', claim)
      local is_known = holder == worker_id
      for at = known, #ARGV do is_known = is_known or ARGV[at] == holder end
      if holder and not is_known then return 0 end
      call('SET', claim, worker_id, 'PX', claim_ms)
    end
    local now, last = clock(), call('ZRANGE', orders, -1, -1, 'WITHSCORES')[2]
    local number = math.max(now, (tonumber(last) or 0) + 1)
    call('ZREMRANGEBYSCORE', orders, '-inf', now - DAY)
    call('ZADD', orders, number, string.format('%d ', number) .. directive)
    call('PEXPIRE', orders, DAY)
    call('PUBLISH', bell, ring)
    return number
    """


@script("leader", "fences", library=LIBRARY)
async def lead(*, scheduler_id: str, fence: int, last_ms: int) -> Reply:
    """
    -- Renews the lead of who has this fencing number, or takes it if it is free. Answers the number, or 0 if another leads.
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
    """


@script("leader")
async def resign(*, fence: int) -> Reply:
    """
    if tonumber(redis.call('HGET', leader, 'fence')) ~= fence then return 0 end
    return redis.call('DEL', leader)
    """


@script("leader", "notes", library=LIBRARY)
async def note_plan(*, fence: int, plan: str, desired: str, anew: bool, changed: Rest) -> Reply:
    """
    -- desired: a JSON object, workers by pool. changed: {model, note, or '' to drop the model's} * n. anew: drop all others.
    -- Answers 0 if another scheduler leads.
    if tonumber(call('HGET', leader, 'fence')) ~= fence then return 0 end
    call('HSET', leader, 'plan', plan, 'plan_ms', clock(), 'desired', desired)
    if anew then call('DEL', notes) end
    for at = changed, #ARGV, 2 do
      if ARGV[at + 1] == '' then call('HDEL', notes, ARGV[at]) else call('HSET', notes, ARGV[at], ARGV[at + 1]) end
    end
    call('PEXPIRE', notes, DAY)
    return 1
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
