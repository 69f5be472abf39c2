"""Redis that is wrong, away, forgetful or full; and the wakeups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from redis.asyncio import Redis

from libs.errors import NoCapacity
from libs.queue import (
    Idle,
    LaneKey,
    Lanes,
    Pulled,
    UnsuitableRedis,
    WakeupLeft,
    WorkerWakeup,
    connect,
    open_all,
)
from libs.queue.keys import LAYOUT, WAKEUP_CHANNEL
from libs.versions import LAYOUT_VERSION
from tests.queue.parts import DEAD, LANE, Clock, add, ids, job, lease, make_lanes
from tests.support.redis import RedisServer


@pytest.fixture
def frail() -> Iterator[RedisServer]:
    """A server of the test's own, with AOF, that may be killed."""
    with RedisServer(durable=True) as running:
        yield running


async def test_good_redis_passes_and_sets_the_clock(redis: Redis) -> None:
    lanes = Lanes(redis, router_id="a", dead_result=DEAD)
    await lanes.check()
    seconds, _ = await redis.time()
    assert abs(lanes.clock_ms() - seconds * 1000) < 60_000
    await lanes.enqueue(
        LANE, [[job("a", deadline_ms=await lanes.now_ms() + 60_000)]], max_tokens=10, notify=False
    )
    assert ids(await lease(lanes)) == ["a"]


async def test_redis_that_evicts_is_refused_with_advice(redis: Redis, lanes: Lanes) -> None:
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(UnsuitableRedis, match="CONFIG SET maxmemory-policy noeviction"):
            await lanes.check()
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")


async def test_data_of_another_layout_is_refused_with_advice(
    redis: Redis, lanes: Lanes, other: Lanes
) -> None:
    await lanes.check()
    assert await redis.get(LAYOUT) == str(LAYOUT_VERSION).encode()
    await other.check()
    await redis.set(LAYOUT, LAYOUT_VERSION + 1)
    with pytest.raises(
        UnsuitableRedis,
        match=rf"layout {LAYOUT_VERSION + 1} .* reads layout {LAYOUT_VERSION}: run the version",
    ):
        await lanes.check()


async def test_data_in_another_number_of_slots_is_refused_with_advice(
    redis: Redis, lanes: Lanes
) -> None:
    await Lanes(redis, router_id="a", dead_result=DEAD, slots=16).check()
    for slots in (1, 4):
        with pytest.raises(UnsuitableRedis, match=r"with 16 slots .* the same SHOAL_QUEUE_SLOTS"):
            await Lanes(redis, router_id="b", dead_result=DEAD, slots=slots).check()
    await redis.delete(LAYOUT)
    await lanes.check()
    with pytest.raises(UnsuitableRedis, match=rf"holds layout {LAYOUT_VERSION} "):
        await Lanes(redis, router_id="b", dead_result=DEAD, slots=16).check()


async def test_scripts_that_redis_forgot_are_loaded_again(
    lanes: Lanes, other: Lanes, redis: Redis
) -> None:
    await redis.script_flush()
    await add(other, job("a"), job("b"), job("c"))
    await redis.script_flush()
    pulled = await lease(lanes, 20)
    await redis.script_flush()
    assert not (await lanes.renew(LANE, "w", [pulled.batch_id]))[0].lost
    await redis.script_flush()
    assert (
        await lanes.complete(LANE, "w", pulled.batch_id, [("a", b"x"), ("b", b"y")], release=True)
    ).accepted == 2
    await redis.script_flush()
    assert await other.cancel(LANE, [job("c")]) == 1
    await redis.script_flush()
    await lanes.sweep(LANE)
    await redis.script_flush()
    assert await lanes.fail_all(LANE, b"x") == 0


async def test_redis_that_is_away_is_no_capacity(frail: RedisServer, clock: Clock) -> None:
    redis = connect(frail.url)
    lanes = make_lanes(redis, clock, "a")
    await add(lanes, job("a"), job("b"))
    frail.kill()
    for attempt in (
        lambda: add(lanes, job("c")),
        lambda: lease(lanes),
        lambda: lanes.complete(LANE, "w", "x", [], release=True),
        lambda: lanes.renew(LANE, "w", ["x"]),
        lambda: lanes.cancel(LANE, [job("a")]),
        lambda: lanes.missing(LANE, ["a"]),
        lambda: lanes.take_replies(0.1),
        lambda: lanes.lane_gauges(),
        lambda: lanes.check(),
    ):
        with pytest.raises(NoCapacity):
            await attempt()
    frail.start()
    assert ids(await lease(lanes)) == ["a", "b"]
    await redis.aclose()


async def connections(redis: Redis) -> int:
    return int((await redis.info("clients"))["connected_clients"])


