"""Operations off the path of a job: counters, repair, and cleanup."""

from __future__ import annotations

from redis.asyncio import Redis

from libs.queue import Idle, LaneGauges, LaneKey, Lanes
from libs.queue.keys import RedisKeys
from tests.queue.parts import (
    DEAD,
    LANE,
    LEASE_MS,
    NOTHING,
    Clock,
    add,
    gauges,
    ids,
    job,
    lease,
    look_inside,
    raw,
)


async def test_gauges_count_every_job_once(lanes: Lanes, clock: Clock) -> None:
    await add(
        lanes,
        *(job(name, deadline_ms=clock.ms + 50) for name in "ab"),
        *(job(name) for name in "cdefgh"),
    )
    await lanes.cancel(LANE, [job("h")])
    clock.ms += 50
    pulled = await lease(lanes, 30)
    await lanes.complete(LANE, "w", pulled.batch_id, [("c", b"x"), ("d", b"x")], release=False)
    assert await gauges(lanes) == LaneGauges(
        LANE,
        queued_jobs=2,
        queued_tokens=20,
        leased_tokens=30,
        enqueued=8,
        done=2,
        expired=2,
        dead=0,
        cancelled=1,
        enqueued_tokens=80,
    )


async def test_gauges_name_every_lane(lanes: Lanes) -> None:
    others = [
        LaneKey("l4-spot", "org/name@main", "adapter 1"),
        LaneKey("cpu", "a:b{c}|d|%", ""),
        LANE,
    ]
    for lane in others:
        await lanes.enqueue(lane, [[job("a")]], max_tokens=10, notify=False)
    assert {one.lane for one in await lanes.lane_gauges()} == set(others)


async def test_idle_lane_keeps_only_keys_that_expire(
    lanes: Lanes, other: Lanes, clock: Clock, redis: Redis
) -> None:
    jobs = [
        job(f"{number}", tenant=f"{number}", priority="bulk" if number % 2 else "interactive")
        for number in range(20)
    ]
    await add(other, *jobs)
    suspects = await lease(lanes, 50)
    clock.ms += LEASE_MS
    while not isinstance(
        pulled := await lanes.pull(LANE, worker_id="w", budget_tokens=50, budget_jobs=5), Idle
    ):
        await lanes.complete(
            LANE, "w", pulled.batch_id, [(job_id, b"x") for job_id in ids(pulled)], release=True
        )
    assert len(suspects.jobs) == 5
    assert await look_inside(redis) == NOTHING
    index = RedisKeys(1).indexes()[0]
    lasting = [key for key in await redis.keys("*") if await redis.pttl(key) < 0]
    assert lasting == [index.encode()]
    # ... and the index forgets the lane after a day.
    clock.ms += 86_400_001
    assert await lanes.lane_gauges() == []
    assert await redis.exists(index) == 0


async def test_sweep_drops_expired_jobs_anywhere(lanes: Lanes, clock: Clock, redis: Redis) -> None:
    jobs = [
        job(f"{number}", deadline_ms=clock.ms + (10 if number % 2 else 1000))
        for number in range(20)
    ]
    await add(lanes, *jobs)
    clock.ms += 10
    await lanes.sweep(LANE)
    now = await gauges(lanes)
    assert (now.queued_jobs, now.queued_tokens, now.expired) == (10, 100, 10)
    clock.ms += 1000
    await lanes.sweep(LANE)
    assert (await gauges(lanes)).expired == 20
    assert await look_inside(redis) == NOTHING


async def test_sweep_revokes_expired_leases_without_pulls(redis: Redis, clock: Clock) -> None:
    lanes = Lanes(
        redis, router_id="a", dead_result=DEAD, lease_ms=LEASE_MS, max_attempts=1, clock=clock
    )
    await add(lanes, job("a"))
    await lease(lanes)
    clock.ms += LEASE_MS
    await lanes.sweep(LANE)
    assert await lanes.take_replies(0) == [("a", DEAD)]
    assert await look_inside(redis) == NOTHING


