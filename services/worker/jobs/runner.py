"""The one device thread: takes a batch when the device is free, runs it, hands finished jobs on.

On the way of a request between `intake.py` (prepared jobs come in, finished jobs go out) and the model's forward pass. Prepared
sequences wait in the batcher's room, one batch ahead; the device thread itself cuts the next batch the moment it is free, so that
what arrived during the last forward pass is in it and no event-loop turn stands between two batches.

A forward pass cannot be taken back, but on a CPU it can be interrupted between two layers: a batch of a caller that has had less of
the device overtakes it there. So that caller waits for a layer of somebody else's batch, not for all of them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from libs.errors import DeadlinePassed, OutOfMemory, ShoalError
from libs.models import Between, EncodeWork, Prepared, ScoreWork, nothing_between
from libs.telemetry import metrics
from libs.telemetry.logs import fields
from services.worker.jobs import spans
from services.worker.jobs.held import HeldJob
from services.worker.jobs.ladder import Caps, Ladder, Outcome
from services.worker.jobs.waste import Waste
from services.worker.scheduling.batcher import Batch, Flow, Group, Limits, Waiting, WaitingRoom
from services.worker.scheduling.meter import Meter

log = logging.getLogger(__name__)

ALONE: Final = 4
"""How many times as long a batch may take while nobody else wants the device. What is cancelled meanwhile is computed in vain."""

SLOW: Final = 2
"""How many times as long a batch may take of a model that else would not get EFFICIENT_TOKENS done."""

EFFICIENT_TOKENS: Final = 256
"""Of a batch: smaller ones cost throughput (on a CPU 128 tokens 20 %, 256 tokens 10 %, of what large ones get done)."""

UNMEASURED: Final = 8
"""By what the token budget is divided for the first batch of a model while others want the device: it may turn out to be slow."""


class Outcomes(Protocol):
    """Told by the device thread what became of jobs; must return at once."""

    def finished(self, jobs: list[HeldJob], *, is_idle: bool) -> None:
        """`is_idle`: no batch waits for this thread."""

    def failed(self, job: HeldJob, error: ShoalError) -> None: ...

    def device_changed(self) -> None:
        """A forward pass began, or the device has nothing left to do."""


class Runner:
    """`add` prepared jobs from any thread; `outcomes` hears of each exactly once, unless it became unwanted.

    `clock` rises, `unix_time` tells deadlines (both seconds). `recover` is called after a failed forward pass, before anything else
    is tried; if it raises, the device is lost and `ended` has its error. `trim` gives unused memory back. `relieve` lets an idle
    model other than the named one go, and says whether one went; it may block the device thread. `enter` runs first on that thread.
    `waste` hears of every forward pass.
    """

    def __init__(
        self,
        limits: Limits,
        outcomes: Outcomes,
        *,
        clock: Callable[[], float],
        unix_time: Callable[[], float],
        recover: Callable[[], None],
        trim: Callable[[], None],
        relieve: Callable[[str], bool],
        enter: Callable[[], None],
        waste: Waste,
    ) -> None:
        self.ended: Future[None] = Future()
        self._limits = limits
        self._outcomes = outcomes
        self._clock = clock
        self._unix_time = unix_time
        self._ladder = Ladder(recover, trim, relieve)
        self._enter = enter
        self._waste = waste
        self._caps = Caps(limits.tokens)  # of the device thread alone
        # Mutable state, all of it guarded by the condition's lock.
        self._condition = threading.Condition()
        self._room = WaitingRoom()
        self._jobs: dict[int, HeldJob] = {}
        self._meters: dict[str, Meter] = {}
        self._free_at = 0.0
        self._stopping = False
        # A daemon, because a forward pass cannot be interrupted and must not outlive the grace of a stopping worker.
        self._thread = threading.Thread(target=self._main, name="device", daemon=True)

    def start(self) -> None:
        self.ended.set_running_or_notify_cancel()  # so that who stops waiting for it does not take its result's place
        self._thread.start()

    def stop(self) -> None:
        """Run no further batch and tell of none; `ended` resolves when the one in progress is over."""
        with self._condition:
            self._stopping = True
            self._condition.notify()

    @property
    def waiting_tokens(self) -> int:
        return self._room.tokens

    def waiting(self) -> dict[tuple[str, str], dict[Flow, int]]:
        """Tokens that wait, by model and adapter, of each flow."""
        with self._condition:
            return {lane: dict(flows) for lane, flows in self._room.lanes.items()}

    def batch_tokens(self, models: Iterable[str]) -> dict[str, int]:
        """The largest batch of each model that would be run now: the token budget, or what it gets done in the time it may take."""
        with self._condition:
            return {model: self._most_tokens(model) for model in models}

    @property
    def is_running(self) -> bool:
        """Whether a forward pass is in progress."""
        return self._free_at > 0.0

    @property
    def busy_seconds(self) -> float:
        """How much longer the forward pass in progress will hardly take less than; 0 if none is, or nobody can tell.

        Below what is expected, because who learns too late that the device is free has missed a whole batch.
        """
        return max(0.0, self._free_at - self._clock())

    def add(self, jobs: Collection[HeldJob]) -> None:
        """Let prepared jobs wait for the device. Each must have at least one sequence."""
        with self._condition:
            now = self._clock()
            for held in jobs:
                prepared = held.ready
                waiting = [Waiting(held.number, index, sequence.tokens, now) for index, sequence in enumerate(prepared.sequences)]
                self._jobs[held.number] = held
                self._meters[held.resident.name] = held.resident.meter
                self._room.add(Group(held.resident.name, prepared.head), waiting, held.flow, held.weight)
            self._condition.notify()

    def _main(self) -> None:
        try:
            self._enter()
            while (batch := self._next()) is not None:
                self._serve(batch)
        except BaseException as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def _next(self) -> Batch | None:
        """Wait for work; None when the runner stops."""
        with self._condition:
            while not self._stopping:
                self._drop_stale()
                batch = self._room.take(self._limits, self._clock(), self._cap)
                if batch is not None:
                    self._free_at = self._clock() + self._least_seconds(batch)
                    self._outcomes.device_changed()
                    return batch
                self._free_at = 0.0
                self._outcomes.device_changed()
                self._condition.wait()
        return None

    def _overtaking(self, running: Batch) -> float:
        """Between two layers of the running batch: runs what is to be done before the rest of it. Returns the seconds this took."""
        if not self._room.tokens:  # Read without the lock: what comes in this moment is seen after the next layer.
            return 0.0
        started = self._clock()
        while (batch := self._next_overtaking(running)) is not None:
            metrics.OVERTAKEN.inc()
            self._serve(batch, is_overtaking=True)
        return self._clock() - started

    def _next_overtaking(self, running: Batch) -> Batch | None:
        with self._condition:
            if self._stopping or not self._room.overtakes(running, self._limits):
                return None
            self._drop_stale(running)
            if not self._room.overtakes(running, self._limits):
                return None
            batch = self._room.take(replace(self._limits, tokens=self._limits.tokens - running.tokens), self._clock(), self._cap)
            if batch is not None:
                self._free_at += self._least_seconds(batch)
                self._outcomes.device_changed()
        return batch

    def _least_seconds(self, batch: Batch) -> float:
        return self._jobs[batch.chosen[0].job].resident.meter.least_seconds(batch.tokens)

    def _cap(self, group: Group) -> int:
        return min(self._caps.of(group), self._most_tokens(group.model))

    def _most_tokens(self, model: str) -> int:
        """By how long it may take."""
        is_shared = self._room.is_shared(model)
        meter, seconds = self._meters.get(model), self._limits.seconds
        if meter is None or not meter.tokens_per_second:
            most = self._limits.tokens // UNMEASURED if is_shared else self._limits.tokens
        elif is_shared:
            most = max(meter.most_tokens(seconds), min(meter.most_tokens(SLOW * seconds), EFFICIENT_TOKENS))
        else:
            most = meter.most_tokens(ALONE * seconds)
        return max(1, min(most, self._limits.tokens))

    def _drop_stale(self, running: Batch | None = None) -> None:
        """Before the forward pass: jobs that nobody waits for any more, but for those in the running batch."""
        now = self._unix_time()
        kept = set() if running is None else {one.job for one in running.chosen}
        jobs = [held for number, held in self._jobs.items() if number not in kept]
        expired = [held for held in jobs if held.deadline_unix <= now and not held.unwanted]
        unwanted = [held for held in jobs if held.unwanted]
        self._forget([*expired, *unwanted])
        for held in expired:
            self._waste.dropped(held)
            self._outcomes.failed(held, DeadlinePassed("the deadline passed while the job waited for the device"))

    def _forget(self, jobs: Collection[HeldJob]) -> None:
        if jobs:
            self._room.remove({held.number for held in jobs})
            for held in jobs:
                del self._jobs[held.number]

    def _serve(self, batch: Batch, *, is_overtaking: bool = False) -> None:
        overtaken = 0.0

        def between() -> None:
            nonlocal overtaken
            overtaken += self._overtaking(batch)

        called: Between = nothing_between if is_overtaking else between
        jobs = [self._jobs[one.job] for one in batch.chosen]
        sequences = [held.ready.sequences[one.index] for held, one in zip(jobs, batch.chosen, strict=True)]
        resident = jobs[0].resident
        head = jobs[0].ready.head
        started = self._clock()
        climbed = self._ladder.run(resident.name, partial(resident.model.forward, head, between=called), sequences)
        ended = self._clock()
        seconds = ended - started - overtaken
        self._waste.computed(jobs, [one.tokens for one in batch.chosen], seconds)
        with self._condition:
            self._room.ran(batch, seconds, ended)
            resident.turn = self._room.turn(resident.name)
        self._caps.ran(batch.group, climbed.fitted_tokens)
        if climbed.is_clean:
            resident.meter.add_forward(batch.tokens, seconds)
        told = fields(
            {
                "model": resident.name,
                "tenant": jobs[0].job.tenant,
                "tokens": batch.tokens,
                "sequences": len(sequences),
                "seconds": seconds,
            }
        )
        log.debug("batch", extra=told)
        traced = [held.span for held in dict.fromkeys(jobs)]
        spans.batch(resident.name, traced, started, ended, tokens=batch.tokens, sequences=len(sequences))
        self._measure(batch, jobs, seconds)
        for held in dict.fromkeys(jobs):
            held.forward_seconds += seconds
        self._hand_on(batch, jobs, climbed.outcomes, is_overtaking=is_overtaking)

    def _measure(self, batch: Batch, jobs: list[HeldJob], seconds: float) -> None:
        model = jobs[0].resident.name
        metrics.FORWARD_SECONDS.labels(model).observe(seconds)
        metrics.BATCH_TOKENS.labels(model).observe(batch.tokens)
        metrics.BATCH_FILL.labels(model).observe(batch.tokens / self._limits.tokens)
        for held, one in zip(jobs, batch.chosen, strict=True):
            metrics.TENANT_TOKENS.labels(metrics.TENANTS.of(held.job.tenant)).inc(one.tokens)

    def _hand_on(self, batch: Batch, jobs: list[HeldJob], outcomes: list[Outcome], *, is_overtaking: bool) -> None:
        broken: dict[HeldJob, ShoalError] = {}
        for one, held, outcome in zip(batch.chosen, jobs, outcomes, strict=True):
            if not isinstance(outcome, ShoalError):
                held.outputs[one.index] = outcome
                continue
            if isinstance(outcome, OutOfMemory):
                outcome.field = _path(held.ready, one.index)
            broken.setdefault(held, outcome)
        finished = [held for held in dict.fromkeys(jobs) if held.is_complete]
        with self._condition:
            if self._stopping:
                return
            self._forget([*broken, *finished])
            is_idle = not is_overtaking and not self._room.tokens
        for held, error in broken.items():
            self._outcomes.failed(held, error)
        if finished:
            self._outcomes.finished(finished, is_idle=is_idle)


def _path(prepared: Prepared, index: int) -> str:
    """The item that a sequence was made of, as a path in the job; empty where an item may make more than one."""
    match prepared.work:
        case EncodeWork(texts) if len(texts) == len(prepared.sequences):
            return f"items[{index}].text"
        case ScoreWork(_, documents) if len(documents) == len(prepared.sequences):
            return f"documents[{index}].text"
    return ""
