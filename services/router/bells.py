"""Who is told that a lane has work: a pull that waits here, pulls at other routers, or a worker that must load the model first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from shoal.v1 import models_pb2

from libs.fleet import Fleet, may_claim
from libs.queue import LaneGauges, LaneKey
from services.router.background import Background
from services.router.view import View
from services.router.waiters import Waiter, Waiters

CLAIM_MS: Final = 10_000
"""Covers the time until the worker's heartbeat says LOADING; after that its heartbeat keeps others away."""
_NEARNESS: Final = {models_pb2.MODEL_STATE_WARM: 2, models_pb2.MODEL_STATE_COLD: 1}


class Bells:
    """Wakes waiting pulls, and lets one worker claim a lane whose model is nowhere or too rarely resident."""

    def __init__(self, waiters: Waiters, fleet: Fleet, view: View, background: Background) -> None:
        self.waiters = waiters
        self._fleet = fleet
        self._view = view
        self._background = background
        # The state: lanes with work that no waiting pull could be found for; when a lane's next lease may run out, by Redis' clock.
        self._unplaced: dict[LaneKey, None] = {}
        self._next_expiry: dict[LaneKey, int] = {}

    def needs_others(self, lane: LaneKey, jobs: int) -> bool:
        """More jobs than pulls that wait here: the other routers' pulls must hear of them."""
        return self.waiters.free_count(lane) < jobs

    def ring(self, lane: LaneKey, jobs: int = 1, early: Waiter | None = None) -> None:
        """The lane has new jobs. `early`: the pull that was woken for them while they were on their way."""
        if self.waiters.ring(lane, jobs, early):
            return
        self._unplaced[lane] = None
        if self.waiters.loaders(lane.pool):
            self._background.spawn(self._offer(lane))

    def ring_all(self) -> None:
        """Rings may have been missed."""
        self.waiters.ring_all()
        self._next_expiry.clear()

    def arrived(self, waiter: Waiter) -> None:
        """A pull begins to wait; it may be the one that an unplaced lane needs."""
        if waiter.can_load:
            for lane in [lane for lane in self._unplaced if lane.pool == waiter.pool]:
                self._background.spawn(self._offer(lane))

    def found_empty(self, lane: LaneKey, rings: int, next_expiry_ms: int | None = None) -> None:
        """A look into the lane left nothing there, and may have told when its next lease runs out."""
        self.waiters.found_empty(lane, rings)
        self._unplaced.pop(lane, None)
        if next_expiry_ms is not None:
            self._next_expiry[lane] = next_expiry_ms

    def remind(self, gauges: Iterable[LaneGauges], now_ms: int) -> None:
        """Once a second: rings for work that waits although nobody rings for it: its puller died, its bell was lost, its lease ran
        out, or its model is not resident yet."""
        seen, waiting = set(), set()
        for gauge in gauges:
            lane = gauge.lane
            seen.add(lane)
            if gauge.queued_jobs:
                waiting.add(lane)
                self.ring(lane)
            elif gauge.leased_tokens and now_ms >= self._next_expiry.get(lane, 0):
                self.waiters.ring(lane)
        self._unplaced = {lane: None for lane in self._unplaced if lane in waiting}
        self._next_expiry = {lane: expiry for lane, expiry in self._next_expiry.items() if lane in seen}
        self.waiters.forget_lanes(seen)

    async def _offer(self, lane: LaneKey) -> None:
        """Lets the nearest waiting worker that may load the lane's model claim it."""
        gauges = self._view.gauges_of(lane)
        if not gauges.queued_tokens:  # its work is younger than the gauges
            gauges = replace(gauges, queued_jobs=1, queued_tokens=1)
        for waiter in self._nearest(lane):
            if waiter.is_free and may_claim(gauges, self._view.snapshot, waiter.worker_id):
                if await self._claim(lane, waiter):
                    self._unplaced.pop(lane, None)
                return

    def abandon(self, lane: LaneKey, worker_id: str) -> None:
        """The worker will not load the lane's model after all; another one may."""
        self._background.spawn(self._release(lane, worker_id))

    def _nearest(self, lane: LaneKey) -> list[Waiter]:
        """Waiting workers with room, those with the model in memory first; only those that have it at all, if any worker has."""
        workers = self._view.snapshot.workers
        near = {worker_id: _NEARNESS.get(worker.state(lane.model), 0) for worker_id, worker in workers.items()}
        is_on_disk = any(near[worker.worker_id] for worker in self._view.snapshot.in_pool(lane.pool))
        loaders = [waiter for waiter in self.waiters.loaders(lane.pool) if near.get(waiter.worker_id, 0) or not is_on_disk]
        return sorted(loaders, key=lambda waiter: -near.get(waiter.worker_id, 0))

    async def _claim(self, lane: LaneKey, waiter: Waiter) -> bool:
        waiter.is_reserved = True
        try:
            claimed = await self._fleet.claim(lane, waiter.worker_id, CLAIM_MS)
        finally:
            waiter.is_reserved = False
            waiter.event.set()  # bells that rang meanwhile passed it by
        if claimed and not self.waiters.is_waiting(waiter):
            await self._fleet.release_claim(lane, waiter.worker_id)
            return False
        if claimed:
            waiter.load_lane = lane
        return claimed

    async def _release(self, lane: LaneKey, worker_id: str) -> None:
        await self._fleet.release_claim(lane, worker_id)
        if self._view.gauges_of(lane).queued_jobs or lane in self._unplaced:
            await self._offer(lane)