async def test_sweep_recounts_gauges_and_frees_stranded_jobs(lanes: Lanes, redis: Redis) -> None:
    await add(lanes, *(job(name) for name in "abcd"))
    pulled = await lease(lanes, 20)
    keys = RedisKeys(1).lane_keys(LANE)
    await redis.hset(keys[9], mapping={"queued": 7777, "leased": -5})
    await redis.hdel(keys[8], pulled.batch_id)  # as if Redis had lost part of its data
    await lanes.sweep(LANE)
    now = await gauges(lanes)
    assert (now.queued_tokens, now.leased_tokens) == (20, 0)
    assert await lanes.missing(LANE, list("abcd")) == ["a", "b"]
    assert (await look_inside(redis)).leases == set()


async def test_sweep_forgets_tenants_of_the_past(lanes: Lanes, redis: Redis) -> None:
    await add(lanes, *(job(f"{number}", tenant=f"tenant {number}") for number in range(50)))
    await lease(lanes)
    await add(lanes, *(job(f"more {number}", tenant="busy") for number in range(10)))
    await lease(lanes, 100)
    await lanes.sweep(LANE)
    assert (await look_inside(redis)).tenants == {"busy"}


async def test_sweep_leaves_a_healthy_lane_alone(lanes: Lanes, redis: Redis) -> None:
    await add(
        lanes,
        *(
            job(f"{number}", priority="bulk" if number % 2 else "interactive")
            for number in range(20)
        ),
    )
    await lease(lanes, 50)
    before, counted = await look_inside(redis), await gauges(lanes)
    await lanes.sweep(LANE)
    assert (await look_inside(redis), await gauges(lanes)) == (before, counted)


async def test_fail_all_answers_queued_jobs(lanes: Lanes, other: Lanes, redis: Redis) -> None:
    await add(lanes, *(job(f"{number}") for number in range(1100)), job("bulk", priority="bulk"))
    await add(other, job("theirs"))
    leased = await lease(lanes, 20)
    assert await lanes.fail_all(LANE, b"broken") == 1100
    assert await other.take_replies(0) == [("theirs", b"broken")]
    own: list[tuple[str, bytes]] = []
    while taken := await lanes.take_replies(0):
        own += taken
    assert len(own) == 1099
    assert {result for _, result in own} == {b"broken"}
    assert (await look_inside(redis)).payloads == set(ids(leased))


async def test_missing_returns_jobs_that_redis_lost(lanes: Lanes, redis: Redis) -> None:
    await add(lanes, job("a"), job("b"), job("c"))
    await lease(lanes, 10)
    assert await lanes.missing(LANE, ["a", "b", "c", "x"]) == ["x"]
    await redis.flushall()
    assert await lanes.missing(LANE, ["a", "b", "c"]) == ["a", "b", "c"]
    assert await add(lanes, job("a"), job("b"), job("c"))
    assert await lanes.missing(LANE, []) == []


async def test_late_answer_after_redis_forgot_ends_no_other_batch(
    lanes: Lanes, other: Lanes, redis: Redis
) -> None:
    await add(lanes, job("a"))
    old = await lease(lanes)
    await redis.flushall()
    await add(lanes, job("a"), job("b"))
    new = await lease(other)
    assert (await lanes.complete(LANE, "w", old.batch_id, [("a", b"x")], release=True)).own == []
    assert (await look_inside(redis)).leases == {new.batch_id}


async def test_replies_of_a_dead_router_can_be_dropped(
    lanes: Lanes, other: Lanes, redis: Redis
) -> None:
    await add(other, job("a"))
    await lanes.complete(LANE, "w", (await lease(lanes)).batch_id, [("a", b"x")], release=True)
    await lanes.drop_replies("b")
    assert await other.take_replies(0) == []


async def test_slots_keep_lanes_apart_and_replies_arrive_from_all(
    redis: Redis, clock: Clock
) -> None:
    a, b = (Lanes(redis, router_id=name, dead_result=DEAD, slots=4, clock=clock) for name in "ab")
    many = [LaneKey("cpu", f"org/model-{number}") for number in range(12)]
    for lane in many:
        await a.enqueue(lane, [[job(lane.model)]], max_tokens=10, notify=False)
        pulled = await b.pull(lane, worker_id="w", budget_tokens=10, budget_jobs=1)
        assert not isinstance(pulled, Idle)
        await b.complete(lane, "w", pulled.batch_id, [(lane.model, b"x")], release=True)
    assert {one.lane for one in await a.lane_gauges()} == set(many)
    assert {job_id for job_id, _ in await a.take_replies(1)} == {lane.model for lane in many}
    tags = {raw(key).split(b"}")[0] for key in await redis.keys("v1:*")}
    assert len(tags) > 1
