"""Heartbeats, claims and orders through a real Redis, as seen by two routers."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio import Redis
from shoal.v1 import models_pb2, worker_pb2

from libs.errors import NoCapacity
from libs.fleet import Fleet
from libs.queue import LaneKey, connect

LANE = LaneKey("cpu", "org/model")
COLD, RESIDENT, LOADING, FAILED = (
    models_pb2.MODEL_STATE_COLD,
    models_pb2.MODEL_STATE_RESIDENT,
    models_pb2.MODEL_STATE_LOADING,
    models_pb2.MODEL_STATE_FAILED,
)
BROKEN = worker_pb2.Failure(reason="MODEL_LOAD_FAILED", message="no such tensor")
NOT_FOUND = worker_pb2.Failure(reason="MODEL_NOT_FOUND", message="no such directory")


def heartbeat(
    worker_id: str = "w", *models: worker_pb2.WorkerModel, epoch: str = "1", **fields: Any
) -> worker_pb2.HeartbeatRequest:
    return worker_pb2.HeartbeatRequest(
        worker_id=worker_id, epoch=epoch, pool="cpu", models=models, **fields
    )


def holds(
    state: models_pb2.ModelState, model: str = "org/model", **fields: Any
) -> worker_pb2.WorkerModel:
    return worker_pb2.WorkerModel(model=model, state=state, **fields)


def failed(failure: worker_pb2.Failure) -> worker_pb2.WorkerModel:
    return holds(FAILED, failure=failure)


async def test_heartbeat_is_seen_here_at_once_and_elsewhere_after_a_refresh(
    fleet: Fleet, other: Fleet
) -> None:
    card = models_pb2.ModelCard(model="org/model", dimensions=384)
    beat = heartbeat(
        "w",
        holds(
            RESIDENT,
            bytes=90,
            load_seconds=1.5,
            tokens_per_second=1e4,
            idle_seconds=2.0,
            pinned=True,
            card=card,
        ),
        device="cpu",
        memory_bytes=1000,
        used_bytes=90,
        batch_tokens=8192,
        batches=[worker_pb2.HeldBatch(batch_id="b")],
    )
    await fleet.report(beat)
    snapshot = await other.refresh()
    assert snapshot.workers == fleet.snapshot.workers
    assert snapshot.card("org/model") == fleet.snapshot.card("org/model") == card
    worker = snapshot.workers["w"]
    assert (
        worker.pool,
        worker.device,
        worker.memory_bytes,
        worker.used_bytes,
        worker.batch_tokens,
    ) == (
        "cpu",
        "cpu",
        1000,
        90,
        8192,
    )
    record = worker.models["org/model"]
    assert (record.bytes, record.load_seconds, record.tokens_per_second, record.pinned) == (
        90,
        1.5,
        1e4,
        True,
    )
    assert snapshot.resident_on("org/model") == [worker]
    assert snapshot.pools() == {"cpu"}


async def test_heartbeats_during_refresh_are_kept(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refresh may read older data: a router must not forget a new heartbeat even for a second."""
    card = models_pb2.ModelCard(model="org/model", dimensions=384)
    await fleet.report(heartbeat("stays"))
    await fleet.report(heartbeat("leaves"))
    parse = fleet._reader._parse

    async def parse_later(page: Any) -> Any:
        monkeypatch.undo()
        await fleet.report(heartbeat("joins", holds(RESIDENT, card=card), failed(BROKEN)))
        await fleet.report(heartbeat("leaves", leaving=True))
        return await parse(page)

    monkeypatch.setattr(fleet._reader, "_parse", parse_later)
    for snapshot in (await fleet.refresh(), fleet.snapshot, await fleet.refresh()):
        assert set(snapshot.workers) == {"stays", "joins"}
        assert snapshot.card("org/model") == card
        assert set(snapshot.failures["org/model"]) == {"joins"}


async def test_worker_that_leaves_is_forgotten_and_its_cards_are_not(
    fleet: Fleet, other: Fleet
) -> None:
    await fleet.report(
        heartbeat("w", holds(RESIDENT, card=models_pb2.ModelCard(model="org/model")))
    )
    await fleet.report(heartbeat("w", leaving=True))
    assert (fleet.snapshot.workers, (await other.refresh()).workers) == ({}, {})
    assert other.snapshot.card("org/model") is not None
    assert other.snapshot.card("org/other") is None


