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
RESIDENT, LOADING, FAILED = (
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
    parse = fleet._live_workers

    async def parse_later(*read: Any) -> Any:
        monkeypatch.undo()
        await fleet.report(heartbeat("comes", holds(RESIDENT, card=card), failed(BROKEN)))
        await fleet.report(heartbeat("leaves", leaving=True))
        return await parse(*read)

    monkeypatch.setattr(fleet, "_live_workers", parse_later)
    for snapshot in (await fleet.refresh(), fleet.snapshot, await fleet.refresh()):
        assert set(snapshot.workers) == {"stays", "comes"}
        assert snapshot.card("org/model") == card
        assert set(snapshot.failures["org/model"]) == {"comes"}


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


async def test_everything_in_the_registry_expires(fleet: Fleet, redis: Redis) -> None:
    await fleet.report(
        heartbeat(
            "w",
            failed(BROKEN),
            holds(RESIDENT, "org/other", card=models_pb2.ModelCard(model="org/other")),
        )
    )
    await fleet.claim(LANE, "w", 10_000)
    await fleet.order("w", "1", worker_pb2.Directive(drain=True))
    await fleet.router_heartbeat("a")
    fence = await fleet.lead("s")
    assert fence is not None
    await fleet.note_plan(fence, fence << 32, {"org/model": "it waits"})
    keys = await redis.keys("*")
    assert len(keys) == 10
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
