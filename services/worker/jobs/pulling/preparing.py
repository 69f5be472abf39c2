"""Fair queueing of the tokenising threads: chooses the job to prepare next, as the batcher does for
the device.

On the request path: `intake.py` adds pulled jobs here and passes prepared ones to `runner.py`.
Thread time is shared between callers by fair queueing (`turns.py`), as device time is. A large job
yields at every slice of its texts: the thread that prepares it first prepares the jobs of
less-served callers, so there is no head-of-line blocking, even with a single thread. A text that
cannot be cut is tokenised in one call that cannot yield (4 MiB of one word: seconds); another
thread replaces that one meanwhile.

Slow jobs, those with documents and those with large images (`reading.py`), have a Preparation and
threads each that no other job waits for, and each job is a portion: its thread waits for a document
process, or for memory, for seconds.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from time import sleep
from typing import Final

from services.worker.jobs.answers.finisher import must_succeed
from services.worker.jobs.held import HeldJob
from services.worker.jobs.pulling.document_costs import DocumentCosts
from services.worker.jobs.pulling.pulls import LaneName
from services.worker.scheduling.batcher import BULK_SHARE, Caller, Flow
from services.worker.scheduling.turns import Turns

SMALL_BYTES: Final = 64 << 10
"""A pulled batch of at most so many bytes is prepared as one portion, whatever callers are in it:
it takes a few milliseconds, and is handed on together."""

DEEPEST: Final = 4
"""The most portions in progress on one thread, each of which yields to the next."""

HELD_SECONDS: Final = 0.05
"""A thread that has not yielded for so long counts as blocked ("away") while other callers wait:
another thread prepares their jobs."""

MAX_AWAY: Final = 4
"""The most threads that may be away at once, each with a portion of another caller."""

MAX_SLOW_AWAY: Final = 2
"""As MAX_AWAY, of the threads for slow jobs of a kind. Together with four that are not away they
are as many as there are document processes (libs/documents/reader.py), so that no thread waits for
a process to become free."""

BREATH_SECONDS: Final = 0.005
"""How long a preparing thread runs before it sleeps NAP_SECONDS to release the interpreter lock.
CPython forces a release after 5 ms only if the thread has not released the lock meanwhile, which
NumPy does for microseconds all the time: without the nap the event loop waits for the whole job (86
ms seen for 666 items)."""

NAP_SECONDS: Final = 1e-4

Size = Callable[[HeldJob], int]
"""The bytes by which jobs share the cost of a portion."""

GiveWay = Callable[[], None]
"""Yield point, to be called often: returns once the jobs of less-served callers have been
prepared.
"""


@dataclass(frozen=True, slots=True)
class Preparers:
    """A thread pool in which `count` threads work at once, in addition to those that count as
    away.
    """

    threads: ThreadPoolExecutor
    count: int
    max_away: int = MAX_AWAY
    """The most threads that may be away at once. The pool has `count + max_away` threads."""
    is_slow: bool = False
    """Whether the threads prepare slow jobs: each job is a portion, is charged in advance for what
    its caller's last documents cost, and keeps its thread until it is done. A job that takes long
    counts as away, even if it yields between two pages."""


@dataclass(slots=True, eq=False)
class _Portion:
    """Jobs of one pulled batch that are prepared one after another and handed on together."""

    jobs: list[HeldJob]
    shares: dict[Caller, float]
    """Each caller's share of the cost, by bytes, divided by its weight."""
    prepaid: float = 0.0
    """Seconds that were charged when the portion was taken."""

    @property
    def pages(self) -> int:
        return sum(held.pages for held in self.jobs)


@dataclass(slots=True, eq=False)
class _Run:
    """A portion being prepared on a thread: its caller, and the thread's last yield."""

    caller: Caller
    since: float
    is_away: bool = False


