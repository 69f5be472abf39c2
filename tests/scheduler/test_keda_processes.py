"""KEDA scales real worker processes behind a real router: nothing is lost, nothing scaled to zero
too early.

Redis, router, workers, gRPC, heartbeats, the scheduler's plan and its scaler are real; KEDA and the
HPA are `FakeKeda` on a clock that runs fast. The suite has the step; spike, sine and spot loss take
minutes and run with SHOAL_KEDA=full.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import pytest
import shoal
from shoal.v1 import models_pb2

from libs.catalog.pools import Pools, PoolSpec
from libs.eviction import DEFAULT, POLICIES
from libs.fleet import LOADING_STATES, Fleet, WorkerModelRecord, WorkerRecord
from libs.queue import Lanes, connect
from libs.serving import serving
from services.local.settings import MINILM, packaged_minilm
from services.scheduler.control import Control
from services.scheduler.demand import Demand
from services.scheduler.scaler import Scaler
from services.scheduler.view import MeshSnapshot, SchedulerView
from tests.scheduler.keda_stage import turns
from tests.support.clock import FastClock
from tests.support.cluster import Cluster
from tests.support.deployment import Deployment
from tests.support.keda import Change, FakeKeda, ScaledObject
from tests.support.texts import texts
from tests.support.waiting import end_tasks

POOL: Final = "cpu"
TEXTS: Final = texts(64, shortest=30, longest=60, seed=8)
REQUEST_TEXTS: Final = 4
STEP_SECONDS: Final = 600.0
"""Real seconds until there must be three workers. Without a bound, the load would never end."""
full = pytest.mark.skipif(
    os.environ.get("SHOAL_KEDA") != "full", reason="takes minutes: SHOAL_KEDA=full"
)


def slowed(snapshot: MeshSnapshot, factor: float, at: float) -> MeshSnapshot:
    """Return the snapshot as the scheduler would have it at `at` if real time were `factor` times
    as long.

    KEDA's clock is `factor` times as fast as the workers, so by that clock they are slower by that
    factor: rates are divided, durations are multiplied. Bytes are multiplied too, because the speed
    of an unmeasured model is estimated from them. Ages of heartbeats stay: workers send them by the
    real clock.
    """

    def model_slowed(model: WorkerModelRecord) -> WorkerModelRecord:
        return replace(
            model,
            bytes=round(model.bytes * factor),
            tokens_per_second=model.tokens_per_second / factor,
            load_seconds=model.load_seconds * factor,
            idle_seconds=model.idle_seconds * factor,
            resident_seconds=model.resident_seconds * factor,
        )

    def worker_slowed(worker: WorkerRecord) -> WorkerRecord:
        left = worker.preempted_in_seconds
        return replace(
            worker,
            memory_bytes=round(worker.memory_bytes * factor),
            used_bytes=round(worker.used_bytes * factor),
            preempted_in_seconds=left * factor if left is not None else None,
            models={name: model_slowed(model) for name, model in worker.models.items()},
        )

    def card_slowed(card: models_pb2.ModelCard) -> models_pb2.ModelCard:
        made = models_pb2.ModelCard()
        made.CopyFrom(card)
        made.bytes = round(card.bytes * factor)
        return made

    fleet = replace(
        snapshot.fleet,
        workers={name: worker_slowed(worker) for name, worker in snapshot.fleet.workers.items()},
        cards={name: card_slowed(card) for name, card in snapshot.fleet.cards.items()},
    )
    now_ms = snapshot.fleet.now_ms
    gauges = {
        lane: replace(gauge, used_ms=now_ms - round((now_ms - gauge.used_ms) * factor))
        for lane, gauge in snapshot.gauges.items()
    }
    return replace(snapshot, fleet=fleet, gauges=gauges, at=at)


@dataclass
class Traffic:
    """Requests through the real client, and what became of them."""

    client: shoal.AsyncClient
    asked: int = 0
    answered: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        return self.asked - self.answered - len(self.errors)

    async def ask(self) -> None:
        start = self.asked * REQUEST_TEXTS % len(TEXTS)
        self.asked += 1
        try:
            dense = (
                await self.client.encode(MINILM, TEXTS[start : start + REQUEST_TEXTS], timeout=300)
            ).dense
        except shoal.ShoalError as error:
            self.errors.append(str(error))
            return
        self.answered += dense is not None and dense.shape == (REQUEST_TEXTS, 384)

    async def keep_asking(self, concurrent: int, is_over: Callable[[], bool]) -> None:
        """Keep this number of requests in flight until the end; return when all are answered."""

        async def one_after_another() -> None:
            while not is_over():
                await self.ask()

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrent):
                group.create_task(one_after_another())

    async def ask_at(self, rate: Callable[[float], float], seconds: float) -> None:
        """`rate(t)` requests a second at t seconds from now, evenly spread; returns when all are
        answered.
        """
        began, due = time.monotonic(), 0.0
        async with asyncio.TaskGroup() as group:
            while (elapsed := time.monotonic() - began) < seconds:
                due += rate(elapsed) * 0.02
                for _ in range(int(due)):
                    group.create_task(self.ask())
                due -= int(due)
                await asyncio.sleep(0.02)


class Mesh:
    """A router, a scheduler in this process, KEDA, and as many workers as that wants."""

    def __init__(
        self,
        cluster: Cluster,
        deployment: Deployment,
        clock: FastClock,
        traffic: Traffic,
        spec: PoolSpec,
    ) -> None:
        self.cluster = cluster
        self.deployment = deployment
        self.clock = clock
        self.traffic = traffic
        self.view = SchedulerView()
        self.demand = Demand(Pools(POOL, {POOL: spec}))
        self.scaler = Scaler(self.demand, self.view, clock=clock.now, sleep=clock.sleep)
        self.keda: FakeKeda
        self.wrong: list[str] = []
        """Changes to zero while there was something to do."""
        self.desired: list[int] = []

    def seen(self, snapshot: MeshSnapshot) -> None:
        """A look of the scheduler's own, on KEDA's clock."""
        answers = self.demand.update(slowed(snapshot, self.clock.factor, self.clock.now()))
        if POOL in answers:
            self.desired.append(answers[POOL].desired)

    def about_to(self, change: Change) -> None:
        snapshot = self.view.snapshot
        if change.after or snapshot is None:
            return
        waiting = sum(lane.queued_tokens + lane.leased_tokens for lane in snapshot.gauges.values())
        loading = [
            model.model
            for worker in snapshot.fleet.workers.values()
            for model in worker.models.values()
            if model.state in LOADING_STATES
        ]
        if waiting or loading or self.traffic.in_flight:
            self.wrong.append(
                f"{change}: {waiting} tokens wait, {loading} loading, {self.traffic.in_flight} "
                "requests unanswered"
            )

    def serving_workers(self) -> list[str]:
        """Workers with the model resident that are not about to stop."""
        snapshot = self.view.snapshot
        return (
            [
                worker.worker_id
                for worker in snapshot.fleet.resident_on(MINILM)
                if not worker.is_going
            ]
            if snapshot is not None
            else []
        )

    def live_workers(self) -> int:
        """Count the workers that send heartbeats and are not about to stop."""
        snapshot = self.view.snapshot
        if snapshot is None:
            return 0
        return sum(not worker.is_going for worker in snapshot.fleet.workers.values())

    async def until(self, condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
        """Real seconds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds:g} s for {what}; {self.story()}"
            await asyncio.sleep(0.05)

    async def requests_a_second(self) -> float:
        """Return one worker's requests per second, from its measurements under load."""
        await self.traffic.keep_asking(
            24, lambda: bool(self.serving_workers()) and self.traffic.answered > 100
        )
        snapshot = self.view.snapshot
        assert snapshot is not None
        speeds = [
            model.tokens_per_second
            for worker in snapshot.fleet.workers.values()
            for model in worker.models.values()
        ]
        (lane,) = snapshot.gauges.values()
        return max(speeds) / (lane.enqueued_tokens / self.traffic.asked)

    def story(self) -> str:
        """All changes, on KEDA's clock."""
        return ", ".join(
            f"{change.at:.0f}s {change.before}→{change.after} {change.by}"
            for change in self.keda.changes
        )


