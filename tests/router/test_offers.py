"""Offers of a lane that no waiting pull can serve: models and adapters, with and without a leading
scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count

import pytest
from shoal.v1 import mesh_pb2, models_pb2, worker_pb2

from libs.fleet import Fleet, FleetSnapshot, LeaderRecord, WorkerModelRecord, WorkerRecord
from libs.queue import LaneGauges, LaneKey, connect
from services.router.lanes import wakeups
from services.router.lanes.offers import LED_MS, is_led, may_offer
from services.router.lanes.pull import SEEN_MS
from services.router.lanes.wakeups import CLAIM_MS
from services.router.settings import Settings
from tests.router.parts import MODEL, Client, FakeWorker, card, refused, router, until, vector
from tests.support.waiting import end_tasks

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


@asynccontextmanager
async def leading(redis_url: str) -> AsyncIterator[Fleet]:
    """A scheduler that leads, plans all the time, and never decides anything."""
    redis = connect(redis_url)
    scheduler = Fleet(redis)
    fence = await scheduler.lead("s1", last_ms=60_000)
    assert fence is not None

    async def note(number: int) -> None:
        await scheduler.note_plan(fence, (fence << 32) + number, {MODEL: "it is left where it is"})

    async def plan() -> None:
        for number in count(2):
            await asyncio.sleep(0.2)
            await note(number)

    await note(1)  # a router that starts now finds a leader
    planning = asyncio.create_task(plan())
    try:
        yield scheduler
    finally:
        await end_tasks([planning])
        await redis.aclose()


async def read_mesh(client: Client) -> mesh_pb2.Mesh:
    return (await client.mesh.GetMesh(mesh_pb2.GetMeshRequest())).mesh


async def test_cold_model_is_left_to_the_leader_for_half_a_second(redis_url: str) -> None:
    async with (
        leading(redis_url),
        router(redis_url) as client,
        FakeWorker(client.address, "w1", on_disk=[card()], can_load=True).working() as fake,
    ):
        mesh = await read_mesh(client)
        assert mesh.scheduler.scheduler_id == "s1"
        begin = asyncio.get_running_loop().time()
        assert (await client.encode("waits")).dense.data == vector("waits")
        # A timer never fires early, so this holds on any machine.
        assert asyncio.get_running_loop().time() - begin >= Settings("r").claim_after_seconds
        assert fake.claims == [(MODEL, "")]
        explained = await client.mesh.ExplainPlacement(
            mesh_pb2.ExplainPlacementRequest(model=MODEL)
        )
        assert (explained.plan, explained.scheduler.scheduler_id) == (
            "it is left where it is",
            "s1",
        )


async def test_claim_ends_soon_after_heartbeat_shows_load(redis_url: str) -> None:
    """Otherwise a model that is evicted again could not be loaded elsewhere for the duration of a
    claim.
    """
    redis = connect(redis_url)
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, "w1", on_disk=[card()], can_load=True).working(),
    ):
        await client.encode("cold")
        left_ms = await redis.pttl(f"v1:{{fleet}}:claim:{LANE.name}")
        assert left_ms <= SEEN_MS < CLAIM_MS
    await redis.aclose()


async def test_order_reaches_a_worker_with_a_waiting_pull(redis_url: str) -> None:
    """Through any router: it is the one that the worker waits at who asks for the heartbeat."""
    async with (
        router(redis_url, "a") as one,
        router(redis_url, "b") as two,
        FakeWorker(one.address, "w1", on_disk=[card()]).working() as fake,
    ):
        await two.sees("w1")
        await fake.hold_beats()
        await two.models.LoadModel(models_pb2.LoadModelRequest(model=MODEL), timeout=60)
        assert fake.beats_asked >= 1
        assert [directive.load_model for directive in fake.directives] == [MODEL]


async def test_notification_for_a_worker_is_kept_until_its_next_pull(redis_url: str) -> None:
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, "w1", models=[card()]).working() as fake,
    ):
        await fake.hold_beats()
        fake.hold()
        call = asyncio.create_task(client.encode("busy"))
        await until(lambda: fake.batches, "the batch to be pulled")
        await client.models.EvictModel(models_pb2.EvictModelRequest(model=MODEL))
        fake.resume()
        await call
        await until(lambda: fake.directives, "the order")
        assert fake.directives[0].evict_model == MODEL


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


@pytest.fixture
def _claims_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker keep its claim even if it loads slowly."""
    monkeypatch.setattr(wakeups, "CLAIM_MS", 600_000)
    monkeypatch.setattr(wakeups, "ADAPTER_CLAIM_MS", 600_000)


@pytest.mark.usefixtures("_claims_last")
async def test_adapter_is_loaded_by_the_worker_that_has_the_model(redis_url: str) -> None:
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, "roomy", on_disk=[card()], can_load=True).working() as roomy,
        FakeWorker(client.address, "full", models=[card()]).working() as full,
    ):
        await client.sees("roomy", "full")
        assert (await client.encode("tuned", adapter=ADAPTER)).dense.data == vector("tuned")
        assert (full.claims, roomy.claims) == ([(MODEL, ADAPTER)], [])
        assert [job.encode.adapter for job in full.jobs] == [ADAPTER]
        # From now on its pull lists the lane, and no worker is offered it again.
        assert (await client.encode("more", adapter=ADAPTER)).dense.data == vector("more")
        assert len(full.claims) == 1


@pytest.mark.usefixtures("_claims_last")
async def test_cold_model_is_loaded_with_the_adapter_by_one_worker(redis_url: str) -> None:
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, "w1", on_disk=[card()], can_load=True).working() as one,
        FakeWorker(client.address, "w2", on_disk=[card()], can_load=True).working() as two,
    ):
        await client.sees("w1", "w2")
        names = [f"o/adapter-{number}" for number in range(5)]
        answers = await asyncio.gather(*(client.encode(name, adapter=name) for name in names))
        assert [answer.dense.data for answer in answers] == [vector(name) for name in names]
        loaded, idle = (one, two) if one.claims else (two, one)
        assert sorted(adapter for _, adapter in loaded.claims) == names
        assert idle.claims == []


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("MODEL_NOT_FOUND", "NOT_FOUND"),
        ("MODEL_LOAD_FAILED", "FAILED_PRECONDITION"),
        ("NO_CAPACITY", "UNAVAILABLE"),
    ],
)
async def test_adapter_that_cannot_be_loaded_fails_its_lane_only(
    redis_url: str, reason: str, code: str
) -> None:
    async with router(redis_url) as client:
        fake = FakeWorker(client.address, "w1", models=[card()])
        fake.adapter_failure = worker_pb2.Failure(reason=reason, message="why")
        async with fake.working():
            refusal = await refused(client.encode("a", adapter=ADAPTER))
            assert (refusal.code.name, refusal.reason, refusal.message) == (code, reason, "why")
            assert (await client.encode("b")).dense.data == vector("b")
            # The failure is known now, and returned at once.
            assert (await refused(client.encode("a", adapter=ADAPTER))).reason == reason
            assert len(fake.claims) == 1
