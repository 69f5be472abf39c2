"""The observer finds nothing wrong with a queue that is right, and everything that is wrong with
one that is not.
"""

from __future__ import annotations

from dataclasses import replace

from redis.asyncio import Redis

from libs.queue import LaneKey, Lanes, QueuedJob
from libs.queue.keys import KEYS, RedisKeys
from tests.chaos.observer import LaneSnapshot, Observer, unfairness

LANE = LaneKey("cpu", "org/model")
HOUR_MS = 3_600_000
KEY_OF = dict(zip(KEYS, RedisKeys(1).lane_keys(LANE), strict=True))


async def filled(redis: Redis) -> tuple[Lanes, Observer]:
    """Six jobs of 10 tokens: one answered, three leased, two waiting."""
    lanes = Lanes(redis, router_id="router", dead_result=b"")
    deadline_ms = await lanes.now_ms() + HOUR_MS
    jobs = [
        QueuedJob(f"job-{number}", "acme", 1.0, 10, deadline_ms, "interactive", b"job")
        for number in range(6)
    ]
    await lanes.enqueue(LANE, [[job] for job in jobs], max_tokens=1000, notify=False)
    first = await lanes.pull(LANE, worker_id="w", budget_tokens=10, budget_jobs=1)
    assert hasattr(first, "batch_id")
    await lanes.complete(LANE, "w", first.batch_id, [("job-0", b"answer")], release=True)
    await lanes.pull(LANE, worker_id="w", budget_tokens=30, budget_jobs=3)
    return lanes, Observer(redis, lambda: True)


async def problems(observer: Observer) -> str:
    return "; ".join(problem for lane in await observer.snapshots() for problem in lane.problems())


async def test_queue_at_work_has_no_problems_and_is_not_idle(redis: Redis) -> None:
    _, observer = await filled(redis)
    (lane,) = await observer.snapshots()
    assert (len(lane.waiting), len(lane.unfinished), len(lane.batches), lane.done()) == (2, 5, 1, 1)
    assert list(lane.problems()) == []
    left = " ".join(await observer.leftovers())
    assert "2 waiting jobs" in left
    assert "5 unfinished jobs" in left
    assert "30 leased tokens" in left


async def test_idle_queue_leaves_nothing(redis: Redis) -> None:
    lanes, observer = await filled(redis)
    await lanes.fail_all(LANE, b"failed")
    (lane,) = await observer.snapshots()
    (batch_id,) = lane.batches
    await lanes.complete(
        LANE, "w", batch_id, [(f"job-{number}", b"answer") for number in range(1, 4)], release=True
    )
    await lanes.take_replies(0)
    assert await observer.leftovers() == []


async def test_each_broken_invariant_is_seen(redis: Redis) -> None:
    _, observer = await filled(redis)
    await redis.hincrby(KEY_OF["meta"], "leased", 7)
    assert "37 tokens are said to be leased, and 30 are" in await problems(observer)
    await redis.hincrby(KEY_OF["meta"], "leased", -7)
    await redis.hincrby(KEY_OF["meta"], "done", 1)
    assert "I3" in await problems(observer)
    await redis.hincrby(KEY_OF["meta"], "done", -1)
    (lane,) = await observer.snapshots()
    member, tag = next(iter(lane.waiting.items()))
    await redis.zrem(KEY_OF["interactive"], member)
    assert "is in 0 places" in await problems(observer)
    await redis.zadd(KEY_OF["interactive"], {member: tag})
    assert await problems(observer) == ""
    await redis.delete(KEY_OF["leases"])
    assert "differ" in await problems(observer)


async def test_unfetched_answers_are_reported(redis: Redis) -> None:
    _, observer = await filled(redis)
    await redis.rpush(RedisKeys(1).replies("other")[0], b"answer")
    assert "answers that nobody fetched" in " ".join(await observer.leftovers())


def test_unfair_order_is_seen() -> None:
    tenants = {f"job-{number}": "acme" if number % 2 else "zoo" for number in range(20)}
    waiting = {f"i:10:1:job-{number}": float(number) for number in range(20)}
    lane = LaneSnapshot("lane", 0, waiting, set(), {}, {}, {}, {}, False)
    weights = {"acme": 1.0, "zoo": 1.0}
    assert list(unfairness(lane, tenants, weights)) == []
    assert list(unfairness(lane, tenants, {**weights, "zoo": 4.0}))
    ahead = {
        member: tag if "job-" + str(2 * (int(tag) // 2)) in member else tag / 4
        for member, tag in waiting.items()
    }
    assert list(unfairness(replace(lane, waiting=ahead), tenants, weights))