@asynccontextmanager
async def running(
    directory: Path,
    *,
    factor: float,
    scaled: ScaledObject,
    spec: PoolSpec,
    each: Mapping[str, Mapping[str, str]] | None = None,
) -> AsyncIterator[Mesh]:
    checkpoint = packaged_minilm()
    assert checkpoint is not None
    clock = FastClock(factor)
    with (
        Cluster(directory, models=f"{MINILM}={checkpoint}", workers=0, each=each) as cluster,
        Deployment(cluster) as deployment,
    ):
        redis = connect(cluster.redis_url)
        async with shoal.AsyncClient(cluster.address) as client:
            mesh = Mesh(cluster, deployment, clock, Traffic(client), spec)
            lanes = Lanes(redis, router_id="scheduler", dead_result=b"")
            control = Control(
                lanes,
                Fleet(redis),
                mesh.view,
                scheduler_id="scheduler",
                policy=POLICIES[DEFAULT],
                seen=mesh.seen,
            )
            loops = [
                asyncio.create_task(control.run(nothing)),
                asyncio.create_task(control.receive_wakeups()),
            ]
            try:
                async with serving(
                    "127.0.0.1:0", [mesh.scaler.service()], on_drained=mesh.scaler.close
                ) as server:
                    mesh.keda = FakeKeda(
                        server.address, scaled, deployment, clock, about_to=mesh.about_to
                    )
                    async with mesh.keda:
                        yield mesh
            finally:
                await end_tasks(loops)
                await redis.aclose()
    assert mesh.wrong == []
    assert mesh.traffic.errors == []
    assert mesh.traffic.answered == mesh.traffic.asked > 0
    assert set(deployment.statuses.values()) <= {0}


