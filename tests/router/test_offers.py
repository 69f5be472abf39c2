"""Offers of a lane that no waiting pull can serve: models and adapters, with and without a leading
scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from shoal.v1 import models_pb2, worker_pb2

from libs.fleet import FleetSnapshot, LeaderRecord, WorkerModelRecord, WorkerRecord
from libs.queue import LaneGauges, LaneKey
from services.router.lanes.offers import LED_MS, is_led, may_offer
from tests.router.parts import MODEL, FakeWorker, card, router, until

ADAPTER, OTHER = "o/adapter", "o/other"
LANE, TUNED = LaneKey("cpu", MODEL), LaneKey("cpu", MODEL, ADAPTER)
RESIDENT, LOADING, COLD = (
    models_pb2.MODEL_STATE_RESIDENT,
    models_pb2.MODEL_STATE_LOADING,
    models_pb2.MODEL_STATE_COLD,
)
NOW = 1_700_000_000_000
LEADER = LeaderRecord("s1", 7, 7 << 32, NOW - 1000)


def gauges(lane: LaneKey, tokens: int = 10) -> LaneGauges:
    return LaneGauges(lane, 1, tokens, *[0] * 6)


def worker(
    worker_id: str,
    state: models_pb2.ModelState,
    *adapters: str,
    failed: Sequence[str] = (),
    speed: float = 0.0,
) -> WorkerRecord:
    record = WorkerModelRecord(
        model=MODEL, state=state, bytes=1, load_seconds=1.0, tokens_per_second=speed,
        idle_seconds=0.0, pinned=False,
        adapters=adapters,
        failed_adapters={name: worker_pb2.Failure(reason="MODEL_NOT_FOUND") for name in failed},
    )  # fmt: skip
    return WorkerRecord(
        worker_id=worker_id, epoch="e", pool="cpu", device="d", memory_bytes=1, used_bytes=0,
        batch_tokens=4096,
        draining=False, heartbeat_ms=0, models={MODEL: record},
    )  # fmt: skip


def fleet(*workers: WorkerRecord, leader: LeaderRecord | None = None) -> FleetSnapshot:
    return FleetSnapshot({one.worker_id: one for one in workers}, {}, {}, NOW, leader)


def offered(
    snapshot: FleetSnapshot,
    lane: LaneKey = LANE,
    *,
    tokens: int = 10,
    has_model: bool = False,
    can_load: bool = True,
) -> bool:
    return may_offer(gauges(lane, tokens), snapshot, "w", has_model=has_model, can_load=can_load)


def test_leader_leads_while_it_plans() -> None:
    assert is_led(fleet(leader=LEADER))
    assert is_led(fleet(leader=replace(LEADER, plan_ms=NOW - LED_MS + 1)))
    assert not is_led(fleet(leader=replace(LEADER, plan_ms=NOW - LED_MS)))
    assert not is_led(fleet())


def test_cold_model_is_offered_to_workers_with_room_that_stay() -> None:
    cold = worker("w", COLD)
    assert offered(fleet(cold))
    assert not offered(fleet(cold), can_load=False)
    assert not offered(fleet(replace(cold, preempted_in_seconds=30.0)))
    assert not offered(fleet(replace(cold, draining=True)))
    assert not offered(fleet(worker("v", COLD)))
    assert not offered(fleet(replace(cold, pool="l4")))


def test_second_copy_is_left_to_the_scheduler_that_leads() -> None:
    busy = (worker("w", COLD), worker("v", RESIDENT, speed=1.0))
    assert offered(fleet(*busy), tokens=1000)
    assert not offered(fleet(*busy, leader=LEADER), tokens=1000)
    assert offered(fleet(*busy, leader=replace(LEADER, plan_ms=0)), tokens=1000)
    assert offered(fleet(worker("w", COLD), leader=LEADER))
    assert not offered(fleet(worker("w", COLD), worker("v", LOADING), leader=LEADER), tokens=1000)


@pytest.mark.parametrize("leader", [None, LEADER])
def test_adapter_is_offered_to_holders_without_free_memory(
    leader: LeaderRecord | None,
) -> None:
    holder = fleet(worker("w", RESIDENT), leader=leader)
    assert offered(holder, TUNED, has_model=True, can_load=False)
    assert not offered(holder, TUNED, tokens=0, has_model=True)
    # Its heartbeat may arrive after its pull.
    assert offered(
        fleet(worker("w", LOADING), leader=leader), TUNED, has_model=True, can_load=False
    )
    assert not offered(fleet(worker("w", RESIDENT, ADAPTER), leader=leader), TUNED, has_model=True)
    assert not offered(
        fleet(worker("w", RESIDENT, failed=[ADAPTER]), leader=leader), TUNED, has_model=True
    )
    assert offered(
        fleet(worker("w", RESIDENT, OTHER, failed=[OTHER]), leader=leader), TUNED, has_model=True
    )
    assert not offered(
        fleet(replace(worker("w", RESIDENT), preempted_in_seconds=1.0), leader=leader),
        TUNED,
        has_model=True,
    )


def test_adapter_is_loaded_once_more_where_its_work_would_wait() -> None:
    two = fleet(worker("w", RESIDENT), worker("v", RESIDENT, ADAPTER, speed=100.0))
    assert not offered(two, TUNED, tokens=100, has_model=True)
    assert offered(two, TUNED, tokens=101, has_model=True)


def test_adapter_does_not_bring_its_model_to_one_more_worker() -> None:
    """Unless the model's copies are so busy that one more is worth its load."""
    assert not offered(fleet(worker("w", COLD), worker("v", RESIDENT, speed=100.0)), TUNED)
    assert offered(fleet(worker("w", COLD), worker("v", RESIDENT, speed=100.0)), TUNED, tokens=101)
    assert offered(fleet(worker("w", COLD), worker("v", COLD)), TUNED)


async def test_heartbeat_response_has_waiting_tokens(redis_url: str) -> None:
    async with (
        router(redis_url) as client,
        FakeWorker(
            client.address, "w1", models=[card()], on_disk=[card("a/cold")]
        ).working() as fake,
    ):
        fake.hold()
        waiting = [
            asyncio.create_task(client.encode("x" * 100)),
            asyncio.create_task(client.encode("cold", model="a/cold")),
        ]
        await until(lambda: fake.batches, "the batch to be pulled")
        waiting.append(asyncio.create_task(client.encode("y" * 100)))
        waiting.append(asyncio.create_task(client.encode("z" * 100, adapter=ADAPTER)))
        await until(lambda: fake.queued_tokens, "tokens to be offered")
        base, tuned = await client.lane(), await client.lane(adapter=ADAPTER)
        await until(
            lambda: fake.queued_tokens == {MODEL: base.queued_tokens + tuned.queued_tokens},
            "both lanes' tokens",
        )
        assert base.queued_tokens > 0
        assert tuned.queued_tokens > 0
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        fake.resume()
