"""The pulls that wait at this router, and the lanes known to be empty without asking Redis. No I/O:
`pull.py` acts.

1. A lane is known to be empty after a pull found nothing there, until it is notified of new jobs.
2. A notification wakes as many waiting pulls as it has jobs, those that rank the lane highest
  first.
3. A woken pull that ends without pulling passes its notification on.
4. Pulls that exclude tenants read Redis when they arrive, and at notifications that find too few
  other pulls. If such a pull finds nothing, the lane does not count as empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from libs.queue import LaneKey


@dataclass(slots=True, eq=False)
class PendingPull:
    """One waiting pull, and its current activity."""

    worker_id: str
    pool: str
    lanes: Sequence[LaneKey]
    """In order of preference."""
    can_load: bool
    excludes_tenants: bool = False
    event: asyncio.Event = field(default_factory=asyncio.Event)
    rung: dict[LaneKey, int] = field(default_factory=dict)
    """Lanes to pull from, and the maximum jobs to take from each (0: no limit but the request's).
    """
    load_lane: LaneKey | None = None
    """A lane claimed for this worker. It must load the lane's model or adapter."""
    seen: dict[LaneKey, int] = field(default_factory=dict)
    """The number of notifications of new jobs of each lane when this pull last read it."""
    looking_at: LaneKey | None = None
    """The lane from which it is pulling in Redis."""
    promised: str = ""
    """The first of the jobs for which it was woken before they reached Redis."""
    own_rings: int = 0
    """The number of notifications, during this read, of jobs for which it was woken early."""
    is_reserved: bool = False
    """A claim is being made for it."""
    must_beat: bool = False
    """Orders or cancellations wait for the worker: the pull ends, so that it sends a heartbeat."""
    is_ended: bool = False
    """The worker takes no more work: the pull ends with nothing."""

    @property
    def is_free(self) -> bool:
        return not (
            self.rung
            or self.looking_at
            or self.is_reserved
            or self.load_lane
            or self.must_beat
            or self.is_ended
        )

    def wake(self, lane: LaneKey, jobs: int, pulls: int) -> None:
        """Make the pull read the lane, and take a fair share of `jobs` if several pulls are
        woken.
        """
        self.rung[lane] = -(-jobs // pulls) if pulls > 1 else 0
        self.event.set()

    def will_look_at(self, lane: LaneKey) -> bool:
        return lane in self.rung or self.looking_at == lane


class PendingPulls:
    """All waiting pulls of this router."""

    def __init__(self) -> None:
        self.is_closed = False
        # The state: pulls in order of arrival; by worker; by lane with the lane's rank, those that
        # exclude tenants separately; lanes known to be empty; counts of each lane's notifications,
        # all and of new jobs; workers notified while none of their pulls waited.
        self._all: dict[PendingPull, None] = {}
        self._by_worker: dict[str, dict[PendingPull, None]] = {}
        self._by_lane: dict[LaneKey, dict[PendingPull, int]] = {}
        self._excluding: dict[LaneKey, dict[PendingPull, int]] = {}
        self._empty: set[LaneKey] = set()
        self._rings: dict[LaneKey, int] = {}
        self._news: dict[LaneKey, int] = {}
        self._missed: set[str] = set()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, waiter: PendingPull) -> None:
        self._all[waiter] = None
        self._by_worker.setdefault(waiter.worker_id, {})[waiter] = None
        if waiter.worker_id in self._missed:
            self._missed.discard(waiter.worker_id)
            waiter.must_beat = True
        by_lane = self._index(waiter)
        # It replaces older pulls of its worker, which exclude an outdated set of tenants.
        if waiter.excludes_tenants:
            for other in self._by_worker[waiter.worker_id]:
                if (
                    other.excludes_tenants
                    and other is not waiter
                    and set(other.lanes) <= set(waiter.lanes)
                ):
                    other.is_ended = True
                    other.event.set()
        for rank, lane in enumerate(waiter.lanes):
            by_lane.setdefault(lane, {})[waiter] = rank
        if waiter.excludes_tenants:
            waiter.rung = dict.fromkeys(waiter.lanes, 0)

    def remove(self, waiter: PendingPull) -> None:
        """Remove a pull that ends, and pass its unused notifications on to other pulls."""
        del self._all[waiter]
        at_worker = self._by_worker[waiter.worker_id]
        del at_worker[waiter]
        if not at_worker:
            del self._by_worker[waiter.worker_id]
        by_lane = self._index(waiter)
        for lane in waiter.lanes:
            at_lane = by_lane.get(lane, {})
            at_lane.pop(waiter, None)
            if not at_lane:
                by_lane.pop(lane, None)
        for lane, jobs in waiter.rung.items():
            self.ring(lane, max(1, jobs))

    def is_waiting(self, waiter: PendingPull) -> bool:
        return waiter in self._all

    def ring(
        self, lane: LaneKey, jobs: int = 1, early: PendingPull | None = None, *, is_new: bool = True
    ) -> int:
        """Wake pulls for `jobs` jobs in the lane, and return how many will pull them.

        The result includes the pull woken early, and leaves out pulls that exclude tenants.

        Args:
            is_new: False if a pull left these jobs behind. Pulls that exclude tenants and have read
                the lane since its last new jobs would find nothing, so they are not woken.
        """
        self._empty.discard(lane)
        if is_new:
            self._news[lane] = self._news.get(lane, 0) + 1
        self._rings[lane] = self._rings.get(lane, 0) + 1
        is_early = False
        if early is not None and early in self._all and early.will_look_at(lane):
            is_early = True
            early.own_rings += 1
        woken = self._free(lane)[: jobs - is_early]
        for waiter in woken:
            waiter.wake(lane, jobs, len(woken) + is_early)
        news = self._news.get(lane, 0)
        excluding = [
            waiter
            for waiter in self._excluding.get(lane, ())
            if not waiter.is_ended and waiter.seen.get(lane) != news
        ]
        for waiter in excluding[: jobs - is_early - len(woken)]:
            # Even one that is pulling: it may miss jobs that arrive during its pull.
            waiter.wake(lane, jobs, 1)
        return len(woken) + is_early

    def ring_early(self, lane: LaneKey, jobs: int, first_job: str) -> PendingPull | None:
        """Wake the pull that ranks the lane highest for `jobs` jobs that are being sent to Redis.

        It arrives right behind them, which saves a round trip. `notify` must follow when they are
        queued.
        """
        free = self._free(lane)
        if not free:
            return None
        free[0].wake(lane, jobs, min(len(free), jobs))
        free[0].promised = first_job
        return free[0]

    def ring_worker(self, worker_id: str) -> None:
        """Make the worker's pulls end and request a heartbeat, because orders or cancellations wait
        for it.
        """
        waiting = self._by_worker.get(worker_id)
        if not waiting:
            self._missed.add(worker_id)
        for waiter in waiting or ():
            waiter.must_beat = True
            waiter.event.set()

    def end_pulls(self, worker_id: str) -> None:
        """End the pulls of a worker that takes no more work, and pass their notifications on."""
        for waiter in self._by_worker.get(worker_id, ()):
            waiter.is_ended = True
            waiter.event.set()

    def beaten(self, worker_id: str) -> None:
        """Record that the worker has sent a heartbeat."""
        self._missed.discard(worker_id)

    def ring_all(self) -> None:
        """Make every pull read its lanes, because notifications may have been missed."""
        self._empty.clear()
        for waiter in self._all:
            if waiter.excludes_tenants:
                waiter.rung = dict.fromkeys(waiter.lanes, 0)
            waiter.event.set()

    def close(self) -> None:
        """End all pulls, and later ones at once, with an empty response."""
        self.is_closed = True
        for waiter in self._all:
            waiter.event.set()

    def free_count(self, lane: LaneKey) -> int:
        """Return the number of pulls that a notification of the lane could wake."""
        return sum(waiter.is_free for waiter in self._by_lane.get(lane, ()))

    def wants(self, waiter: PendingPull, lane: LaneKey) -> bool:
        """True if the pull waits and lists the lane."""
        return waiter in self._by_lane.get(lane, ())

    def holders(self, lane: LaneKey) -> list[PendingPull]:
        """Return free pulls that list the lane, those that rank it highest first."""
        return self._free(lane)

    def loaders(self, pool: str) -> list[PendingPull]:
        """Return free pulls of the pool for workers with memory for one more model."""
        return [
            waiter
            for waiter in self._all
            if waiter.can_load and waiter.pool == pool and waiter.is_free
        ]

    def next_lane(self, waiter: PendingPull) -> LaneKey | None:
        """Return the lane that this pull ranks highest of those that may have jobs."""
        if waiter.excludes_tenants:
            return next((lane for lane in waiter.lanes if lane in waiter.rung), None)
        return next(
            (lane for lane in waiter.lanes if lane in waiter.rung or lane not in self._empty), None
        )

    def rings(self, lane: LaneKey) -> int:
        """Return the number of the lane's notifications. Read it before a pull from Redis, and pass
        it to `found_empty` afterwards.
        """
        return self._rings.get(lane, 0)

    def looks(self, waiter: PendingPull, lane: LaneKey) -> None:
        """Record that the pull reads the lane now."""
        waiter.looking_at, waiter.own_rings = lane, 0
        waiter.seen[lane] = self._news.get(lane, 0)

    def found_empty(self, lane: LaneKey, rings: int) -> None:
        """Record that the lane is empty after a pull, unless it was notified during the pull."""
        if self.rings(lane) == rings:
            self._empty.add(lane)

    def forget_lanes(self, used: AbstractSet[LaneKey]) -> None:
        """Drop records of lanes that neither hold jobs nor are listed by a pull: clients can invent
        any number of lanes.
        """
        self._rings = {
            lane: rings
            for lane, rings in self._rings.items()
            if lane in used or lane in self._by_lane
        }
        self._news = {lane: news for lane, news in self._news.items() if lane in self._rings}
        self._empty = {lane for lane in self._empty if lane in used or lane in self._by_lane}
        self._missed.clear()  # a heartbeat arrives every two seconds anyway

    def _index(self, waiter: PendingPull) -> dict[LaneKey, dict[PendingPull, int]]:
        return self._excluding if waiter.excludes_tenants else self._by_lane

    def _free(self, lane: LaneKey) -> list[PendingPull]:
        at_lane = self._by_lane.get(lane, {})
        return sorted(
            (waiter for waiter in at_lane if waiter.is_free), key=lambda waiter: at_lane[waiter]
        )