async def test_all_connections_can_be_opened_at_once(frail: RedisServer) -> None:
    """The pool opens as many connections as that number of concurrent commands would, and no more
    later.
    """
    redis = connect(frail.url, max_connections=7)
    assert await connections(redis) == 1
    await open_all(redis)
    assert await connections(redis) == 7
    await asyncio.gather(*(redis.blpop(["nothing"], timeout=0.1) for _ in range(20)))
    assert await connections(redis) == 7
    await redis.aclose()


async def test_all_connections_can_be_opened_next_to_that_of_the_scripts(
    frail: RedisServer,
) -> None:
    redis = connect(frail.url, max_connections=7)
    await add(make_lanes(redis, Clock(), "a"), job("a"))
    async with asyncio.timeout(60):
        await open_all(redis)
    assert await connections(redis) == 7
    await redis.aclose()


async def test_connections_that_cannot_be_opened_are_no_capacity_and_are_opened_later(
    frail: RedisServer,
) -> None:
    redis = connect(frail.url, max_connections=7)
    frail.kill()
    with pytest.raises(NoCapacity):
        await open_all(redis)
    frail.start()
    await open_all(redis)
    assert await connections(redis) == 7
    await redis.aclose()


async def test_opening_that_is_cut_off_keeps_no_connection_in_use() -> None:
    """The server accepts connections and answers nothing, not even a password."""

    async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(says_nothing, "127.0.0.1", 0) as server:
        redis = connect(
            f"redis://:secret@127.0.0.1:{server.sockets[0].getsockname()[1]}", max_connections=3
        )
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await open_all(redis)
        assert not redis.connection_pool._in_use_connections
        await redis.aclose()


async def test_full_redis_takes_nothing_in_but_can_be_drained(
    lanes: Lanes, other: Lanes, redis: Redis
) -> None:
    await add(other, *(job(f"{number}") for number in range(100)))
    await redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(NoCapacity, match="memory"):
            await add(lanes, job("x"))
        for _ in range(10):
            pulled = await lease(lanes, budget_jobs=10)
            await lanes.complete(
                LANE, "w", pulled.batch_id, [(job_id, b"x") for job_id in ids(pulled)], release=True
            )
        assert len(await other.take_replies(0)) == 100
    finally:
        await redis.config_set("maxmemory", 0)


async def test_taking_replies_waits_for_one(lanes: Lanes, other: Lanes) -> None:
    await add(other, job("a"))
    waiting = asyncio.create_task(other.take_replies(60))
    await lanes.complete(LANE, "w", (await lease(lanes)).batch_id, [("a", b"x")], release=True)
    assert await waiting == [("a", b"x")]


async def test_taking_replies_ends_when_there_are_none(lanes: Lanes) -> None:
    assert await lanes.take_replies(0.01) == []


async def test_wakeup_of_a_lane_that_no_router_watches_reaches_all(
    lanes: Lanes, other: Lanes
) -> None:
    heard = [lanes.wakeups(), other.wakeups()]
    assert [await anext(wakeups) for wakeups in heard] == [None, None]
    await lanes.enqueue(LANE, [[job("a"), job("b")]], max_tokens=100, notify=True)
    assert [await anext(wakeups) for wakeups in heard] == [LANE, LANE]
    # A release notifies all of the jobs it returns.
    pulled = await lanes.pull(LANE, worker_id="w", budget_tokens=10, budget_jobs=1)
    await lanes.complete(LANE, "w", getattr(pulled, "batch_id", ""), [], release=True)
    assert [await anext(wakeups) for wakeups in heard] == [LANE, LANE]
    for wakeups in heard:
        await wakeups.aclose()


async def test_wakeup_reaches_only_routers_that_found_the_lane_empty(
    lanes: Lanes, other: Lanes, as_router: Redis, clock: Clock
) -> None:
    third = make_lanes(as_router, clock, "c")
    heard = [other.wakeups(), third.wakeups()]
    assert [await anext(wakeups) for wakeups in heard] == [None, None]

    async def enqueue(name: str, *, everywhere: bool = False) -> None:
        await lanes.enqueue(LANE, [[job(name)]], max_tokens=100, notify=True, everywhere=everywhere)

    async def assert_heard(*expected: Sequence[LaneKey | WakeupLeft]) -> None:
        """Assert that these are all wakeups of lanes since the last call."""
        await as_router.publish(WAKEUP_CHANNEL, WorkerWakeup("end").message)
        for wakeups, own in zip(heard, expected, strict=True):
            assert [await anext(wakeups) for _ in own] == own
            assert await anext(wakeups) == WorkerWakeup("end")

    async def pull(router: Lanes, jobs: int, *excluded: str) -> int:
        pulled = await router.pull(
            LANE,
            worker_id="w",
            budget_tokens=1000,
            budget_jobs=jobs,
            notify=not excluded,
            exclude_tenants=excluded,
        )
        return len(pulled.jobs) if isinstance(pulled, Pulled) else 0

    assert await pull(other, 1) == 0
    await enqueue("a")
    await enqueue("b")  # `other` reads the lane before it counts it as empty again
    await assert_heard([LANE], [])
    assert await pull(other, 2) == 2  # and leaves it empty
    await enqueue("c")
    await assert_heard([LANE], [])
    assert await pull(third, 1) == 1
    await enqueue("d", everywhere=True)
    await enqueue("e", everywhere=True)  # not the first one that waits
    await assert_heard([LANE], [LANE, LANE])
    assert (await pull(lanes, 256), await pull(other, 1), await pull(third, 1)) == (2, 0, 0)
    await add(lanes, job("f"), job("g"), job("h"))
    assert await pull(lanes, 1) == 1
    assert await pull(lanes, 1) == 1  # the routers know of the jobs that are left
    await assert_heard([WakeupLeft(LANE)], [WakeupLeft(LANE)])
    assert await pull(third, 1, "t") == 0
    await add(lanes, job("i"))
    assert await pull(lanes, 1) == 1
    await assert_heard([], [])  # the job that is left is of the tenant that `third` excludes
    await enqueue("j")
    await assert_heard([], [LANE])
    assert (await pull(lanes, 2), await pull(third, 1), await pull(third, 1, "t")) == (2, 0, 0)
    await enqueue("k")
    await assert_heard([], [LANE])  # once, though it watches for two reasons
    for wakeups in heard:
        await wakeups.aclose()