async def nothing() -> None: ...


async def test_step_takes_real_workers_from_none_to_three_and_back(tmp_path: Path) -> None:
    """20 seconds of KEDA's a real second. Requests never stop until there are three workers; all
    of them are answered.

    The backlog of 24 requests needs more than three workers on every machine, so that none is
    stopped while it starts. Which of them load the model is the placement's decision, by real
    speeds.
    """
    scaled = ScaledObject(
        "worker-cpu", {"pool": POOL, "drainSeconds": "2"}, cooldown_period=60, max_replicas=3
    )
    spec = PoolSpec(POOL, max_workers=3, cold_start_seconds=120, keep_warm_seconds=60)
    async with running(tmp_path, factor=20, scaled=scaled, spec=spec) as mesh:
        await mesh.until(lambda: mesh.view.snapshot is not None, "the first look")
        assert mesh.deployment.replicas == 0
        async with asyncio.timeout(STEP_SECONDS):
            await mesh.traffic.keep_asking(24, lambda: mesh.live_workers() == 3)
        ended = mesh.clock.now()
        await mesh.until(
            lambda: mesh.deployment.replicas == 0 and not mesh.deployment.pods, "zero workers"
        )
        print(mesh.story(), f"; the last request was answered at {ended:.0f}s")
        assert [change.after for change in mesh.keda.changes][:1] == [1]
        assert max(change.after for change in mesh.keda.changes) == 3
        assert (mesh.keda.changes[-1].after, mesh.keda.changes[-1].by) == (0, "keda")
        assert turns(mesh.keda.changes) == 1
        assert mesh.keda.last_active is not None
        assert mesh.keda.changes[-1].at > max(ended, mesh.keda.last_active + scaled.cooldown_period)


