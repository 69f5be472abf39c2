"""Whose job is prepared next: the twin of the batcher for the threads that tokenise.

On the way of a request between `intake.py`, which pulls, and `runner.py`. Threads' time is shared between callers by fair queueing
(`turns.py`), as the device's is. A large job gives way to others at every slice of its texts: the thread that prepares it prepares
theirs first, in between, so no number of large jobs holds up a small one, even with a single thread. One text that cannot be cut
is tokenised in one call that gives way to nobody (4 MiB of one word: seconds); another thread takes its place for so long.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import sleep
from typing import Final

from shoal.v1 import worker_pb2

from services.worker.jobs.finisher import must_succeed
from services.worker.jobs.held import HeldJob
from services.worker.jobs.pulls import LaneName
from services.worker.scheduling.batcher import BULK_SHARE, Caller, Flow
from services.worker.scheduling.turns import Turns

SMALL_BYTES: Final = 64 << 10
"""Of a pulled batch that is prepared as one, whosever jobs are in it: it takes a few milliseconds, and is handed on together."""

BYTES_A_TOKEN: Final = 4
"""Of a job that was not tokenised yet; only for the flow of pulls."""

DEEPEST: Final = 4
"""So many portions may have been begun on one thread, each giving way to the next."""

HELD_SECONDS: Final = 0.05
"""A thread that has not given way for so long is counted as away while others wait: another one prepares their jobs."""

MOST_AWAY: Final = 4
"""Threads that may be away at once, each of another caller."""

BREATH_SECONDS: Final = 0.005
"""So long a preparing thread keeps the interpreter before it sleeps NAP_SECONDS. CPython makes a thread let go after 5 ms only
if it has not let go by itself meanwhile, which NumPy does for microseconds all the time: else the event loop waits for the whole
job (86 ms seen for 666 items)."""

NAP_SECONDS: Final = 1e-4

GiveWay = Callable[[], None]
"""To be called often; returns when those who are to be served first have been."""


@dataclass(frozen=True, slots=True)
class Preparers:
    """A pool of threads, of which `count` work at once, and up to MOST_AWAY more that have not given way for long."""

    threads: ThreadPoolExecutor
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class _Portion:
    """Jobs of one pulled batch that are prepared one after another and handed on together. `shares`: of each caller, by bytes."""

    jobs: list[HeldJob]
    shares: dict[Caller, float]


@dataclass(slots=True, eq=False)
class _Run:
    """Whose portion a thread prepares, and since when it has not given way."""

    caller: Caller
    since: float
    is_away: bool = False


class Preparation:
    """`prepare` is called on the preparers' threads with jobs of one batch.

    `waiting` has a job until `prepare` has returned. `clock` rises, in seconds.
    """

    def __init__(
        self,
        preparers: Preparers,
        prepare: Callable[[list[HeldJob], GiveWay], None],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._threads = preparers.threads
        self._prepare = prepare
        self._clock = clock
        # Mutable state, all of it guarded by the lock. Every portion that was not begun is in the line of one caller, which takes
        # no turns while a thread is away with one of its own. `_idle` is below zero while threads that came back are too many.
        self._lock = threading.Lock()
        self._idle = preparers.count
        self._running: dict[int, _Run] = {}
        self._away: set[Caller] = set()
        self._turns: Turns[Caller] = Turns()
        self._lines: dict[Caller, deque[_Portion]] = {}
        self._waiting: dict[LaneName, Counter[Flow]] = {}

    def add(self, jobs: Collection[HeldJob]) -> None:
        """Jobs of one pulled batch."""
        portions = _portions(jobs)
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
        """Puts another thread in the place of each that has not given way for HELD_SECONDS, if others wait. False: nobody waits."""
        with self._lock:
            for run in list(self._running.values()):
                is_held = not run.is_away and self._clock() - run.since >= HELD_SECONDS
                if is_held and self._lines and run.caller not in self._away and len(self._away) < MOST_AWAY:
                    self._leave(run)
            return bool(self._lines)

    def waiting(self) -> dict[LaneName, dict[Flow, int]]:
        """Estimated tokens, by lane, of each flow."""
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
        if self._turns.anybody:
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
            if self._idle < 0 or not self._turns.anybody:
                self._idle += 1
                return None
            return self._next(self._turns.next())

    def _take_before(self, caller: Caller, begun: tuple[Caller, ...]) -> tuple[_Portion, Caller] | None:
        """Of a caller that has had less, and is not one of those that give way here."""
        with self._lock:
            if not self._turns.anybody:
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
        """Of this thread, which is not away any more."""
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
    """What preparing the job reads: its bytes, and for each further item what all have in common."""
    items, shared = 1, 0
    match job.WhichOneof("operation"):
        case "encode":
            items, shared = len(job.encode.items), len(job.encode.instruction)
        case "score":
            items, shared = len(job.score.documents), len(job.score.query.text) + len(job.score.instruction)
        case "extract":
            task = job.extract.classify
            items, shared = len(job.extract.items), sum(map(len, task.labels)) + len(task.hypothesis) * len(task.labels)
    return payload_bytes + max(0, items - 1) * shared


def estimated_tokens(job: worker_pb2.Job, read: int, max_tokens: int) -> int:
    """Of a job that was not tokenised: by `read_bytes`, but no more than the model takes of each of its sequences."""
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


def _portions(jobs: Collection[HeldJob]) -> list[_Portion]:
    """All jobs in one, if they are small, else those of each caller."""
    callers: dict[Caller, list[HeldJob]] = {}
    for held in jobs:
        callers.setdefault(held.flow.caller, []).append(held)
    total = sum(held.read_bytes for held in jobs)
    if total <= SMALL_BYTES:
        return [_Portion(list(jobs), {caller: _weighed(own, total) for caller, own in callers.items()})]
    return [_Portion(own, {caller: _weighed(own, sum(held.read_bytes for held in own))}) for caller, own in callers.items()]


def _weighed(jobs: list[HeldJob], total: int) -> float:
    """The part of `total` bytes that these jobs are, for their caller's weight."""
    weight = jobs[0].weight * (BULK_SHARE if jobs[0].flow.is_bulk else 1.0)
    return sum(held.read_bytes for held in jobs) / max(total, 1) / weight