async def test_silent_worker_is_not_alive(redis: Redis) -> None:
    fleet = Fleet(redis, ttl_ms=20)
    await fleet.report(heartbeat("w"))
    while (await fleet.refresh()).workers:
        pass
    while await redis.hlen("v1:{fleet}:workers"):
        await fleet.refresh()


async def test_failed_load_is_known_to_all(fleet: Fleet, other: Fleet) -> None:
    await fleet.report(heartbeat("w", holds(LOADING)))
    await fleet.report(heartbeat("w", failed(BROKEN)))
    assert fleet.snapshot.failures == {"org/model": {"w": BROKEN}}
    assert (await other.refresh()).failures == {"org/model": {"w": BROKEN}}


async def test_failure_is_recorded_once(fleet: Fleet, redis: Redis) -> None:
    await fleet.report(heartbeat("w", failed(BROKEN)))
    await redis.delete("v1:{fleet}:failures")  # as if its 15 minutes were over
    await fleet.refresh()
    await fleet.report(heartbeat("w", failed(BROKEN)))
    assert (await fleet.refresh()).failures == {}


async def test_failures_last_for_minutes(fleet: Fleet, redis: Redis) -> None:
    seconds, _ = await redis.time()
    await fleet.record_failure("org/broken", "w", BROKEN)
    await fleet.record_failure("org/absent", "w", NOT_FOUND)
    await fleet.record_failure("org/far", "w", worker_pb2.Failure(reason="NO_CAPACITY"))
    fields = cast(dict[bytes, bytes], await redis.hgetall("v1:{fleet}:failures"))
    left = {
        field.split()[0]: int(value.split(b" ")[0]) / 1000 - seconds
        for field, value in fields.items()
    }
    assert 14 * 60 < left[b"org/broken"] <= 15 * 60 + 30
    assert 50 < left[b"org/absent"] <= 60 + 30
    assert 50 < left[b"org/far"] <= 60 + 30
    for model in ("org/broken", "org/far"):
        await redis.hset("v1:{fleet}:failures", f"{model} w", b"1 " + BROKEN.SerializeToString())
    assert (await fleet.refresh()).failures == {"org/absent": {"w": NOT_FOUND}}
    assert await redis.hlen("v1:{fleet}:failures") == 1


@pytest.mark.parametrize(
    "again",
    [heartbeat("w", holds(RESIDENT)), heartbeat("w", epoch="2")],
    ids=["resident", "restarted"],
)
async def test_worker_gets_another_chance(
    fleet: Fleet, other: Fleet, again: worker_pb2.HeartbeatRequest
) -> None:
    await fleet.report(heartbeat("w", failed(BROKEN)))
    await fleet.record_failure("org/model", "v", BROKEN)
    await fleet.report(again)
    assert (
        fleet.snapshot.failures["org/model"].keys()
        == (await other.refresh()).failures["org/model"].keys()
        == {"v"}
    )


async def test_one_worker_claims_a_lane(fleet: Fleet, other: Fleet, redis: Redis) -> None:
    assert await fleet.claim(LANE, "w", 10_000)
    assert not await other.claim(LANE, "v", 10_000)
    assert await other.claim(
        LANE, "w", 10_000
    )  # it has evicted the model since, and may load it again
    assert not await other.release_claim(LANE, "v")
    assert not await other.renew_claim(LANE, "v", 10_000)
    assert await other.renew_claim(LANE, "w", 100_000)
    assert await redis.pttl("v1:{fleet}:claim:" + LANE.name) > 10_000
    assert await other.release_claim(LANE, "w")
    assert await other.claim(LANE, "v", 10_000)
    assert not await fleet.renew_claim(LANE, "w", 10_000)


async def test_orders_are_delivered_once_in_order(fleet: Fleet, other: Fleet) -> None:
    orders = [
        worker_pb2.Directive(load_model="a"),
        worker_pb2.Directive(evict_model="a"),
        worker_pb2.Directive(load_model="a"),
    ]
    numbers = [await fleet.order("w", "1", order) for order in orders]
    assert numbers == sorted(set(numbers))
    received = await other.orders("w", "1", 0)
    assert [one.seq for one in received] == numbers
    assert [one.WhichOneof("order") for one in received] == [
        "load_model",
        "evict_model",
        "load_model",
    ]
    assert [one.seq for one in await other.orders("w", "1", numbers[1])] == numbers[2:]
    assert await other.orders("w", "2", 0) == []


