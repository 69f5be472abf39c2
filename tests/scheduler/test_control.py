"""The loop over a real Redis: it looks, leads, plans and orders; workers here are only their
heartbeats.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis
from shoal.v1 import models_pb2, worker_pb2

from libs.catalog.pools import Pools
from libs.eviction import cost_aware
from libs.fleet import Fleet
from libs.queue import LaneKey, Lanes, QueuedJob, connect
from services.scheduler import control as module
from services.scheduler.control import Control
from services.scheduler.demand import Demand
from services.scheduler.planning.placement import PlacementPlan, PlanInput, plan
from services.scheduler.view import MeshSnapshot, SchedulerView
from tests.support.redis import RedisServer
from tests.support.waiting import end_tasks

COLD, LOADING, RESIDENT = (
    models_pb2.MODEL_STATE_COLD,
    models_pb2.MODEL_STATE_LOADING,
    models_pb2.MODEL_STATE_RESIDENT,
)
BROKEN = worker_pb2.Failure(reason="MODEL_LOAD_FAILED", message="no such tensor")


class Mesh:
    """Acts like routers and workers."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.fleet = Fleet(redis)
        self.lanes = Lanes(redis, router_id="router", dead_result=b"")
        self.jobs = 0

    async def report(self, name: str, *models: worker_pb2.WorkerModel, plan: int = 0) -> None:
        beat = worker_pb2.HeartbeatRequest(
            worker_id=name, epoch="1", pool="cpu", models=models, memory_bytes=1000, plan=plan
        )
        await self.fleet.report(beat)

    async def ask(self, model: str, tokens: int = 100) -> None:
        self.jobs += 1
        deadline = await self.lanes.now_ms() + 60_000
        job = QueuedJob(
            f"job-{self.jobs}", "tenant", 1.0, tokens, deadline, "interactive", b"payload"
        )
        await self.lanes.enqueue(LaneKey("cpu", model), [[job]], max_tokens=10**9, notify=True)

    async def orders(self, name: str) -> list[tuple[str, str]]:
        """Kinds and models."""
        found = [
            (order.WhichOneof("order") or "", order)
            for order in await self.fleet.orders(name, "1", 0)
        ]
        return [(kind, str(getattr(order, kind))) for kind, order in found]


