"""What readers of the registry see of heartbeats, and which Redis commands that takes."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis
from shoal.v1 import models_pb2, worker_pb2

from libs.errors import NoCapacity
from libs.fleet import Fleet
from libs.fleet.reader import PAGE
from tests.fleet.test_registry import LOADING, RESIDENT, heartbeat, holds


async def calls(redis: Redis, command: str) -> int:
    stats: Any = await redis.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


def aged(seconds: float) -> worker_pb2.HeartbeatRequest:
    """The heartbeat of an idle worker after some time."""
    model = holds(
        RESIDENT,
        tokens_per_second=1000.0,
        idle_seconds=5.0 + seconds,
        resident_seconds=60.0 + seconds,
    )
    return heartbeat("w", model, memory_bytes=100)


async def test_heartbeat_that_says_nothing_new_costs_readers_nothing(
    fleet: Fleet, other: Fleet, redis: Redis
) -> None:
    await fleet.report(aged(0))
    await fleet.refresh()
    before = (await other.refresh()).workers["w"]
    await redis.config_resetstat()
    await fleet.report(aged(0.5))
    await other.report(aged(1.0))  # by another router, which has only read the record
    assert (await other.refresh()).workers["w"] is before
    assert (await fleet.refresh()).workers["w"].heartbeat_ms == before.heartbeat_ms
    assert await calls(redis, "hmget") == 2  # the leader
    assert await calls(redis, "hset") == 2  # the use of the device
    heard = await fleet.last_heartbeat("w")
    assert heard is not None
    assert heard[1] > before.heartbeat_ms
    assert (await other.usage())["w"].heartbeat_ms == heard[1]


async def test_usage_is_read_apart_from_records(fleet: Fleet, other: Fleet) -> None:
    await fleet.report(heartbeat("w"))
    await fleet.report(heartbeat("w", device_seconds=2.5, wasted_seconds=0.25))
    used = (await other.usage())["w"]
    assert (used.device_seconds, used.wasted_seconds) == (2.5, 0.25)


async def test_silent_worker_is_marked_then_dead_and_lives_again(redis: Redis) -> None:
    fleet, other = Fleet(redis, ttl_ms=10_000), Fleet(redis, ttl_ms=10_000)
    await fleet.report(aged(0))
    plain = (await other.refresh()).workers["w"]
    assert plain.silent_since_ms is None
    heard = await fleet.last_heartbeat("w")
    assert heard is not None
    for silent_ms in (5_000, 7_000):
        await redis.zadd("v1:{fleet}:heard", {"w": heard[1] - silent_ms})
        snapshot = await other.refresh()
        shown = snapshot.workers["w"]
        assert shown.silent_since_ms == heard[1] - silent_ms
        assert shown.silent_ms(snapshot.now_ms) >= silent_ms
        assert [*snapshot.holders("org/model")] == snapshot.resident_on("org/model") == [shown]
    await redis.zadd("v1:{fleet}:heard", {"w": heard[1] - 10_000})
    snapshot = await other.refresh()
    assert not snapshot.workers
    assert not snapshot.pools()
    assert not snapshot.holders("org/model")
    await fleet.report(aged(1.0))
    snapshot = await other.refresh()
    assert snapshot.workers == {"w": plain}
    assert snapshot.resident_on("org/model") == [plain]


async def test_dead_workers_are_removed_for_all(redis: Redis, fleet: Fleet, other: Fleet) -> None:
    await fleet.report(heartbeat("w", on_disk=[holds(models_pb2.MODEL_STATE_COLD)]))
    await fleet.report(heartbeat("v"))
    await other.refresh()
    heard = await fleet.last_heartbeat("w")
    assert heard is not None
    await redis.zadd("v1:{fleet}:heard", {"w": heard[1] - 61_000})
    await other.refresh()
    assert (await fleet.refresh()).workers.keys() == (await other.refresh()).workers.keys() == {"v"}
    for key in ("workers", "usage", "disks", "disk_tags"):
        assert not await redis.hexists("v1:{fleet}:" + key, "w")
    assert await redis.zscore("v1:{fleet}:heard", "w") is None
    assert other._reader.known("w") is fleet._reader.known("w") is None


async def test_workers_and_cards_are_read_in_pages(fleet: Fleet, redis: Redis) -> None:
    count = 2 * PAGE + 1
    for number in range(count):
        model = f"org/{number}"
        await fleet.report(
            heartbeat(f"w{number}", holds(RESIDENT, model, card=models_pb2.ModelCard(model=model)))
        )
    other = Fleet(redis)
    await redis.config_resetstat()
    snapshot = await other.refresh()
    assert snapshot.workers == fleet.snapshot.workers
    assert snapshot.cards == fleet.snapshot.cards
    assert await calls(redis, "evalsha") == 3
    await fleet.report(heartbeat("w7", leaving=True))
    await fleet.report(heartbeat("w8", holds(LOADING)))
    await redis.config_resetstat()
    snapshot = await other.refresh()
    assert (len(snapshot.workers), snapshot.workers["w8"].state("org/model")) == (
        count - 1,
        LOADING,
    )
    assert await calls(redis, "evalsha") == 1


@pytest.mark.parametrize("lost", ["all", "the last write", "one removal"])
async def test_all_is_read_anew_after_data_was_lost(
    fleet: Fleet, other: Fleet, redis: Redis, lost: str
) -> None:
    """Redis may lose writes in a restart or failover: readers must not keep them."""
    await fleet.report(heartbeat("w", holds(LOADING)))
    await fleet.report(heartbeat("v"))
    await other.refresh()
    keys = {key: await redis.dump(key) for key in await redis.keys("v1:{fleet}:*")}
    await fleet.report(heartbeat("w", holds(RESIDENT)))
    await other.refresh()
    if lost == "one removal":  # readers that have not heard of it count the workers
        await fleet.report(heartbeat("w", leaving=True))
        await redis.delete("v1:{fleet}:gone")
        await other.refresh()
        assert (await other.refresh()).workers.keys() == {"v"}
        return
    await redis.flushall()
    await redis.execute_command("DEBUG", "CHANGE-REPL-ID")
    if lost == "the last write":
        for key, value in keys.items():
            assert value is not None
            await redis.restore(key, 0, value)
        await fleet.report(heartbeat("u"))  # its version is above all that readers have seen
        snapshot = await other.refresh()
        assert snapshot.workers.keys() == {"u", "v", "w"}
        assert snapshot.workers["w"].state("org/model") == LOADING
    else:
        assert not (await other.refresh()).workers
    # This router knows the record that was lost, and its worker repeats it.
    await fleet.report(heartbeat("w", holds(RESIDENT)))
    assert (await other.refresh()).workers["w"].state("org/model") == RESIDENT
    assert (await fleet.refresh()).workers == other.snapshot.workers


async def test_records_of_two_routers_follow_each_other(fleet: Fleet, other: Fleet) -> None:
    """A worker changes routers: the one that it returns to knows an older record."""
    await fleet.report(heartbeat("w", holds(LOADING)))
    await other.refresh()
    await other.report(heartbeat("w", holds(RESIDENT)))
    await fleet.report(heartbeat("w", holds(LOADING)))  # repeats what this router knows
    assert (await other.refresh()).workers["w"].state("org/model") == LOADING
    assert (await fleet.refresh()).workers == other.snapshot.workers


async def test_interrupted_read_goes_on_where_it_ended(fleet: Fleet, redis: Redis) -> None:
    """A router has a few seconds for each read, and the first one may take longer."""
    for number in range(2 * PAGE):
        await fleet.report(heartbeat(f"w{number}"))
    other = Fleet(redis)
    parse, reads = other._reader._parse, 0

    async def parse_one_page(page: list[Any]) -> Any:
        nonlocal reads
        reads += 1
        if reads == 2:
            raise NoCapacity("away")
        return await parse(page)

    other._reader._parse = parse_one_page  # type: ignore[method-assign]
    with pytest.raises(NoCapacity):
        await other.refresh()
    assert (await other.refresh()).workers == fleet.snapshot.workers
    assert reads == 3
