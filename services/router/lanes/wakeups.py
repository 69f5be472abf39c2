"""Notify pulls of new work in a lane: pulls that wait here, pulls at other routers, or a worker
that must load the model.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from shoal.v1 import models_pb2

from libs.fleet import Fleet
from libs.queue import LaneGauges, LaneKey
from services.router.lanes.offers import can_serve, is_led, is_served, may_offer
from services.router.lanes.pending_pulls import PendingPull, PendingPulls
from services.router.state.background import Background
from services.router.state.view import RouterView

CLAIM_MS: Final = 10_000
"""A claim lasts until the worker's heartbeat reports LOADING. From then on the heartbeat keeps
other workers from claiming.
"""
ADAPTER_CLAIM_MS: Final = 3_000
"""A claim lasts while an adapter is loaded. No heartbeat shows the adapter before that is done."""
GAUGE_DELAY_SECONDS: Final = 2.0
"""Work that arrived within this time may not be in the gauges yet."""
EXPIRES_SOON_MS: Final = 1_500
"""Leases that expire within this time get a timer. Reminders run once a second, later if Redis is
slow, and would find them too late.
"""
DECLINED_SECONDS: Final = 0.1
"""Time after an offer without a worker during which notifications of the lane do not offer it
again. A pull that begins to wait is still offered the lane at once, and `remind` offers it once a
second.
"""
MAX_OFFERED_LANES: Final = 64
"""Maximum lanes offered to a pull when it begins to wait; `remind` goes through all of them."""
_NEARNESS: Final = {models_pb2.MODEL_STATE_WARM: 2, models_pb2.MODEL_STATE_COLD: 1}


class Wakeups:
    """Wakes waiting pulls, and lets one worker claim a lane if its model has too few resident
    copies.
    """

    def __init__(
        self,
        pending_pulls: PendingPulls,
        fleet: Fleet,
        view: RouterView,
        background: Background,
        claim_after_seconds: float,
    ) -> None:
        """Args:
        claim_after_seconds: A model that no worker holds or is loading is left to the leading
            scheduler for this long.
        """
        self.pending_pulls = pending_pulls
        self._fleet = fleet
        self._view = view
        self._background = background
        self._claim_after = claim_after_seconds
        # The state. Lanes with work but without a waiting pull, and since when (the loop's clock):
        self._unplaced: dict[LaneKey, float] = {}
        self._later: set[LaneKey] = set()  # lanes in `_unplaced` that have a delayed offer
        self._next_expiry: dict[LaneKey, int] = {}  # first lease expiry, by Redis' clock
        self._declined: dict[LaneKey, float] = {}  # when an offer of the lane found no worker

    def needs_others(self, lane: LaneKey, jobs: int) -> bool:
        """True if the lane has more jobs than free pulls here, so pulls at other routers must be
        notified.
        """
        return self.pending_pulls.free_count(lane) < jobs

    def needs_loading(self, lane: LaneKey) -> bool:
        """True if no copy in the pool can serve the lane, so workers at any router, or a scheduler,
        must be notified of it.
        """
        return not can_serve(lane, self._view.snapshot)

    def notify(
        self, lane: LaneKey, jobs: int = 1, early: PendingPull | None = None, *, is_new: bool = True
    ) -> None:
        """Wake pulls for jobs in the lane, or offer the lane to a worker.

        Args:
            early: The pull that was woken before the jobs reached Redis.
            is_new: False if a pull left these jobs behind, so they were notified before.
        """
        if self.pending_pulls.notify(lane, jobs, early, is_new=is_new):
            return
        now = asyncio.get_running_loop().time()
        self._unplaced.setdefault(lane, now)
        if now < self._declined.get(lane, 0.0) + DECLINED_SECONDS:
            return
        if self.pending_pulls.loaders(lane.pool) or self._with_model(lane):
            self._offer_in_time(lane)

    def wake_all(self) -> None:
        """Wake every pull, because notifications may have been missed."""
        self.pending_pulls.wake_all()
        self._next_expiry.clear()

    def offer_unplaced(self, pull: PendingPull) -> None:
        """Offer a pull that found no work the unplaced lanes for which its worker may load a model
        or adapter.
        """
        models = {lane.model for lane in pull.lanes}
        able = (
            lane
            for lane in self._unplaced
            if lane.pool == pull.pool and (pull.can_load or (lane.adapter and lane.model in models))
        )
        ripe = []
        for lane in list(islice(able, MAX_OFFERED_LANES)):
            if self._scheduler_seconds(lane):
                self._offer_in_time(lane)
            else:
                ripe.append(lane)
        if ripe:
            self._background.spawn(self._offer_each(ripe, pull))

    def found_empty(
        self, lane: LaneKey, notifications: int, next_expiry_ms: int | None = None
    ) -> None:
        """Record that a pull left nothing in the lane, and when the lane's next lease expires if it
        is known.
        """
        self.pending_pulls.found_empty(lane, notifications)
        self._unplaced.pop(lane, None)
        if next_expiry_ms is not None:
            self._next_expiry[lane] = next_expiry_ms

    def remind(self, gauges: Iterable[LaneGauges], now_ms: int) -> None:
        """Notify again of work that waits without a notification; called once a second. Lanes that
        count as empty are read again once a minute.

        A notification can have no effect: the woken pull died, the message was lost, a lease
        expired, or the model is not resident yet.
        """
        seen, waiting = set(), set()
        for gauge in gauges:
            lane = gauge.lane
            seen.add(lane)
            if gauge.queued_jobs:
                waiting.add(lane)
                self.notify(lane)
            elif gauge.leased_tokens:
                self._notify_when_expired(lane, self._next_expiry.get(lane, 0) - now_ms)
        young = asyncio.get_running_loop().time() - GAUGE_DELAY_SECONDS
        self._unplaced = {
            lane: since
            for lane, since in self._unplaced.items()
            if lane in waiting or since > young
        }
        self._declined.clear()
        self._next_expiry = {
            lane: expiry for lane, expiry in self._next_expiry.items() if lane in seen
        }
        self.pending_pulls.forget_lanes(seen)
        self.pending_pulls.remind()

    def _notify_when_expired(self, lane: LaneKey, wait_ms: int) -> None:
        """Notify at lease expiry if that is before the next reminder, so that a dead worker's jobs
        are recovered at once.
        """
        if wait_ms <= 0:
            self.pending_pulls.notify(lane)
        elif wait_ms <= EXPIRES_SOON_MS:
            asyncio.get_running_loop().call_later(wait_ms / 1000, self.pending_pulls.notify, lane)

    def _scheduler_seconds(self, lane: LaneKey) -> float:
        """Return for how many seconds the lane is still left to the scheduler.

        1. No scheduler leads: 0.
        2. The pool has a copy of the model: 0 for a lane with an adapter, otherwise infinite.
        3. No copy: the rest of `claim_after_seconds`.
        """
        snapshot = self._view.snapshot
        if not is_led(snapshot):
            return 0.0
        now = asyncio.get_running_loop().time()
        if is_served(lane, snapshot):
            # The lane counts as unserved from the moment its last copy is gone.
            self._unplaced[lane] = now
            return 0.0 if lane.adapter else math.inf
        return max(0.0, self._unplaced[lane] + self._claim_after - now)

    def _offer_in_time(self, lane: LaneKey) -> None:
        """Offer an unplaced lane to workers, now or when the scheduler's time for it is over."""
        seconds = self._scheduler_seconds(lane)
        if not seconds:
            self._background.spawn(self._offer(lane))
        elif lane not in self._later and math.isfinite(seconds):
            self._later.add(lane)
            asyncio.get_running_loop().call_later(seconds, self._offer_delayed, lane)

    def _offer_delayed(self, lane: LaneKey) -> None:
        self._later.discard(lane)
        if lane in self._unplaced and not self.pending_pulls.is_closed:
            self._offer_in_time(lane)

    async def _offer(self, lane: LaneKey) -> None:
        """Let the nearest waiting worker that may load the lane's model or adapter claim it."""
        gauges = self._view.lane_gauges(lane)
        if not gauges.queued_tokens:  # its work is newer than the gauges
            gauges = replace(gauges, queued_jobs=1, queued_tokens=1)
        for pull in (*self._with_model(lane), *self._nearest(lane)):
            has_model = self.pending_pulls.wants(pull, _model_lane(lane))
            if pull.is_free and may_offer(
                gauges,
                self._view.snapshot,
                pull.worker_id,
                has_model=has_model,
                can_load=pull.can_load,
            ):
                if await self._claim(lane, pull, only_adapter=bool(lane.adapter) and has_model):
                    self._unplaced.pop(lane, None)
                return
        self._declined[lane] = asyncio.get_running_loop().time()

    async def _offer_each(self, lanes: Sequence[LaneKey], pull: PendingPull) -> None:
        """Offer the lanes in turn while the pull is free."""
        for lane in lanes:
            if not pull.is_free:
                return
            await self._offer(lane)

    def _with_model(self, lane: LaneKey) -> list[PendingPull]:
        """Return free pulls of workers that hold the model and lack only the lane's adapter."""
        return self.pending_pulls.holders(_model_lane(lane)) if lane.adapter else []

    def abandon(self, lane: LaneKey, worker_id: str) -> None:
        """End the claim of a worker that will not load the lane's model or adapter, so that another
        worker may.
        """
        self._background.spawn(self._release(lane, worker_id))

    def _nearest(self, lane: LaneKey) -> list[PendingPull]:
        """Return waiting workers with free memory, warm copies first; if the pool has warm or cold
        copies, only those.
        """
        workers = self._view.snapshot.workers
        loaders = [
            (_NEARNESS.get(worker.state(lane.model), 0) if worker is not None else 0, pull)
            for pull in self.pending_pulls.loaders(lane.pool)
            for worker in (workers.get(pull.worker_id),)
        ]
        is_on_disk = any(
            worker.state(lane.model) in _NEARNESS
            for worker in self._view.snapshot.in_pool(lane.pool)
        )
        loaders.sort(key=lambda loader: -loader[0])
        return [pull for near, pull in loaders if near or not is_on_disk]

    async def _claim(self, lane: LaneKey, pull: PendingPull, *, only_adapter: bool) -> bool:
        claim = lane if only_adapter else _model_lane(lane)
        pull.is_reserved = True
        try:
            claimed = await self._fleet.claim(
                claim, pull.worker_id, ADAPTER_CLAIM_MS if only_adapter else CLAIM_MS
            )
        finally:
            pull.is_reserved = False
            pull.event.set()  # notifications during the claim skipped this pull
        if claimed and not self.pending_pulls.is_waiting(pull):
            await self._fleet.release_claim(claim, pull.worker_id)
            return False
        if claimed:
            pull.load_lane = lane
        return claimed

    async def _release(self, lane: LaneKey, worker_id: str) -> None:
        for claim in {lane, _model_lane(lane)}:
            await self._fleet.release_claim(claim, worker_id)
        if self._view.lane_gauges(lane).queued_jobs or lane in self._unplaced:
            self._unplaced.setdefault(lane, asyncio.get_running_loop().time())
            self._offer_in_time(lane)


def _model_lane(lane: LaneKey) -> LaneKey:
    """Return the model's lane without adapter; a worker that pulls from it holds the model."""
    return LaneKey(lane.pool, lane.model) if lane.adapter else lane
