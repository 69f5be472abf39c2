"""Notifications of waiting pulls: which worker loads a model or adapter, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest
from shoal.v1 import mesh_pb2, models_pb2, worker_pb2

from libs.fleet import Fleet
from libs.queue import connect
from services.router.lanes import wakeups
from services.router.lanes.pull import SEEN_MS
from services.router.lanes.wakeups import CLAIM_MS
from services.router.settings import Settings
from tests.router.parts import MODEL, Client, FakeWorker, card, refused, router, until, vector
from tests.router.test_offers import ADAPTER, LANE
from tests.support.waiting import end_tasks


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