class Preparation:
    """The scheduler of preparation. `prepare` is called on the preparers' threads with jobs of one
    batch.

    `waiting` counts a job until `prepare` has returned. `clock` is monotonic, in seconds. `size`:
    the bytes by which jobs share the cost of a portion. The worker has a second one of these for
    its finishing threads (`finisher.py`).
    """

    def __init__(
        self,
        preparers: Preparers,
        prepare: Callable[[list[HeldJob], GiveWay], None],
        *,
        clock: Callable[[], float],
        size: Size = attrgetter("read_bytes"),
    ) -> None:
        self._size = size
        self._threads = preparers.threads
        self._max_away = preparers.max_away
        self._is_slow = preparers.is_slow
        self._prepare = prepare
        self._clock = clock
        # Mutable state, all of it guarded by the lock. Every portion that was not begun is in the
        # line of one caller, which is not scheduled while a thread is away with one of its
        # portions: the line of such a caller has no other caller's jobs. `_idle` is negative while
        # threads that came back are in excess.
        self._lock = threading.Lock()
        self._idle = preparers.count
        self._running: dict[int, _Run] = {}
        self._away: set[Caller] = set()
        self._turns: Turns[Caller] = Turns()
        self._lines: dict[Caller, deque[_Portion]] = {}
        self._waiting: dict[LaneName, Counter[Flow]] = {}
        self._costs = DocumentCosts()

    def add(self, jobs: Collection[HeldJob]) -> None:
        """Queues the jobs of one pulled batch."""
        with self._lock:
            portions = (
                [_portion([held], self._size) for held in jobs]
                if self._is_slow
                else _portions(jobs, self._away, self._size)
            )
            for portion in portions:
                self._queue(portion)
            for held in jobs:
                self._waiting.setdefault(_lane(held), Counter())[held.flow] += held.estimated_tokens
            self._start(len(portions))

    def relieve(self) -> bool:
        """Replaces each thread that has not yielded for HELD_SECONDS by another, if other callers
        wait. False: nobody waits.
        """
        with self._lock:
            for run in list(self._running.values()):
                is_held = not run.is_away and self._clock() - run.since >= HELD_SECONDS
                if (
                    is_held
                    and self._lines
                    and run.caller not in self._away
                    and len(self._away) < self._max_away
                ):
                    self._leave(run)
            return bool(self._lines)

    def waiting(self) -> dict[LaneName, dict[Flow, int]]:
        """Estimated tokens that wait for preparation or are in it, by lane and flow."""
        with self._lock:
            return {lane: dict(flows) for lane, flows in self._waiting.items()}

    def _start(self, most: int) -> None:
        starting = max(0, min(self._idle, most))
        self._idle -= starting
        for _ in range(starting):
            self._threads.submit(self._work).add_done_callback(must_succeed)

    def _queue(self, portion: _Portion) -> None:
        caller = min(portion.shares, key=self._turns.tag)
        self._lines.setdefault(caller, deque()).append(portion)
        if caller not in self._away:
            self._turns.come(caller)

    def _leave(self, run: _Run) -> None:
        run.is_away = True
        self._away.add(run.caller)
        waiting = self._lines.pop(run.caller, ())
        if waiting:
            self._turns.leave(run.caller, self._clock())
        for portion in waiting:
            for part in (
                [portion] if len(portion.shares) == 1 else _by_caller(portion.jobs, self._size)
            ):
                self._queue(part)
        self._idle += 1
        if self._turns.has_waiting:
            self._start(1)

    def _come_back(self, run: _Run) -> None:
        run.is_away = False
        self._away.remove(run.caller)
        if run.caller in self._lines:
            self._turns.come(run.caller)
        self._idle -= 1

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            self._run(*taken, ())

    def _take(self) -> tuple[_Portion, Caller] | None:
        with self._lock:
            self._turns.forget(self._clock())
            if self._idle < 0 or not self._turns.has_waiting:
                self._idle += 1
                return None
            return self._next(self._turns.next())

    def _take_before(
        self, caller: Caller, begun: tuple[Caller, ...]
    ) -> tuple[_Portion, Caller] | None:
        """A portion of a caller that has had less than `caller` and has no portion begun on this
        thread.
        """
        with self._lock:
            if not self._turns.has_waiting:
                return None
            other = self._turns.next()
            if (
                other == caller
                or other in begun
                or self._turns.tag(other) >= self._turns.tag(caller)
            ):
                return None
            return self._next(other)

    def _next(self, caller: Caller) -> tuple[_Portion, Caller]:
        line = self._lines[caller]
        portion = line.popleft()
        if not line:
            del self._lines[caller]
            self._turns.leave(caller, self._clock())
        if self._is_slow:
            portion.prepaid = self._costs.expected_seconds(caller, portion.pages, self._clock())
            self._charge_all(portion, portion.prepaid)
        return portion, caller

    def _run(self, portion: _Portion, caller: Caller, begun: tuple[Caller, ...]) -> None:
        run = _Run(caller, self._clock())
        charged = breathed = run.since

        def give_way() -> None:
            nonlocal charged, breathed
            now = self._clock()
            if now - breathed >= BREATH_SECONDS:
                sleep(NAP_SECONDS)
                breathed = now
            if self._is_slow:
                return
            self._between_steps(run)
            if not self._lines or len(begun) + 1 >= DEEPEST:
                return
            self._charge(portion, run.since - charged)
            while (taken := self._take_before(caller, begun)) is not None:
                self._run(*taken, (*begun, caller))
            self._between_steps(run)
            charged = run.since

        self._between_steps(run)
        try:
            self._prepare(portion.jobs, give_way)
        finally:
            self._end(run)
            self._settle(portion, caller, run.since - charged)

    def _between_steps(self, run: _Run) -> None:
        """Records that this thread has reached a yield point, so that it is not away any more."""
        run.since = self._clock()
        self._running[threading.get_ident()] = run
        if run.is_away:
            with self._lock:
                self._come_back(run)

    def _end(self, run: _Run) -> None:
        """Records that a portion has ended. All under the lock: `relieve` may be about to declare
        this thread away.
        """
        with self._lock:
            run.since = self._clock()
            self._running.pop(threading.get_ident(), None)
            if run.is_away:
                self._come_back(run)

    def _charge(self, portion: _Portion, seconds: float) -> None:
        with self._lock:
            self._charge_all(portion, seconds)

    def _charge_all(self, portion: _Portion, seconds: float) -> None:
        for caller, share in portion.shares.items():
            self._turns.charge(caller, seconds * share, self._clock())

    def _settle(self, portion: _Portion, caller: Caller, seconds: float) -> None:
        """Charges a portion that ended. `seconds`: of its thread since it was charged last."""
        processor_seconds = 0.0
        if self._is_slow:
            processor_seconds = sum(held.document_seconds.processor for held in portion.jobs)
            seconds += processor_seconds - sum(
                held.document_seconds.waited for held in portion.jobs
            )
        with self._lock:
            if self._is_slow and portion.pages:
                self._costs.record(caller, portion.pages, processor_seconds, self._clock())
            # A charge in advance is forgotten with its caller, where nothing else of that caller
            # waits.
            self._charge_all(portion, seconds - (portion.prepaid if caller in self._turns else 0.0))
            for held in portion.jobs:
                flows = self._waiting[_lane(held)]
                flows[held.flow] -= held.estimated_tokens
                if not flows[held.flow]:
                    del flows[held.flow]
                if not flows:
                    del self._waiting[_lane(held)]


