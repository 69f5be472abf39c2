"""Fair queueing of the tokenising threads: chooses the job to prepare next, as the batcher does for the device.

On the request path: `intake.py` adds pulled jobs here and passes prepared ones to `runner.py`. Thread time is shared between
callers by fair queueing (`turns.py`), as device time is. A large job yields at every slice of its texts: the thread that prepares
it first prepares the jobs of less-served callers, so there is no head-of-line blocking, even with a single thread. A text that
cannot be cut is tokenised in one call that cannot yield (4 MiB of one word: seconds); another thread replaces that one meanwhile.
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

from shoal.v1 import worker_pb2

from services.worker.jobs.answers.finisher import must_succeed
from services.worker.jobs.held import HeldJob
from services.worker.jobs.pulling.pulls import LaneName
from services.worker.scheduling.batcher import BULK_SHARE, Caller, Flow
from services.worker.scheduling.turns import Turns

SMALL_BYTES: Final = 64 << 10
"""A pulled batch of at most so many bytes is prepared as one portion, whatever callers are in it: it takes a few milliseconds, and
is handed on together."""

BYTES_A_TOKEN: Final = 4
"""Estimate for a job that was not tokenised yet; used only to limit pulls (backpressure)."""

DEEPEST: Final = 4
"""The most portions in progress on one thread, each of which yields to the next."""

HELD_SECONDS: Final = 0.05
"""A thread that has not yielded for so long counts as blocked ("away") while other callers wait: another thread prepares their
jobs."""

MOST_AWAY: Final = 4
"""The most threads that may be away at once, each with a portion of another caller."""

BREATH_SECONDS: Final = 0.005
"""How long a preparing thread runs before it sleeps NAP_SECONDS to release the interpreter lock. CPython forces a release after
5 ms only if the thread has not released the lock meanwhile, which NumPy does for microseconds all the time: without the nap the
event loop waits for the whole job (86 ms seen for 666 items)."""

NAP_SECONDS: Final = 1e-4

GiveWay = Callable[[], None]
"""Yield point, to be called often: returns once the jobs of less-served callers have been prepared."""


@dataclass(frozen=True, slots=True)
class Preparers:
    """A thread pool in which `count` threads work at once, beside up to MOST_AWAY that count as away."""

    threads: ThreadPoolExecutor
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class _Portion:
    """Jobs of one pulled batch that are prepared one after another and handed on together. `shares`: each caller's share of the
    cost, by bytes, divided by its weight."""

    jobs: list[HeldJob]
    shares: dict[Caller, float]


@dataclass(slots=True, eq=False)
class _Run:
    """A portion being prepared on a thread: its caller, and the thread's last yield."""

    caller: Caller
    since: float
    is_away: bool = False


