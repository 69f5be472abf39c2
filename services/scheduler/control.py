"""The scheduler's control loop: reads the mesh every second, and at once when work arrives for a
model without a copy. The leading scheduler then plans (`placement.py`) and sends the plan's orders.

Nothing depends on it: while no scheduler leads, workers claim cold models themselves. The loop
survives outages of Redis.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from shoal.v1 import worker_pb2

from libs.errors import NoCapacity
from libs.eviction import Policy
from libs.fleet import LOADING_STATES, Fleet, FleetSnapshot, LostLeadership, WorkerRecord
from libs.queue import LaneGauges, LaneKey, Lanes, RedisCheck, UnsuitableRedis
from libs.telemetry.logs import fields
from services.scheduler.demand import PoolDemand
from services.scheduler.planning.placement import (
    RESIDENT,
    Order,
    PlacementPlan,
    PlanInput,
    PoolModel,
    SentOrder,
    plan,
)
from services.scheduler.planning.recent_orders import RecentOrders
from services.scheduler.rates import LaneArrivals
from services.scheduler.view import MeshSnapshot, SchedulerView

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 1.0
BUSY_TICK_SECONDS: Final = 0.2
"""The period while models wait for loads in progress to finish."""
DEBOUNCE_SECONDS: Final = 0.02
"""The delay after a notification, so that work for several models that arrives together is in one
plan.
"""
RECONNECT_SECONDS: Final = 0.2
SENT_MS: Final = 60_000
"""Time for which a sent order is remembered."""
FENCE_BITS: Final = 32
"""The low bits of a plan's number count the leader's plans; the high bits are its fencing
number.
"""
_AT_ONCE: Final = 8


class Control:
    """Reads the mesh, leads and plans."""

    def __init__(
        self,
        lanes: Lanes,
        fleet: Fleet,
        view: SchedulerView,
        *,
        scheduler_id: str,
        policy: Policy,
        seen: Callable[[MeshSnapshot], object],
        demands: Callable[[], Mapping[str, PoolDemand]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            seen: Called with every snapshot before `view` is updated.
            demands: Returns each pool's demand, to be published with the plan.
        """
        self._lanes = lanes
        self._fleet = fleet
        self._view = view
        self._scheduler_id = scheduler_id
        self._policy = policy
        self._seen = seen
        self._demands = demands
        self._clock = clock
        self._woken = asyncio.Event()
        self._redis_check = RedisCheck(lanes)
        # The state: arrival rates; since when work waits for models without a copy; our fencing
        # number (0: another leads) and the number of plans under it; orders that heartbeats may not
        # show yet; the published notes on models, and their last orders.
        self._arrivals = LaneArrivals()
        self._waiting_since_ms: dict[PoolModel, int] = {}
        self._fence = 0
        self._plans = 0
        self._sent: list[SentOrder] = []
        self._published: dict[str, str] = {}
        self._recent_orders = RecentOrders()

    async def run(self, on_snapshot: Callable[[], Awaitable[None]]) -> None:
        """Run until cancelled; await `on_snapshot` after every snapshot. Raises UnsuitableRedis."""
        was_away = False
        while True:
            wait = TICK_SECONDS
            try:
                made = await self.tick()
                await on_snapshot()
                if was_away:
                    log.info("redis is back")
                was_away = False
                wait = BUSY_TICK_SECONDS if made is not None and made.is_waiting else TICK_SECONDS
            except NoCapacity as error:
                if not was_away:
                    log.warning("redis is unavailable", extra=fields({"error": error.message}))
                was_away, wait = True, RECONNECT_SECONDS
                self._redis_check.mark_away()
            except UnsuitableRedis:
                raise
            except Exception:
                # The mesh serves without it, and the next snapshot may differ.
                log.exception("the plan failed")
            await self._pause(wait)

    async def receive_wakeups(self) -> None:
        """Wake `run` when work arrives for a model without a copy that the last snapshot does not
        show. Runs until cancelled.
        """
        while True:
            try:
                async for wakeup in self._lanes.wakeups():
                    if wakeup is None or (isinstance(wakeup, LaneKey) and self._is_unseen(wakeup)):
                        self._woken.set()
            except NoCapacity:
                await asyncio.sleep(RECONNECT_SECONDS)

    async def tick(self) -> PlacementPlan | None:
        """Read the mesh and, if this scheduler leads, make one plan. NoCapacity while Redis is
        away.
        """
        await self._redis_check.run_if_due()
        await self._lead()
        snapshot = await self._read_mesh()
        if not self._fence:
            return None
        try:
            return await self._plan(snapshot)
        except LostLeadership:
            self._lost()
            return None

    async def resign(self) -> None:
        """Give up the leadership, so that another scheduler may take it at once."""
        if self._fence and await self._fleet.resign(self._fence):
            log.info("lead given up", extra=fields({"fence": self._fence}))
        self._fence = 0

    # Reading the mesh

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return
        await asyncio.sleep(DEBOUNCE_SECONDS)
        self._woken.clear()

    def _is_unseen(self, lane: LaneKey) -> bool:
        snapshot, at = self._view.snapshot, (lane.pool, lane.model)
        return snapshot is None or (
            at not in self._waiting_since_ms and at not in _served(snapshot.fleet, [at])
        )

    async def _read_mesh(self) -> MeshSnapshot:
        self._woken.clear()
        fleet = await self._fleet.refresh()
        gauges = {gauge.lane: gauge for gauge in await self._lanes.lane_gauges()}
        snapshot = MeshSnapshot(fleet, gauges, self._clock(), leads=bool(self._fence))
        self._arrivals.update(gauges, snapshot.at)
        wanted = [(lane.pool, lane.model) for lane, gauge in gauges.items() if gauge.queued_tokens]
        waiting = set(wanted) - _served(fleet, wanted)
        self._waiting_since_ms = {
            at: self._waiting_since_ms.get(at, fleet.now_ms) for at in waiting
        }
        self._seen(snapshot)
        self._view.update(snapshot)
        return snapshot

    # Leading

    async def _lead(self) -> None:
        fence = await self._fleet.lead(self._scheduler_id, self._fence)
        if fence is None:
            if self._fence:
                self._lost()
        elif fence != self._fence:
            log.info("leading", extra=fields({"fence": fence}))
            self._fence, self._plans, self._sent, self._published, self._recent_orders = (
                fence,
                0,
                [],
                {},
                RecentOrders(),
            )

    def _lost(self) -> None:
        log.warning("lead lost", extra=fields({"fence": self._fence}))
        self._fence = 0

    async def _plan(self, snapshot: MeshSnapshot) -> PlacementPlan:
        rates = self._rates(snapshot.gauges)
        await self._forgive(snapshot, rates)
        is_first, self._plans = self._plans == 0, self._plans + 1
        number = (self._fence << FENCE_BITS) + self._plans
        self._sent = [sent for sent in self._sent if snapshot.fleet.now_ms - sent.sent_ms < SENT_MS]
        waiting = dict(self._waiting_since_ms)
        state = PlanInput(
            snapshot.fleet,
            snapshot.gauges,
            rates,
            waiting,
            tuple(self._sent),
            self._plans,
            self._policy,
        )
        # In a thread: a plan for thousands of models takes longer than KEDA's calls may wait.
        made = await asyncio.to_thread(plan, state)
        await self._send(made.orders, number, snapshot.fleet.now_ms)
        await self._publish(made, snapshot, number, replace_all=is_first)
        return made

    def _rates(self, gauges: Mapping[LaneKey, LaneGauges]) -> dict[LaneKey, float]:
        """Return arrivals in tokens per second, of lanes that have any: the higher of the fast and
        the slow average.
        """
        rates = ((lane, self._arrivals.rate(lane)) for lane in gauges)
        return {lane: max(rate.fast, rate.slow) for lane, rate in rates if rate.slow > 0}

    async def _forgive(self, snapshot: MeshSnapshot, rates: Mapping[LaneKey, float]) -> None:
        failed = snapshot.fleet.failures
        wanted = {
            lane.model
            for lane, gauge in snapshot.gauges.items()
            if lane.model in failed and (gauge.queued_tokens or rates.get(lane))
        }
        if wanted and (forgiven := await self._fleet.forgive(wanted)):
            log.info("failures forgiven", extra=fields({"failures": forgiven}))

    async def _send(self, orders: Iterable[Order], number: int, now_ms: int) -> None:
        """Send orders to several workers concurrently, but to each worker in order."""
        by_worker: dict[str, list[Order]] = defaultdict(list)
        for order in orders:
            by_worker[order.worker_id].append(order)
        free = asyncio.Semaphore(_AT_ONCE)
        tasks = [
            asyncio.ensure_future(self._send_to_one(own, number, now_ms, free))
            for own in by_worker.values()
        ]
        # All are awaited, so that sent orders are recorded even if others failed.
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if error is not None:
                raise error

    async def _send_to_one(
        self, orders: Iterable[Order], number: int, now_ms: int, free: asyncio.Semaphore
    ) -> None:
        for order in orders:
            async with free:
                seq = await self._order(order, number)
            values = fields(
                {
                    "order": order.kind,
                    "model": order.model,
                    "worker": order.worker_id,
                    "plan": number,
                    "seq": seq,
                }
            )
            if seq:
                self._sent.append(SentOrder(order, number, now_ms))
                log.info("ordered", extra=values)
            else:
                log.info("the model is being claimed", extra=values)

    async def _order(self, order: Order, number: int) -> int:
        if order.kind == "evict":
            directive = worker_pb2.Directive(evict_model=order.model, plan=number)
            return await self._fleet.order(
                order.worker_id, order.epoch, directive, fence=number >> FENCE_BITS
            )
        directive = worker_pb2.Directive(load_model=order.model, plan=number)
        lane = LaneKey(order.pool, order.model)
        earlier = [
            sent.order
            for sent in self._sent
            if sent.order.kind == "load" and sent.order.pool == order.pool
        ]
        known = {
            *order.known,
            *(other.worker_id for other in earlier if other.model == order.model),
        }
        return await self._fleet.order(
            order.worker_id,
            order.epoch,
            directive,
            fence=number >> FENCE_BITS,
            lane=lane,
            known=known,
        )

    async def _publish(
        self, made: PlacementPlan, snapshot: MeshSnapshot, number: int, *, replace_all: bool
    ) -> None:
        """Publish the plan's notes: models that are held back now, and the orders of the last
        minutes with their outcomes.
        """
        now, ordered = self._clock(), {order.model for order in made.orders}
        self._recent_orders.ordered(made.orders, made.notes, now)
        held_back = {model: note for model, note in made.notes.items() if model not in ordered}
        notes = self._recent_orders.notes(snapshot.fleet, now) | held_back
        changed = {
            model: note for model, note in notes.items() if self._published.get(model) != note
        }
        changed |= dict.fromkeys(self._published.keys() - notes.keys(), "")
        demands = self._demands()
        await self._fleet.note_plan(
            number >> FENCE_BITS,
            number,
            changed,
            desired={name: demand.desired for name, demand in demands.items()},
            cold_starts={name: demand.input.cold_start_seconds for name, demand in demands.items()},
            replace_all=replace_all,
        )
        self._published = notes


def _served(fleet: FleetSnapshot, pool_models: Iterable[PoolModel]) -> set[PoolModel]:
    """Return those (pool, model) with a worker that stays and has the model resident, or will
    soon.
    """
    return {
        (pool, model)
        for pool, model in pool_models
        if any(worker.pool == pool and _serves(worker, model) for worker in fleet.holders(model))
    }


def _serves(worker: WorkerRecord, model: str) -> bool:
    """Return whether the model is resident or loading on the worker, and neither is about to
    leave.
    """
    record = worker.models[model]
    return not (worker.is_going or record.leaving) and record.state in (*LOADING_STATES, RESIDENT)
