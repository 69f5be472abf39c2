"""Fair queueing of the tokenising threads: chooses the next job to prepare, as the batcher does for
the device.

On the request path: `intake.py` adds pulled jobs here and passes prepared ones to `runner.py`. Fair
queueing (`turns.py`) shares thread time between callers, as it shares device time. A large job
yields at every slice of its texts: its thread then prepares the jobs of less-served callers first,
which avoids head-of-line blocking even with one thread. A text that cannot be cut is tokenised in
a single call that cannot yield (seconds for a word of 4 MiB); another thread replaces that one
during the call.

Slow jobs, which have documents or large images (`reading.py`), get a separate Preparation and
threads. Each slow job is a portion, because its thread may wait seconds for a document process or
for memory.
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
from services.worker.scheduling.batcher import BULK_WEIGHT, Caller, Flow
from services.worker.scheduling.turns import Turns

SMALL_BYTES: Final = 64 << 10
"""A pulled batch up to this size is prepared as one portion for all its callers. It takes a few
milliseconds and is passed on together.
"""

MAX_NESTED_PORTIONS: Final = 4
"""Maximum portions in progress on one thread, each of which yields to the next."""

BLOCKED_SECONDS: Final = 0.05
"""A thread that has not yielded for this long counts as blocked ("away") while other callers wait.
Another thread then prepares their jobs.
"""

MAX_AWAY: Final = 4
"""Maximum threads that are away at once, each with a portion of a different caller."""

MAX_SLOW_AWAY: Final = 2
"""MAX_AWAY of the threads for one kind of slow jobs. With the four threads that are not away, they
match the number of document processes (libs/documents/reader.py), so no thread waits for a free
process.
"""

GIL_RELEASE_INTERVAL_SECONDS: Final = 0.005
"""Time for which a preparing thread runs before it sleeps GIL_RELEASE_SECONDS to release the
interpreter lock. CPython forces a release after 5 ms only if the thread has not released the lock
in between, which NumPy does for microseconds all the time. Without the sleep, the event loop waits
for the whole job (86 ms seen for 666 items).
"""

GIL_RELEASE_SECONDS: Final = 1e-4

REST_SECONDS: Final = 0.01
"""Time for which a thread sleeps instead while the device computes a batch of another caller.
Forward passes on a CPU need the same cores, and on every device the interpreter lock hundreds of
times: next to a thread that holds it they take two to three times as long.
"""

REST_AFTER_SECONDS: Final = 0.05
"""A thread works this long on a portion before it rests, so only large ones take longer."""

Size = Callable[[HeldJob], int]
"""Returns the bytes by which jobs share the cost of a portion."""

GiveWay = Callable[[], None]
"""A yield point, to be called often. Returns when the jobs of less-served callers are prepared."""

ServesOthers = Callable[[Caller], bool]
"""Returns whether the device computes work of another caller that should not wait for this one."""


@dataclass(frozen=True, slots=True)
class Preparers:
    """A thread pool in which `count` threads work at once, in addition to those that are away."""

    threads: ThreadPoolExecutor
    count: int
    max_away: int = MAX_AWAY
    """Maximum threads that are away at once. The pool has `count + max_away` threads."""
    is_slow: bool = False
    """Whether the threads prepare slow jobs. Each slow job is a portion, is charged the expected
    cost of its documents in advance, and keeps its thread until it is done. A slow job counts as
    away after BLOCKED_SECONDS even if it yields between pages.
    """


@dataclass(slots=True, eq=False)
class _Portion:
    """Jobs of one pulled batch that are prepared in turn and passed on together."""

    jobs: list[HeldJob]
    shares: dict[Caller, float]
    """Each caller's share of the cost, by bytes, divided by its weight."""
    prepaid: float = 0.0
    """Seconds charged when the portion was taken."""

    @property
    def pages(self) -> int:
        return sum(held.pages for held in self.jobs)


@dataclass(slots=True, eq=False)
class _Run:
    """A portion in preparation on a thread. `since` is when the thread last yielded."""

    caller: Caller
    since: float
    is_away: bool = False