class Preparation:
    """The scheduler of preparation. `prepare` is called on the preparers' threads with jobs of one batch.

    `waiting` counts a job until `prepare` has returned. `clock` is monotonic, in seconds. `size`: the bytes by which jobs share the
    cost of a portion. The worker has a second one of these for its finishing threads (`finisher.py`).
    """

    def __init__(
        self,
        preparers: Preparers,
        prepare: Callable[[list[HeldJob], GiveWay], None],
        *,
        clock: Callable[[], float],
        size: Callable[[HeldJob], int] = attrgetter("read_bytes"),
    ) -> None:
        self._size = size
        self._threads = preparers.threads
        self._prepare = prepare
        self._clock = clock
        # Mutable state, all of it guarded by the lock. Every portion that was not begun is in the line of one caller, which is not
        # scheduled while a thread is away with one of its portions. `_idle` is negative while threads that came back are in excess.
        self._lock = threading.Lock()
        self._idle = preparers.count
        self._running: dict[int, _Run] = {}
        self._away: set[Caller] = set()
        self._turns: Turns[Caller] = Turns()
        self._lines: dict[Caller, deque[_Portion]] = {}
        self._waiting: dict[LaneName, Counter[Flow]] = {}

    def add(self, jobs: Collection[HeldJob]) -> None:
        """Queues the jobs of one pulled batch."""
        portions = _portions(jobs, self._size)
        with self._lock:
            for portion in portions:
                caller = min(portion.shares, key=self._turns.tag)
                self._lines.setdefault(caller, deque()).append(portion)
                if caller not in self._away:
                    self._turns.come(caller)
            for held in jobs:
                self._waiting.setdefault(_lane(held), Counter())[held.flow] += held.estimated_tokens
            self._start(len(portions))

    def relieve(self) -> bool:
        """Replaces each thread that has not yielded for HELD_SECONDS by another, if other callers wait. False: nobody waits."""
        with self._lock:
            for run in list(self._running.values()):
                is_held = not run.is_away and self._clock() - run.since >= HELD_SECONDS
                if is_held and self._lines and run.caller not in self._away and len(self._away) < MOST_AWAY:
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

    def _leave(self, run: _Run) -> None:
        run.is_away = True
        self._away.add(run.caller)
        if run.caller in self._lines:
            self._turns.leave(run.caller, self._clock())
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

    def _take_before(self, caller: Caller, begun: tuple[Caller, ...]) -> tuple[_Portion, Caller] | None:
        """A portion of a caller that has had less than `caller` and has no portion begun on this thread."""
        with self._lock:
            if not self._turns.has_waiting:
                return None
            other = self._turns.next()
            if other == caller or other in begun or self._turns.tag(other) >= self._turns.tag(caller):
                return None
            return self._next(other)

    def _next(self, caller: Caller) -> tuple[_Portion, Caller]:
        line = self._lines[caller]
        portion = line.popleft()
        if not line:
            del self._lines[caller]
            self._turns.leave(caller, self._clock())
        return portion, caller

    def _run(self, portion: _Portion, caller: Caller, begun: tuple[Caller, ...]) -> None:
        run = _Run(caller, self._clock())
        charged = breathed = run.since

        def give_way() -> None:
            nonlocal charged, breathed
            self._between_steps(run)
            if run.since - breathed >= BREATH_SECONDS:
                sleep(NAP_SECONDS)
                breathed = run.since
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
            self._between_steps(run)
            del self._running[threading.get_ident()]
            self._charge(portion, run.since - charged)
            self._forget(portion)

    def _between_steps(self, run: _Run) -> None:
        """Records that this thread has reached a yield point, so that it is not away any more."""
        run.since = self._clock()
        self._running[threading.get_ident()] = run
        if run.is_away:
            with self._lock:
                self._come_back(run)

    def _charge(self, portion: _Portion, seconds: float) -> None:
        with self._lock:
            for caller, share in portion.shares.items():
                self._turns.charge(caller, seconds * share, self._clock())

    def _forget(self, portion: _Portion) -> None:
        with self._lock:
            for held in portion.jobs:
                flows = self._waiting[_lane(held)]
                flows[held.flow] -= held.estimated_tokens
                if not flows[held.flow]:
                    del flows[held.flow]
                if not flows:
                    del self._waiting[_lane(held)]


def read_bytes(job: worker_pb2.Job, payload_bytes: int) -> int:
    """The bytes that preparing the job reads: its payload, and for each further item what is repeated with every item (labels,
    query, instruction, turns)."""
    items, shared = 1, 0
    match job.WhichOneof("operation"):
        case "encode":
            items, shared = len(job.encode.items), len(job.encode.instruction)
        case "score":
            items, shared = len(job.score.documents), len(job.score.query.text) + len(job.score.instruction)
        case "extract":
            task, text = job.extract.classify, job.extract.text
            items, shared = len(job.extract.items), sum(map(len, task.labels)) + len(task.hypothesis) * len(task.labels)
            shared += len(text.instruction) + sum(len(turn.text) for turn in text.turns)
    return payload_bytes + max(0, items - 1) * shared


def estimated_tokens(job: worker_pb2.Job, read: int, max_tokens: int) -> int:
    """Estimates a job's tokens before it is tokenised: from `read_bytes`, at most `max_tokens` for each of its sequences (of a text
    or an image, whichever may be longer)."""
    sequences = 0
    match job.WhichOneof("operation"):
        case "encode":
            sequences = len(job.encode.items)
        case "score":
            sequences = len(job.score.documents) + 1
        case "extract":
            sequences = len(job.extract.items) * max(1, len(job.extract.classify.labels))
    return min(read // BYTES_A_TOKEN, sequences * max_tokens) + 1


def _lane(held: HeldJob) -> LaneName:
    return held.lease.lane.model, held.lease.lane.adapter


def _portions(jobs: Collection[HeldJob], size: Callable[[HeldJob], int]) -> list[_Portion]:
    """One portion of all jobs if they are small, else one for each caller."""
    callers: dict[Caller, list[HeldJob]] = {}
    for held in jobs:
        callers.setdefault(held.flow.caller, []).append(held)
    sizes = {caller: sum(map(size, own)) for caller, own in callers.items()}
    total = sum(sizes.values())
    if total <= SMALL_BYTES:
        return [_Portion(list(jobs), {caller: _weighed(own, sizes[caller], total) for caller, own in callers.items()})]
    return [_Portion(own, {caller: _weighed(own, sizes[caller], sizes[caller])}) for caller, own in callers.items()]


def _weighed(jobs: list[HeldJob], size: int, total: int) -> float:
    """The fraction of `total` bytes that these jobs' `size` is, divided by their caller's weight."""
    weight = jobs[0].weight * (BULK_SHARE if jobs[0].flow.is_bulk else 1.0)
    return size / max(total, 1) / weight