def _lane(held: HeldJob) -> LaneName:
    return held.lease.lane.model, held.lease.lane.adapter


def _portions(jobs: Collection[HeldJob], away: Collection[Caller], size: Size) -> list[_Portion]:
    """One portion of all jobs if they are small and no caller among them is away, else one for each
    caller.
    """
    is_small = sum(map(size, jobs)) <= SMALL_BYTES
    is_whole = is_small and not any(held.flow.caller in away for held in jobs)
    return [_portion(list(jobs), size)] if is_whole else _by_caller(jobs, size)


def _by_caller(jobs: Collection[HeldJob], size: Size) -> list[_Portion]:
    return [_portion(own, size) for own in _callers(jobs).values()]


def _portion(jobs: list[HeldJob], size: Size) -> _Portion:
    callers = _callers(jobs)
    if len(callers) == 1:
        return _Portion(jobs, {caller: 1 / _weight(jobs[0]) for caller in callers})
    sizes = {caller: sum(map(size, own)) for caller, own in callers.items()}
    total = max(1, sum(sizes.values()))
    return _Portion(
        jobs, {caller: sizes[caller] / total / _weight(own[0]) for caller, own in callers.items()}
    )


def _callers(jobs: Collection[HeldJob]) -> dict[Caller, list[HeldJob]]:
    callers: dict[Caller, list[HeldJob]] = {}
    for held in jobs:
        callers.setdefault(held.flow.caller, []).append(held)
    return callers


def _weight(held: HeldJob) -> float:
    return held.weight * (BULK_SHARE if held.flow.is_bulk else 1.0)
