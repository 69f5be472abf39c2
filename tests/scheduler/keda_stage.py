"""A scheduler's scaler over real gRPC, KEDA and workers, on a clock that jumps: hours in seconds,
and the same every time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Final

from libs.catalog.pools import Pools, PoolSpec
from libs.serving import GrpcServer, serving
from services.scheduler.demand import Demand
from services.scheduler.scaler import Scaler
from services.scheduler.view import SchedulerView
from tests.router.parts import until
from tests.scheduler.plant import FakeWorkers
from tests.support.clock import FakeClock
from tests.support.keda import Change, FakeKeda, ScaledObject

POOL: Final = "cpu"
COOLDOWN: Final = 300.0
SCALED: Final = ScaledObject("worker-cpu", {"pool": POOL}, cooldown_period=COOLDOWN)
SPEC: Final = PoolSpec(POOL, max_workers=20, cold_start_seconds=60, drain_seconds=30)


class Scheduler:
    """The part of a scheduler that KEDA calls. A new one remembers nothing."""

    def __init__(self, clock: FakeClock, spec: PoolSpec) -> None:
        self.view = SchedulerView()
        self.demand = Demand(Pools(POOL, {POOL: spec}))
        self.scaler = Scaler(
            self.demand, self.view, clock=clock.now, sleep=clock.wait, chance=lambda: 0.5
        )

    def see(self, workers: FakeWorkers) -> None:
        snapshot = workers.snapshot()
        self.demand.update(snapshot)
        self.view.update(snapshot)


class Stage:
    """`run` lets time pass. `blind`: the scheduler sees nothing new, as while Redis is away."""

    def __init__(
        self,
        workers: FakeWorkers,
        scaled: ScaledObject = SCALED,
        spec: PoolSpec = SPEC,
        snapshot_seconds: float = 1.0,
    ) -> None:
        self.clock = FakeClock(settle=self._settle)
        self.workers = workers
        self.spec = spec
        self.blind = False
        self._snapshot_seconds = snapshot_seconds
        self.scheduler = Scheduler(self.clock, spec)
        self.keda = FakeKeda("", scaled, workers, self.clock, about_to=self._check)
        self.wrong: list[str] = []
        """Changes that should not have been made."""
        self.most = 0
        """Replicas."""
        self.desired: list[tuple[float, int]] = []
        self._server = AsyncExitStack()
        self._address = "127.0.0.1:0"

    async def serve(self) -> None:
        """Starts a scheduler, where the last one was."""
        self.scheduler = Scheduler(self.clock, self.spec)
        self.scheduler.see(self.workers)
        service = serving(self._address, [self.scheduler.scaler.service()])
        server: GrpcServer = await self._server.enter_async_context(service)
        self._address = server.address

    async def stop(self, *, in_order: bool = True) -> None:
        """Ends the scheduler; not `in_order`: its streams are cut."""
        if in_order:
            self.scheduler.scaler.close()
        await self._server.aclose()

    async def restart(self, *, in_order: bool = True) -> None:
        """Another process takes its place."""
        await self.stop(in_order=in_order)
        await self.keda.disconnected()
        await self.serve()
        await self.keda.connected()

    async def run(self, seconds: float) -> None:
        await self.clock.run(seconds)

    async def run_until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Run until the condition holds; fail after this number of seconds of the clock."""
        end = self.clock.now() + seconds
        while not condition():
            assert self.clock.now() < end, f"{what}: not within {seconds:g} s; {self.story()}"
            await self.run(self._snapshot_seconds)

    def story(self) -> str:
        """All changes, in one line."""
        return ", ".join(
            f"{change.at:g}s {change.before}→{change.after} {change.by}"
            for change in self.keda.changes
        )

    def changes_since(self, at: float) -> list[Change]:
        return [change for change in self.keda.changes if change.at >= at]

    async def play(self) -> None:
        """Run the events of each second."""
        while True:
            await self.clock.sleep(self._snapshot_seconds)
            self.workers.advance(self._snapshot_seconds)
            if not self.blind:
                self.scheduler.see(self.workers)
            decision = self.scheduler.demand.demands[POOL]
            self.desired.append((self.clock.now(), decision.desired))
            self.most = max(self.most, self.workers.replicas)

    def connect(self) -> FakeKeda:
        self.keda.address = self._address
        return self.keda

    def _check(self, change: Change) -> None:
        workers = self.workers
        if change.after == 0 and (
            workers.waiting_tokens or workers.leased_tokens or workers.is_loading
        ):
            self.wrong.append(
                f"{change}: {workers.waiting_tokens} tokens wait, loading: {workers.is_loading}"
            )

    async def _settle(self) -> None:
        """Real time for a push to arrive, when one is on its way."""
        decision = self.scheduler.demand.demands.get(POOL)
        if (
            decision is not None
            and decision.active
            and self.keda.is_listening
            and self.workers.replicas == 0
        ):
            await until(lambda: self.workers.replicas > 0, "a push to arrive")


@asynccontextmanager
async def staged(
    workers: FakeWorkers,
    scaled: ScaledObject = SCALED,
    spec: PoolSpec = SPEC,
    snapshot_seconds: float = 1.0,
) -> AsyncIterator[Stage]:
    """A stage with a scheduler that serves and a KEDA that scales."""
    stage = Stage(workers, scaled, spec, snapshot_seconds)
    await stage.serve()
    try:
        async with stage.connect():
            play = stage.clock.spawn(stage.play())
            yield stage
            play.cancel()
            await asyncio.gather(play, return_exceptions=True)
    finally:
        await stage.stop()
    assert stage.wrong == []


def turns(changes: list[Change]) -> int:
    """Count how often the replicas changed direction."""
    return sum((a.after > a.before) != (b.after > b.before) for a, b in pairwise(changes))