async def test_dead_router_is_reported_once(redis: Redis) -> None:
    fleet = Fleet(redis, ttl_ms=1)
    assert await fleet.router_heartbeat("a") == []
    while not (silent := await fleet.router_heartbeat("b")):
        pass
    assert silent == ["a"]
    patient = Fleet(redis)
    assert await patient.router_heartbeat("b") == []
    assert await patient.router_heartbeat("b") == []


async def test_models_on_disk_are_sent_and_read_once(
    fleet: Fleet, other: Fleet, redis: Redis
) -> None:
    """Later heartbeats name the list by its tag. Of two workers with the same disk one is read."""
    on_disk = [
        holds(COLD, f"org/{number}", bytes=number, card=models_pb2.ModelCard(model=f"org/{number}"))
        for number in range(500)
    ]
    tag = await fleet.report(heartbeat("v", on_disk=on_disk))
    assert await fleet.report(heartbeat("w", on_disk=on_disk)) == tag != ""
    await redis.config_resetstat()
    await other.refresh()
    # Heartbeats and cards in two pages each, one list, and the leader.
    assert (await redis.info("commandstats"))["cmdstat_hmget"]["calls"] == 6
    await fleet.refresh()
    await redis.config_resetstat()
    for seconds in (1.0, 2.0):
        beat = heartbeat("w", holds(RESIDENT, "org/7"), on_disk_tag=tag, device_seconds=seconds)
        assert await other.report(beat) == tag
        await fleet.refresh()
    ran = await redis.info("commandstats")
    assert ran["cmdstat_hmget"]["calls"] == 1 + 2  # one changed heartbeat, the leader, no lists
    assert ran["cmdstat_hgetall"]["calls"] == 2  # failures
    assert fleet.snapshot.workers == other.snapshot.workers
    for snapshot in (fleet.snapshot, other.snapshot):
        for worker in snapshot.workers.values():
            assert len(worker.models) == 500
            assert worker.models["org/3"].bytes == 3
        assert snapshot.workers["v"].state("org/7") == COLD
        assert snapshot.workers["w"].state("org/7") == RESIDENT
        assert len(snapshot.cards) == 500


async def test_changed_disk_replaces_the_list_before(fleet: Fleet, other: Fleet) -> None:
    first = await fleet.report(heartbeat("w", on_disk=[holds(COLD, "org/a"), holds(COLD, "org/b")]))
    await other.refresh()
    second = await fleet.report(heartbeat("w", on_disk=[holds(COLD, "org/b")]))
    assert second not in (first, "")
    for snapshot in (fleet.snapshot, await other.refresh()):
        assert set(snapshot.workers["w"].models) == {"org/b"}
    assert await fleet.report(heartbeat("w")) == ""  # it has none now
    assert not (await other.refresh()).workers["w"].models


@pytest.mark.parametrize("way", ["leaves", "dies", "has no models"])
async def test_list_of_a_worker_ends_with_it(fleet: Fleet, redis: Redis, way: str) -> None:
    await fleet.report(heartbeat("w", on_disk=[holds(COLD)]))
    assert await redis.hkeys("v1:{fleet}:disks") == [b"w"]
    heard = await fleet.last_heartbeat("w")
    assert heard is not None
    match way:
        case "leaves":
            await fleet.report(heartbeat("w", leaving=True))
        case "dies":
            assert await fleet.forget("w", heard[1])
        case _:
            await fleet.report(heartbeat("w"))
    assert not await redis.hkeys("v1:{fleet}:disks")
    assert not await redis.hkeys("v1:{fleet}:disk_tags")


async def test_list_that_redis_lost_is_asked_for(fleet: Fleet, other: Fleet, redis: Redis) -> None:
    """A heartbeat that names it is not stored: its worker would seem to have nothing on disk."""
    on_disk = [holds(COLD, card=models_pb2.ModelCard(model="org/model", dimensions=8))]
    tag = await fleet.report(heartbeat("w", on_disk=on_disk))
    await redis.flushall()
    assert await fleet.report(heartbeat("w", on_disk_tag=tag)) == ""
    assert await fleet.report(heartbeat("w", on_disk_tag="another")) == ""
    assert set(fleet.snapshot.workers["w"].models) == {"org/model"}
    assert not (await other.refresh()).workers
    # At once, before this router has noticed that the cards are gone too.
    assert await fleet.report(heartbeat("w", on_disk=on_disk)) == tag
    snapshot = await other.refresh()
    assert set(snapshot.workers["w"].models) == {"org/model"}
    assert snapshot.card("org/model") == on_disk[0].card