@full
async def test_spike_is_answered_and_its_workers_go_again(tmp_path: Path) -> None:
    """200 requests at once, to no worker at all."""
    scaled = ScaledObject(
        "worker-cpu", {"pool": POOL, "drainSeconds": "30"}, cooldown_period=120, max_replicas=4
    )
    spec = PoolSpec(POOL, max_workers=4, cold_start_seconds=120, keep_warm_seconds=60)
    async with running(tmp_path, factor=20, scaled=scaled, spec=spec) as mesh:
        await mesh.until(lambda: mesh.view.snapshot is not None, "the first look")
        async with asyncio.TaskGroup() as group:
            for _ in range(200):
                group.create_task(mesh.traffic.ask())
        await mesh.until(
            lambda: mesh.deployment.replicas == 0 and not mesh.deployment.pods, "zero workers", 180
        )
        print(mesh.story())
        assert max(change.after for change in mesh.keda.changes) >= 3
        assert turns(mesh.keda.changes) == 1


@full
async def test_sine_is_followed_by_real_workers_without_flapping(tmp_path: Path) -> None:
    """Two periods of an hour of KEDA's, two minutes each, between load for 0.2 and for 1.2
    workers.
    """
    factor, hours = 30.0, 2
    scaled = ScaledObject("worker-cpu", {"pool": POOL}, cooldown_period=300, max_replicas=4)
    spec = PoolSpec(POOL, max_workers=4, cold_start_seconds=240)
    async with running(tmp_path, factor=factor, scaled=scaled, spec=spec) as mesh:
        busy = await mesh.requests_a_second()
        began, period = mesh.clock.now(), 3_600 / factor
        await mesh.traffic.ask_at(
            lambda at: busy * (0.7 - 0.5 * math.cos(2 * math.pi * at / period)), hours * period
        )
        changes = [change for change in mesh.keda.changes if change.at > began]
        print(f"{busy:.1f} requests/s a worker; {mesh.story()}")
        assert turns(changes) - 2 * hours <= hours
        assert 0 not in {change.after for change in changes}
        assert max(change.after for change in mesh.keda.changes) >= 2
        await mesh.until(
            lambda: mesh.deployment.replicas == 0 and not mesh.deployment.pods, "zero workers", 180
        )


@full
async def test_spot_machines_may_go_with_and_without_notice(tmp_path: Path) -> None:
    """The load needs 1.2 workers: one machine is lost 15 s after its notice, one at once with the
    requests that it holds.
    """
    notices = {
        f"worker-{number}": {"SHOAL_SPOT": f"file:{tmp_path}/worker-{number}.spot"}
        for number in range(30)
    }
    scaled = ScaledObject("worker-cpu", {"pool": POOL}, cooldown_period=120, max_replicas=5)
    spec = PoolSpec(POOL, spot=True, max_workers=5, cold_start_seconds=120)
    async with running(tmp_path, factor=20, scaled=scaled, spec=spec, each=notices) as mesh:
        busy = await mesh.requests_a_second()
        load = asyncio.create_task(mesh.traffic.ask_at(lambda _: 1.2 * busy, 75))
        await mesh.until(lambda: len(mesh.serving_workers()) >= 2, "two workers")
        victim = mesh.serving_workers()[0]
        (tmp_path / f"{victim}.spot").write_text("15")
        noticed = time.monotonic()
        # Two for the load and one for the machine that goes; at first there may be more anyway.
        await mesh.until(lambda: mesh.desired[-1] >= 3, "a replacement to be asked for", 10)
        await mesh.until(lambda: time.monotonic() > noticed + 15, "the machine to go")
        mesh.deployment.kill(victim)
        await mesh.until(
            lambda: victim not in mesh.serving_workers() and len(mesh.serving_workers()) >= 2,
            "a replacement",
            40,
        )
        mesh.deployment.kill(mesh.serving_workers()[0])
        await load
        await mesh.until(
            lambda: mesh.deployment.replicas == 0 and not mesh.deployment.pods, "zero workers", 240
        )
        print(f"{busy:.1f} requests/s a worker; {mesh.story()}")