async def test_pull_from_an_empty_lane_of_a_full_redis_is_idle(
    lanes: Lanes, other: Lanes, redis: Redis
) -> None:
    """Redis cannot record that the router watches the lane: the next job notifies all routers."""
    wakeups = other.wakeups()
    await anext(wakeups)
    await redis.config_set("maxmemory", 1)
    try:
        assert await other.pull(LANE, worker_id="w", budget_tokens=1, budget_jobs=1) == Idle(None)
    finally:
        await redis.config_set("maxmemory", 0)
    await lanes.enqueue(LANE, [[job("a")]], max_tokens=100, notify=True)
    assert await anext(wakeups) == LANE
    await wakeups.aclose()


async def test_wakeup_of_a_worker_differs_from_those_of_lanes(lanes: Lanes, redis: Redis) -> None:
    workers = [WorkerWakeup("gpu-1"), WorkerWakeup("!odd | name")]
    wakeups = lanes.wakeups()
    await anext(wakeups)
    await redis.publish(WAKEUP_CHANNEL, workers[0].message)
    odd = LaneKey("!pool", "!org/model", "!org/adapter")
    await lanes.enqueue(odd, [[job("a")]], max_tokens=100, notify=True)
    await redis.publish(WAKEUP_CHANNEL, workers[1].message)
    assert [await anext(wakeups) for _ in range(3)] == [workers[0], odd, workers[1]]
    await wakeups.aclose()


async def test_no_notification_without_a_request_for_one(lanes: Lanes, other: Lanes) -> None:
    wakeups = other.wakeups()
    await anext(wakeups)
    await add(lanes, job("a"), job("b"))
    await lanes.pull(LANE, worker_id="w", budget_tokens=10, budget_jobs=1)
    await lanes.pull(LANE, worker_id="w", budget_tokens=10, budget_jobs=1)
    await other.pull(LANE, worker_id="w", budget_tokens=10, budget_jobs=1)
    await lanes.enqueue(LANE, [[job("c")]], max_tokens=100, notify=True)
    assert await anext(wakeups) == LANE
    waiting = asyncio.ensure_future(anext(wakeups))
    assert (await asyncio.wait([waiting], timeout=0.05))[1]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_wakeups_report_that_notifications_may_have_been_missed(
    frail: RedisServer, clock: Clock
) -> None:
    redis = connect(frail.url)
    lanes = make_lanes(redis, clock, "a")
    wakeups = lanes.wakeups()
    assert await anext(wakeups) is None
    frail.kill()
    with pytest.raises(NoCapacity):
        await anext(wakeups)
    frail.start()
    wakeups = lanes.wakeups()
    assert await anext(wakeups) is None
    await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    with pytest.raises(NoCapacity):
        await anext(wakeups)
    wakeups = lanes.wakeups()
    assert await anext(wakeups) is None
    await lanes.enqueue(LANE, [[job("a")]], max_tokens=100, notify=True)
    assert await anext(wakeups) == LANE
    await wakeups.aclose()
    await redis.aclose()


async def test_wakeups_of_a_redis_that_resets_every_subscription_end_with_a_reason() -> None:
    """It lets us in and breaks off when asked for anything, for as long as it takes: no number of
    tries may add up.
    """
    connections = 0

    async def breaks_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read(1)
        writer.transport.abort()

    async with await asyncio.start_server(breaks_off, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = connect(f"redis://127.0.0.1:{port}")
        for _ in range(3):
            with pytest.raises(NoCapacity, match="cannot be reached"):
                await anext(make_lanes(client, Clock(), "a").wakeups())
        await client.aclose()
        assert 3 <= connections <= 12
