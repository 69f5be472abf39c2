"""The pulls that wait at this router, and the lanes known to be empty without asking Redis. No I/O:
`pull.py` acts.

1. A lane is known to be empty after a pull found nothing there, until it is notified of new jobs;
  but it is read again once a minute, because Redis may not know that this router must be notified.
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
from itertools import islice
from typing import Final

from libs.queue import LaneKey

EMPTY_REMINDERS: Final = 60
"""A lane that was found empty is read again after this many reminders (one a second)."""


@dataclass(slots=True, eq=False)
class PendingPull:
    """One waiting pull, and its current activity."""

    worker_id: str
    pool: str
    lanes: Sequence[LaneKey]
    """Lanes in order of preference."""
    can_load: bool
    exclude_tenants: bool = False
    event: asyncio.Event = field(default_factory=asyncio.Event)
    notified: dict[LaneKey, int] = field(default_factory=dict)
    """Lanes to pull from, and the maximum jobs to take from each (0: no limit but the request's).
    """
    load_lane: LaneKey | None = None
    """A lane claimed for this worker. It must load the lane's model or adapter."""
    seen: dict[LaneKey, int] = field(default_factory=dict)
    """The number of notifications of new jobs of each lane when this pull last read it."""
    pulling_from: LaneKey | None = None
    """The lane from which it is pulling in Redis."""
    promised: str = ""
    """The first of the jobs for which it was woken before they reached Redis."""
    own_notifications: int = 0
    """The number of notifications, during this read, of jobs for which it was woken early."""
    away: set[LaneKey] = field(default_factory=set)
    """Lanes of masters that did not answer this pull. They are not read again by it: their batch
    of this pull's id may be leased already, and is released.
    """
    is_reserved: bool = False
    """A claim is being made for it."""
    must_send_heartbeat: bool = False
    """Orders or cancellations wait for the worker: the pull ends, so that it sends a heartbeat."""
    is_ended: bool = False
    """The worker takes no more work: the pull ends with nothing."""

    @property
    def is_free(self) -> bool:
        return not (
            self.notified
            or self.pulling_from
            or self.is_reserved
            or self.load_lane
            or self.must_send_heartbeat
            or self.is_ended
        )

    def wake(self, lane: LaneKey, jobs: int, pulls: int) -> None:
        """Make the pull read the lane, and take a fair share of `jobs` if several pulls are
        woken.
        """
        self.notified[lane] = -(-jobs // pulls) if pulls > 1 else 0
        self.event.set()

    def mark_away(self, lane: LaneKey) -> None:
        """Record that the lane's master did not answer: this pull reads the lane no more."""
        self.away.add(lane)
        self.notified.pop(lane, None)

    def will_pull_from(self, lane: LaneKey) -> bool:
        return lane in self.notified or self.pulling_from == lane


class PendingPulls:
    """All waiting pulls of this router."""

    def __init__(self) -> None:
        self.is_closed = False
        # The state: pulls in order of arrival; by worker; by lane with the lane's rank, those that
        # exclude tenants separately; lanes known to be empty, oldest first, with the number of
        # reminders when they were found so; the number of reminders; counts of each lane's
        # notifications, all and of new jobs; workers notified while none of their pulls waited.
        self._all: dict[PendingPull, None] = {}
        self._by_worker: dict[str, dict[PendingPull, None]] = {}
        self._by_lane: dict[LaneKey, dict[PendingPull, int]] = {}
        self._excluding: dict[LaneKey, dict[PendingPull, int]] = {}
        self._empty: dict[LaneKey, int] = {}
        self._reminders = 0
        self._notifications: dict[LaneKey, int] = {}
        self._news: dict[LaneKey, int] = {}
        self._missed: set[str] = set()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, pull: PendingPull) -> None:
        self._all[pull] = None
        self._by_worker.setdefault(pull.worker_id, {})[pull] = None
        if pull.worker_id in self._missed:
            self._missed.discard(pull.worker_id)
            pull.must_send_heartbeat = True
        by_lane = self._index(pull)
        # It replaces older pulls of its worker, which exclude an outdated set of tenants.
        if pull.exclude_tenants:
            for other in self._by_worker[pull.worker_id]:
                if (
                    other.exclude_tenants
                    and other is not pull
                    and set(other.lanes) <= set(pull.lanes)
                ):
                    other.is_ended = True
                    other.event.set()
        for rank, lane in enumerate(pull.lanes):
            by_lane.setdefault(lane, {})[pull] = rank
        if pull.exclude_tenants:
            pull.notified = dict.fromkeys(pull.lanes, 0)

    def remove(self, pull: PendingPull) -> None:
        """Remove a pull that ends, and pass its unused notifications on to other pulls."""
        del self._all[pull]
        at_worker = self._by_worker[pull.worker_id]
        del at_worker[pull]
        if not at_worker:
            del self._by_worker[pull.worker_id]
        by_lane = self._index(pull)
        for lane in pull.lanes:
            at_lane = by_lane.get(lane, {})
            at_lane.pop(pull, None)
            if not at_lane:
                by_lane.pop(lane, None)
        for lane, jobs in pull.notified.items():
            self.notify(lane, max(1, jobs))

    def is_waiting(self, pull: PendingPull) -> bool:
        return pull in self._all

    def notify(
        self, lane: LaneKey, jobs: int = 1, early: PendingPull | None = None, *, is_new: bool = True
    ) -> int:
        """Wake pulls for `jobs` jobs in the lane, and return how many will pull them.

        The result includes the pull woken early, and leaves out pulls that exclude tenants.

        Args:
            is_new: False if a pull left these jobs behind. Pulls that exclude tenants and have read
                the lane since its last new jobs would find nothing, so they are not woken.
        """
        self._empty.pop(lane, None)
        if is_new:
            self._news[lane] = self._news.get(lane, 0) + 1
        self._notifications[lane] = self._notifications.get(lane, 0) + 1
        is_early = False
        if early is not None and early in self._all and early.will_pull_from(lane):
            is_early = True
            early.own_notifications += 1
        woken = self._free(lane)[: jobs - is_early]
        for pull in woken:
            pull.wake(lane, jobs, len(woken) + is_early)
        news = self._news.get(lane, 0)
        excluding = [
            pull
            for pull in self._excluding.get(lane, ())
            if not pull.is_ended and lane not in pull.away and pull.seen.get(lane) != news
        ]
        for pull in excluding[: jobs - is_early - len(woken)]:
            # Even one that is pulling: it may miss jobs that arrive during its pull.
            pull.wake(lane, jobs, 1)
        return len(woken) + is_early

    def wake_early(self, lane: LaneKey, jobs: int, first_job: str) -> PendingPull | None:
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

    def notify_worker(self, worker_id: str) -> None:
        """Make the worker's pulls end and request a heartbeat, because orders or cancellations wait
        for it.
        """
        waiting = self._by_worker.get(worker_id)
        if not waiting:
            self._missed.add(worker_id)
        for pull in waiting or ():
            pull.must_send_heartbeat = True
            pull.event.set()

    def end_pulls(self, worker_id: str) -> None:
        """End the pulls of a worker that takes no more work, and pass their notifications on."""
        for pull in self._by_worker.get(worker_id, ()):
            pull.is_ended = True
            pull.event.set()

    def heartbeat_received(self, worker_id: str) -> None:
        """Record that the worker has sent a heartbeat."""
        self._missed.discard(worker_id)

    def wake_all(self) -> None:
        """Make every pull read its lanes, because notifications may have been missed."""
        self._empty.clear()
        for pull in self._all:
            if pull.exclude_tenants:
                pull.notified = {lane: 0 for lane in pull.lanes if lane not in pull.away}
            pull.event.set()

    def close(self) -> None:
        """End all pulls, and later ones at once, with an empty response."""
        self.is_closed = True
        for pull in self._all:
            pull.event.set()

    def free_count(self, lane: LaneKey) -> int:
        """Return the number of pulls that a notification of the lane could wake."""
        return len(self._free(lane))

    def wants(self, pull: PendingPull, lane: LaneKey) -> bool:
        """True if the pull waits and lists the lane."""
        return pull in self._by_lane.get(lane, ())

    def holders(self, lane: LaneKey) -> list[PendingPull]:
        """Return free pulls that list the lane, those that rank it highest first."""
        return self._free(lane)

    def loaders(self, pool: str) -> list[PendingPull]:
        """Return free pulls of the pool for workers with memory for one more model."""
        return [pull for pull in self._all if pull.can_load and pull.pool == pool and pull.is_free]

    def next_lane(self, pull: PendingPull) -> LaneKey | None:
        """Return the lane that this pull ranks highest of those that may have jobs."""
        lanes = (lane for lane in pull.lanes if lane not in pull.away)
        if pull.exclude_tenants:
            return next((lane for lane in lanes if lane in pull.notified), None)
        return next(
            (lane for lane in lanes if lane in pull.notified or lane not in self._empty), None
        )

    def notifications(self, lane: LaneKey) -> int:
        """Return the number of the lane's notifications. Read it before a pull from Redis, and pass
        it to `found_empty` afterwards.
        """
        return self._notifications.get(lane, 0)

    def begin_pull(self, pull: PendingPull, lane: LaneKey) -> None:
        """Record that the pull reads the lane now."""
        pull.pulling_from, pull.own_notifications = lane, 0
        pull.seen[lane] = self._news.get(lane, 0)

    def found_empty(self, lane: LaneKey, notifications: int) -> None:
        """Record that the lane is empty after a pull, unless it was notified during the pull."""
        if self.notifications(lane) == notifications:
            self._empty.pop(lane, None)
            self._empty[lane] = self._reminders

    def remind(self) -> None:
        """Have the lanes read again that were found empty a minute ago; called once a second.

        The router is not notified of a lane if Redis was full or away when a pull read it, or has
        lost this since. At most a sixtieth of the lanes is read at once.
        """
        self._reminders += 1
        oldest = islice(self._empty.items(), -(-len(self._empty) // EMPTY_REMINDERS))
        for lane, found in list(oldest):
            if found <= self._reminders - EMPTY_REMINDERS:
                self.notify(lane, is_new=False)

    def forget_lanes(self, used: AbstractSet[LaneKey]) -> None:
        """Drop records of lanes that neither hold jobs nor are listed by a pull: clients can invent
        any number of lanes.
        """
        self._notifications = {
            lane: notifications
            for lane, notifications in self._notifications.items()
            if lane in used or lane in self._by_lane
        }
        self._news = {
            lane: news for lane, news in self._news.items() if lane in self._notifications
        }
        self._empty = {
            lane: found
            for lane, found in self._empty.items()
            if lane in used or lane in self._by_lane
        }
        self._missed.clear()  # a heartbeat arrives every two seconds anyway

    def _index(self, pull: PendingPull) -> dict[LaneKey, dict[PendingPull, int]]:
        return self._excluding if pull.exclude_tenants else self._by_lane

    def _free(self, lane: LaneKey) -> list[PendingPull]:
        at_lane = self._by_lane.get(lane, {})
        free = (pull for pull in at_lane if pull.is_free and lane not in pull.away)
        return sorted(free, key=lambda pull: at_lane[pull])
