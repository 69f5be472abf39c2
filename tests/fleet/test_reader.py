"""Readers of the registry: the heartbeats that they see, and the Redis commands that they use."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
from redis.asyncio import Redis
from shoal.v1 import models_pb2, worker_pb2

from libs.errors import NoCapacity
from libs.fleet import Fleet, scripts
from libs.fleet.reader import PAGE
from tests.fleet.test_registry import COLD, LOADING, RESIDENT, heartbeat, holds

DAY_MS = 86_400_000


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
async def test_all_is_read_again_after_data_was_lost(
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


async def test_read_ends_while_records_change(
    fleet: Fleet, other: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that change after the first page are for the next read: they are neither gone nor
    awaited.
    """
    monkeypatch.setattr("libs.fleet.reader.PAGE", 5)
    ids = [f"w{number}" for number in range(12)]

    async def report(worker_id: str, state: models_pb2.ModelState) -> None:
        model = f"org/{worker_id}"
        card = models_pb2.ModelCard(model=model, dimensions=2 if state == LOADING else 3)
        await fleet.report(heartbeat(worker_id, holds(state, model, card=card)))

    for worker_id in ids:
        await report(worker_id, LOADING)
    await other.refresh()
    parse, pages, next_ids = other._reader._parse, 0, cycle(ids[5:] + ids[:5])

    async def parse_while_more_changes(page: list[Any]) -> Any:
        nonlocal pages
        pages += 1
        assert pages < 10, "the read does not end"
        for _ in range(5):
            await report(next(next_ids), RESIDENT if pages % 2 else LOADING)
        return await parse(page)

    other._reader._parse = parse_while_more_changes  # type: ignore[method-assign]
    other._reader._has_gap = True
    snapshot = await other.refresh()
    assert pages == 2
    assert snapshot.workers.keys() == {*ids}
    assert snapshot.cards.keys() == {f"org/{worker_id}" for worker_id in ids}
    other._reader._parse = parse  # type: ignore[method-assign]
    snapshot = await other.refresh()
    assert snapshot.workers == fleet.snapshot.workers
    assert snapshot.cards == fleet.snapshot.cards


async def test_worker_that_is_gone_is_not_shown_after_a_failed_read(
    fleet: Fleet, other: Fleet, redis: Redis
) -> None:
    await fleet.report(heartbeat("w"))
    await fleet.report(heartbeat("v"))
    await other.refresh()
    await redis.flushall()
    await fleet.report(heartbeat("v"))
    read = other._reader._read_missing_lists

    async def fail() -> set[str]:
        raise NoCapacity("away")

    other._reader._read_missing_lists = fail  # type: ignore[method-assign]
    with pytest.raises(NoCapacity):
        await other.refresh()
    other._reader._read_missing_lists = read  # type: ignore[method-assign]
    assert (await other.refresh()).workers.keys() == {"v"}


async def test_cards_stay_when_all_workers_have_left_for_a_day(
    fleet: Fleet, other: Fleet, redis: Redis
) -> None:
    card = models_pb2.ModelCard(model="org/model", dimensions=3)
    await fleet.report(heartbeat("w", holds(RESIDENT, card=card)))
    await fleet.report(heartbeat("v"))
    await other.refresh()
    await fleet.report(heartbeat("w", leaving=True))
    for key in await redis.keys("v1:{fleet}:*"):
        if await redis.pttl(key) <= DAY_MS:
            await redis.delete(key)
    for _ in range(2):  # the first one finds that the number of workers differs
        assert (await other.refresh()).cards.keys() == {"org/model"}
    assert not other.snapshot.workers
    assert (await Fleet(redis).refresh()).cards.keys() == {"org/model"}


async def test_lost_record_is_passed_over_and_stored_again(
    fleet: Fleet, other: Fleet, redis: Redis
) -> None:
    card = models_pb2.ModelCard(model="org/model", dimensions=3)
    await fleet.report(heartbeat("w", holds(RESIDENT, card=card)))
    await fleet.report(heartbeat("v"))
    await redis.hdel("v1:{fleet}:workers", "w")
    await redis.hdel("v1:{fleet}:cards", "org/model")
    snapshot = await other.refresh()
    assert snapshot.workers.keys() == {"v"}
    assert not snapshot.cards
    await fleet.report(heartbeat("w", holds(RESIDENT, card=card)))
    assert (await other.refresh()).workers.keys() == {"v", "w"}


async def test_busy_reader_counts_the_workers(fleet: Fleet, other: Fleet, redis: Redis) -> None:
    """It hears repeated heartbeats during every read, and missed a removal."""
    await fleet.report(heartbeat("w"))
    await fleet.report(heartbeat("v"))
    await other.refresh()
    await fleet.report(heartbeat("w", leaving=True))
    await redis.delete("v1:{fleet}:gone")
    parse = other._reader._parse

    async def parse_and_hear(page: list[Any]) -> Any:
        await other.report(heartbeat("v"))
        return await parse(page)

    other._reader._parse = parse_and_hear  # type: ignore[method-assign]
    await other.refresh()
    assert (await other.refresh()).workers.keys() == {"v"}


async def test_removal_read_during_a_report_stays(fleet: Fleet, other: Fleet) -> None:
    """A router first reads a list that is new to it, and notes the heartbeat afterwards."""
    tag = await other.report(heartbeat("w", on_disk=[holds(COLD)]))
    await fleet.report(heartbeat("v"))
    read = fleet._disks.read

    async def read_late(tags: Any) -> None:
        fleet._disks.read = read  # type: ignore[method-assign]
        await other.report(heartbeat("w", leaving=True))
        await fleet.refresh()
        await read(tags)

    fleet._disks.read = read_late  # type: ignore[method-assign]
    assert await fleet.report(heartbeat("w", on_disk_tag=tag)) == tag
    assert fleet.snapshot.workers.keys() == {"v"}
    assert (await fleet.refresh()).workers.keys() == {"v"}


async def test_card_read_during_a_report_stays(
    fleet: Fleet, other: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another router stores a later card before this one notes its own."""
    report = scripts.report

    async def report_late(*arguments: Any, **values: Any) -> Any:
        monkeypatch.setattr(scripts, "report", report)
        reply = await report(*arguments, **values)
        await other.report(
            heartbeat(
                "v", holds(RESIDENT, card=models_pb2.ModelCard(model="org/model", dimensions=7))
            )
        )
        await fleet.refresh()
        return reply

    monkeypatch.setattr(scripts, "report", report_late)
    card = models_pb2.ModelCard(model="org/model", dimensions=5)
    await fleet.report(heartbeat("w", holds(RESIDENT, card=card)))
    assert fleet.snapshot.cards["org/model"].dimensions == 7
    assert (await fleet.refresh()).cards == (await other.refresh()).cards