class Preparation:
    """Schedules preparation. The worker has a second instance for its finishing threads
    (`finisher.py`).

    Args:
        prepare: Called on the preparers' threads with jobs of one batch.
        clock: Monotonic seconds.
        serves_others: While it returns true, a thread with a large portion rests.
        size: Returns the bytes by which jobs share the cost of a portion.
        rest: Suspends the calling thread for a number of seconds.
    """

    def __init__(
        self,
        preparers: Preparers,
        prepare: Callable[[list[HeldJob], GiveWay], None],
        *,
        clock: Callable[[], float],
        serves_others: ServesOthers,
        size: Size = attrgetter("read_bytes"),
        rest: Callable[[float], None] = sleep,
    ) -> None:
        self._size = size
        self._serves_others = serves_others
        self._rest = rest
        self._threads = preparers.threads
        self._max_away = preparers.max_away
        self._is_slow = preparers.is_slow
        self._prepare = prepare
        self._clock = clock
        # Mutable state, guarded by the lock. Every portion that is not begun is in the line of one
        # caller. A caller is not scheduled while a thread is away with one of its portions, and the
        # line of such a caller has jobs of no other caller. `_idle` is negative while threads that
        # returned are in excess.
        self._lock = threading.Lock()
        self._idle = preparers.count
        self._running: dict[int, _Run] = {}
        self._away: set[Caller] = set()
        self._turns: Turns[Caller] = Turns()
        self._lines: dict[Caller, deque[_Portion]] = {}
        self._waiting: dict[LaneName, Counter[Flow]] = {}
        self._costs = DocumentCosts()

    def add(self, jobs: Collection[HeldJob]) -> None:
        """Queue the jobs of one pulled batch."""
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
        """Replace each thread that has not yielded for BLOCKED_SECONDS, if other callers wait.

        Return whether any wait.
        """
        with self._lock:
            for run in list(self._running.values()):
                is_held = not run.is_away and self._clock() - run.since >= BLOCKED_SECONDS
                if (
                    is_held
                    and self._lines
                    and run.caller not in self._away
                    and len(self._away) < self._max_away
                ):
                    self._leave(run)
            return bool(self._lines)

    def waiting(self) -> dict[LaneName, dict[Flow, int]]:
        """Return estimated tokens in or before preparation, by lane and flow. A job counts until
        `prepare` has returned.
        """
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
            self._turns.join(caller)

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

    def _return(self, run: _Run) -> None:
        run.is_away = False
        self._away.remove(run.caller)
        if run.caller in self._lines:
            self._turns.join(run.caller)
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
        """Take a portion of a caller with less service than `caller` and none begun on this
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
        charged = released_at = run.since
        worked = 0.0

        def release_lock() -> None:
            """Sleep, if the thread has worked for long enough. The sleep is not charged."""
            nonlocal charged, released_at, worked
            now = self._clock()
            if now - released_at < GIL_RELEASE_INTERVAL_SECONDS:
                return
            worked += now - released_at
            rests = worked >= REST_AFTER_SECONDS and self._serves_others(caller)
            self._rest(REST_SECONDS if rests else GIL_RELEASE_SECONDS)
            released_at = self._clock()
            charged += released_at - now

        def give_way() -> None:
            nonlocal charged, released_at, worked
            if self._is_slow:
                release_lock()
                return
            self._between_steps(run)
            if self._lines and len(begun) + 1 < MAX_NESTED_PORTIONS:
                self._charge(portion, run.since - charged)
                charged = run.since
                while (taken := self._take_before(caller, begun)) is not None:
                    self._run(*taken, (*begun, caller))
                    worked += max(0.0, run.since - released_at)
                    self._between_steps(run)
                    charged = released_at = run.since
            release_lock()
            self._between_steps(run)

        self._between_steps(run)
        try:
            self._prepare(portion.jobs, give_way)
        finally:
            self._end(run)
            self._settle(portion, caller, run.since - charged)

    def _between_steps(self, run: _Run) -> None:
        """Record that this thread has reached a yield point, so that it is no longer away."""
        run.since = self._clock()
        self._running[threading.get_ident()] = run
        if run.is_away:
            with self._lock:
                self._return(run)

    def _end(self, run: _Run) -> None:
        """Record the end of a portion, all under the lock: `relieve` may be marking this thread
        away.
        """
        with self._lock:
            run.since = self._clock()
            self._running.pop(threading.get_ident(), None)
            if run.is_away:
                self._return(run)

    def _charge(self, portion: _Portion, seconds: float) -> None:
        with self._lock:
            self._charge_all(portion, seconds)

    def _charge_all(self, portion: _Portion, seconds: float) -> None:
        for caller, share in portion.shares.items():
            self._turns.charge(caller, seconds * share, self._clock())

    def _settle(self, portion: _Portion, caller: Caller, seconds: float) -> None:
        """Charge a portion that ended. `seconds` is its thread time since the last charge."""
        processor_seconds = 0.0
        if self._is_slow:
            processor_seconds = sum(held.document_seconds.processor for held in portion.jobs)
            seconds += processor_seconds - sum(
                held.document_seconds.waited for held in portion.jobs
            )
        with self._lock:
            if self._is_slow and portion.pages:
                self._costs.record(caller, portion.pages, processor_seconds, self._clock())
            # Fair queueing forgets an advance charge with its caller, when the caller has nothing
            # waiting.
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
    """Return one portion of all jobs if they are small and no caller is away, else one per
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
    return held.weight * (BULK_WEIGHT if held.flow.is_bulk else 1.0)