@pytest.fixture(autouse=True)
def _leads_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that is slow to plan keeps its lead, unless the test takes it away."""
    monkeypatch.setattr(Fleet.lead, "__kwdefaults__", {"last_ms": 600_000})


@pytest.fixture
def mesh(redis: Redis) -> Mesh:
    return Mesh(redis)


def control(
    redis: Redis,
    name: str = "s0",
    view: SchedulerView | None = None,
    snapshots: list[MeshSnapshot] | None = None,
) -> Control:
    return Control(
        Lanes(redis, router_id=name, dead_result=b""),
        Fleet(redis),
        view or SchedulerView(),
        scheduler_id=name,
        policy=cost_aware,
        seen=(snapshots if snapshots is not None else []).append,
    )


def cold(model: str) -> worker_pb2.WorkerModel:
    return worker_pb2.WorkerModel(model=model, state=COLD, bytes=10)


async def no_more() -> None:
    return None


@asynccontextmanager
async def running(one: Control) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one.run(no_more)), asyncio.create_task(one.receive_wakeups())]
    try:
        yield
    finally:
        await end_tasks(tasks)
        assert all(task.cancelled() for task in tasks)


async def until(mesh: Mesh, name: str, wanted: list[tuple[str, str]]) -> None:
    end = time.monotonic() + 60
    while (found := await mesh.orders(name)) != wanted:
        assert time.monotonic() < end, f"{name} has orders {found}, not {wanted}"
        await asyncio.sleep(0.01)


async def test_cold_model_with_work_is_ordered_once(redis: Redis, mesh: Mesh) -> None:
    view, snapshots = SchedulerView(), list[MeshSnapshot]()
    scheduler = control(redis, view=view, snapshots=snapshots)
    await mesh.report("v")
    await mesh.report("w", cold("org/a"))
    assert await scheduler.tick() is not None
    await mesh.ask("org/a")
    for _ in range(3):
        await scheduler.tick()
    assert (await mesh.orders("v"), await mesh.orders("w")) == ([], [("load_model", "org/a")])
    assert view.snapshot is snapshots[-1]
    assert view.snapshot is not None
    assert view.snapshot.gauges[LaneKey("cpu", "org/a")].queued_tokens == 100
    leader = (await mesh.fleet.refresh()).leader
    assert leader is not None
    (order,) = await mesh.fleet.orders("w", "1", 0)
    assert (leader.scheduler_id, leader.plan) == ("s0", (leader.fence << 32) + 4)
    assert order.plan == (leader.fence << 32) + 2
    assert await mesh.fleet.plan_notes() == {
        "org/a": "loads on w: 100 tokens wait and no worker has it"
    }


async def test_note_reports_completed_order_with_time(redis: Redis, mesh: Mesh) -> None:
    scheduler = control(redis)
    await mesh.report("w", cold("org/a"))
    await mesh.ask("org/a")
    await scheduler.tick()
    await mesh.report("w", worker_pb2.WorkerModel(model="org/a", state=LOADING))
    await scheduler.tick()
    under_way = "loads on w: 100 tokens wait and no worker has it"
    assert await mesh.fleet.plan_notes() == {"org/a": under_way}
    await mesh.report("w", worker_pb2.WorkerModel(model="org/a", state=RESIDENT))
    await scheduler.tick()
    note = (await mesh.fleet.plan_notes())["org/a"]
    assert re.fullmatch(re.escape(under_way) + r"; done at \d\d:\d\d:\d\d UTC", note)
    await mesh.report("w", cold("org/a"))  # what becomes of it later is another matter
    await mesh.report("v", worker_pb2.WorkerModel(model="org/a", state=RESIDENT))
    await scheduler.tick()
    assert await mesh.fleet.plan_notes() == {"org/a": note}


@pytest.mark.parametrize(
    ("how", "end"), [("failed", "failed at"), ("gone", "the worker was gone at")]
)
async def test_note_reports_why_order_failed(redis: Redis, mesh: Mesh, how: str, end: str) -> None:
    scheduler = control(redis)
    await mesh.report("w", cold("org/a"))
    await mesh.ask("org/a")
    await scheduler.tick()
    await mesh.report("v", worker_pb2.WorkerModel(model="org/a", state=RESIDENT))
    if how == "failed":
        await mesh.fleet.record_failure("org/a", "w", BROKEN)
    else:
        heard = await mesh.fleet.last_heartbeat("w")
        assert heard is not None
        assert await mesh.fleet.forget("w", heard[1])
    await scheduler.tick()
    assert f"; {end} " in (await mesh.fleet.plan_notes())["org/a"]


async def test_held_back_notes_are_removed(redis: Redis, mesh: Mesh) -> None:
    scheduler = control(redis)
    await mesh.ask("org/a")
    await scheduler.tick()
    assert await mesh.fleet.plan_notes("org/a") == {
        "org/a": "held back: pool cpu has no worker that takes models"
    }
    await mesh.report("w", worker_pb2.WorkerModel(model="org/a", state=RESIDENT))
    await scheduler.tick()
    assert await mesh.fleet.plan_notes("org/a") == {}


async def test_plan_publishes_desired_workers(redis: Redis, mesh: Mesh) -> None:
    lanes, demand = Lanes(redis, router_id="s0", dead_result=b""), Demand(Pools())
    scheduler = Control(
        lanes,
        Fleet(redis),
        SchedulerView(),
        scheduler_id="s0",
        policy=cost_aware,
        seen=demand.update,
        demands=lambda: demand.demands,
    )
    await mesh.ask("org/a")
    await scheduler.tick()
    leader = (await mesh.fleet.refresh()).leader
    assert leader is not None
    assert (leader.desired, leader.cold_starts) == ({"cpu": 1}, {"cpu": 60.0})


async def test_next_leader_takes_over_with_higher_numbers_and_orders_nothing_twice(
    redis: Redis, mesh: Mesh
) -> None:
    first, second = control(redis, "s0"), control(redis, "s1")
    await mesh.report("w", cold("org/a"))
    await mesh.report("v", cold("org/a"))
    await mesh.ask("org/a")
    assert await first.tick() is not None
    assert await second.tick() is None
    ordered = await mesh.orders("v") + await mesh.orders("w")
    assert ordered == [("load_model", "org/a")]
    await first.resign()
    made = await second.tick()
    assert made is not None
    assert len(made.orders) == 1  # the lane is claimed: only the same worker can be ordered again
    assert (await mesh.orders("v") == []) != (await mesh.orders("w") == [])
    assert await first.tick() is None
    await mesh.report("v", worker_pb2.WorkerModel(model="org/a", state=LOADING))
    await mesh.ask("org/b")
    await second.tick()
    numbers = [order.plan for name in "vw" for order in await mesh.fleet.orders(name, "1", 0)]
    assert len(numbers) >= 2
    assert min(numbers) >> 32 < max(numbers) >> 32


async def test_leader_that_lost_its_lead_while_it_planned_orders_nothing(
    redis: Redis, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = control(redis, "s0")
    await mesh.report("w", cold("org/a"))
    await mesh.ask("org/a")
    loop = asyncio.get_running_loop()

    def frozen(state: PlanInput) -> PlacementPlan:
        """Its lease runs out, and another one leads when it goes on."""
        asyncio.run_coroutine_threadsafe(taken_over(), loop).result()
        return plan(state)

    async def taken_over() -> None:
        await redis.delete("v1:{fleet}:leader")
        assert await mesh.fleet.lead("s1") is not None

    monkeypatch.setattr(module, "plan", frozen)
    assert await scheduler.tick() is None
    assert await mesh.orders("w") == []
    assert await mesh.fleet.plan_notes() == {}
    monkeypatch.setattr(module, "plan", plan)
    assert await scheduler.tick() is None


async def test_notification_triggers_plan_before_next_tick(
    redis: Redis, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TICK_SECONDS", 1000.0)
    await mesh.report("w", cold("org/a"), cold("org/b"))
    scheduler = control(redis)
    async with running(scheduler):
        for count, model in enumerate(("org/a", "org/b"), 1):
            await mesh.ask(model)
            await until(mesh, "w", [("load_model", "org/a"), ("load_model", "org/b")][:count])


async def test_failures_of_models_with_work_are_forgiven_at_half_time(
    redis: Redis, mesh: Mesh
) -> None:
    scheduler = control(redis)
    await mesh.report("w", cold("org/a"))
    await mesh.fleet.record_failure("org/a", "w", BROKEN)
    await mesh.ask("org/a")
    await scheduler.tick()
    assert await mesh.orders("w") == []
    seconds, _ = await redis.time()
    value = f"{(seconds + 7 * 60) * 1000} ".encode() + BROKEN.SerializeToString()
    await redis.hset("v1:{fleet}:failures", "org/a w", value)
    await scheduler.tick()
    await scheduler.tick()
    assert await mesh.orders("w") == [("load_model", "org/a")]


async def test_plan_that_fails_is_logged_and_the_next_one_made(
    redis: Redis, mesh: Mesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def failing_once(state: PlanInput) -> PlacementPlan:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        return plan(state)

    monkeypatch.setattr(module, "plan", failing_once)
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    await mesh.report("w", cold("org/a"))
    await mesh.ask("org/a")
    async with running(control(redis)):
        await until(mesh, "w", [("load_model", "org/a")])
    assert "the plan failed" in caplog.messages


async def test_scheduler_survives_redis_data_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_SECONDS", 0.02)
    with RedisServer() as server:
        redis = connect(server.url)
        mesh = Mesh(redis)
        async with running(control(redis)):
            for is_last in (False, True):
                await mesh.report("w", cold("org/a"))
                await mesh.ask("org/a")
                await until(mesh, "w", [("load_model", "org/a")])
                if not is_last:
                    server.kill()
                    server.start()
        await redis.aclose()