async def test_lists_of_a_faulty_worker_replace_each_other(
    fleet: Fleet, other: Fleet, redis: Redis
) -> None:
    for number in range(50):
        models = [
            holds(COLD, f"org/{number}-{model}", adapters=["a" * 200] * 100) for model in range(20)
        ]
        await fleet.report(heartbeat("w", on_disk=models))
    (value,) = await redis.hvals("v1:{fleet}:disks")
    assert len(value) < 2_000  # no adapters
    await fleet.refresh()
    assert set((await other.refresh()).workers["w"].models) == {model.model for model in models}
    assert len(fleet._disks._lists) == len(other._disks._lists) == 2  # and the empty one


async def test_card_of_a_held_model_counts_more_than_that_on_disk(fleet: Fleet) -> None:
    """Files were replaced under the same name; the list has the card of the old ones."""
    new, old = (models_pb2.ModelCard(model="org/model", dimensions=size) for size in (16, 8))
    await fleet.report(heartbeat("w", holds(RESIDENT, card=new), on_disk=[holds(COLD, card=old)]))
    assert fleet.snapshot.card("org/model") == new


async def test_card_follows_copies_that_go(fleet: Fleet, other: Fleet) -> None:
    """The largest copy decides the bytes: when it is gone, the other one does."""
    card = models_pb2.ModelCard(model="org/model", data_type="bfloat16")
    small, large = holds(RESIDENT, bytes=50, card=card), holds(RESIDENT, bytes=100, card=card)
    await fleet.report(heartbeat("a", large))
    await fleet.report(heartbeat("b", small))
    await other.refresh()
    before = other.snapshot.card("org/model")
    assert before is not None
    assert before.bytes == 100
    await fleet.report(heartbeat("a", on_disk=[holds(COLD, bytes=40, card=card)]))
    await other.refresh()
    await other.report(heartbeat("b", small))  # as before
    after = (await fleet.refresh()).card("org/model")
    assert after is not None
    assert after.bytes == 50


async def test_cards_are_read_again_only_after_a_change(
    fleet: Fleet, other: Fleet, redis: Redis
) -> None:
    card = models_pb2.ModelCard(model="org/model", dimensions=8)
    await fleet.report(heartbeat("w", holds(RESIDENT, card=card)))
    await other.refresh()
    await redis.config_resetstat()
    for _ in range(3):
        await fleet.report(heartbeat("w", holds(RESIDENT, card=card)))
        await other.refresh()
    assert (await redis.info("commandstats"))["cmdstat_hmget"]["calls"] == 3  # the leader
    card.dimensions = 16
    await fleet.report(heartbeat("w", holds(RESIDENT, card=card)))
    assert (await other.refresh()).card("org/model") == card


async def test_everything_in_the_registry_expires(fleet: Fleet, redis: Redis) -> None:
    await fleet.report(
        heartbeat(
            "w",
            failed(BROKEN),
            holds(RESIDENT, "org/other", card=models_pb2.ModelCard(model="org/other")),
            on_disk=[holds(COLD)],
        )
    )
    await fleet.claim(LANE, "w", 600_000)
    await fleet.order("w", "1", worker_pb2.Directive(drain=True))
    await fleet.router_heartbeat("a")
    fence = await fleet.lead("s", last_ms=600_000)
    assert fence is not None
    await fleet.note_plan(fence, fence << 32, {"org/model": "it waits"})
    keys = await redis.keys("*")
    assert len(keys) == 18
    assert [key for key in keys if await redis.pttl(key) < 0] == []


async def test_redis_that_is_away_is_no_capacity() -> None:
    redis = connect("unix:///nonexistent/redis.sock")
    fleet = Fleet(redis)
    for attempt in (
        lambda: fleet.report(heartbeat()),
        fleet.refresh,
        lambda: fleet.claim(LANE, "w", 1),
        lambda: fleet.renew_claim(LANE, "w", 1),
        lambda: fleet.release_claim(LANE, "w"),
        lambda: fleet.order("w", "1", worker_pb2.Directive()),
        lambda: fleet.orders("w", "1", 0),
        lambda: fleet.record_failure("m", "w", BROKEN),
        lambda: fleet.lead("s"),
        lambda: fleet.resign(1),
        lambda: fleet.note_plan(1, 1, {}),
        fleet.plan_notes,
        lambda: fleet.router_heartbeat("a"),
    ):
        with pytest.raises(NoCapacity):
            await attempt()
    await redis.aclose()
