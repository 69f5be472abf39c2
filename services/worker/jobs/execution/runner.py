"""The one device thread: takes a batch when the device is free, runs it, hands finished jobs on.

On the request path, between `intake.py`, which adds prepared jobs, and `finisher.py`, which gets
the finished ones. Prepared sequences wait in the batcher's `WaitingRoom`; the device thread itself
cuts the next batch the moment it is free, so that sequences that arrived during the last forward
pass are in it and no event-loop turn stands between two batches.

A forward pass cannot be cancelled, but on a CPU it can be preempted between two layers by the batch
of a less-served caller. That caller then waits for one layer of another caller's batch instead of
the whole batch.

An asynchronous device (CUDA) would have nothing to do from the end of one batch until the thread
has read its answers and cut and launched the next one. There the thread launches the next batch
shortly before the last one is expected to end, and collects that one's answers afterwards
(`_run_ahead`; docs/decisions/0052-two-batches-in-flight.md). At most two batches are on the device.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, runtime_checkable

from libs.errors import DeadlinePassed, OutOfMemory, ShoalError
from libs.models import InputSequence, Unfinished, YieldPoint, never_yield
from libs.models.pending import LaunchesBatches, PendingBatch
from libs.telemetry import metrics
from libs.telemetry.logs import Value, fields
from services.worker.jobs import spans
from services.worker.jobs.execution.batches import (
    Done,
    Launched,
    collect,
    item_path,
    queued_at,
    sequences_of,
)
from services.worker.jobs.execution.device_time import DeviceTime
from services.worker.jobs.execution.ladder import (
    Caps,
    Failure,
    OomRecovery,
    Outcome,
    RecoveryResult,
    attempt,
)
from services.worker.jobs.execution.sparing import keep, spare
from services.worker.jobs.held import HeldJob
from services.worker.jobs.waste import Waste
from services.worker.scheduling.batcher import (
    MIN_SECONDS,
    Batch,
    Flow,
    Group,
    Limits,
    Waiting,
    WaitingRoom,
)
from services.worker.scheduling.meter import Meter

log = logging.getLogger(__name__)

ALONE: Final = 3
"""How many times as long a batch may take while the device is not shared. Not longer, since jobs
that are cancelled meanwhile are computed in vain."""

SLOW: Final = 2
"""How many times as long a batch of a slow model may take, to reach EFFICIENT_TOKENS."""

EFFICIENT_TOKENS: Final = 256
"""Smaller batches lose throughput against large ones (on a CPU 20 % with 128 tokens, 10 % with 256
tokens).
"""

UNMEASURED: Final = 8
"""Divisor of the token budget for a model that is not measured yet, while the device is shared: the
model may be slow.
"""

LAUNCH_LEAD_SECONDS: Final = 0.002
"""How long before the earliest expected end of a batch the next one is cut and launched. Cutting,
packing and the first launches take the host about 1 ms; a longer lead would miss jobs that arrive
in time."""

MIN_AHEAD_SECONDS: Final = 0.001
"""A batch that is expected to take less is collected before the next one is cut. The host needs
about as long to launch a batch, so it is the host that limits such batches, and the jobs that
arrive meanwhile make the next one larger."""

POLL_SECONDS: Final = 0.0005
"""How often the device thread checks whether a batch is over earlier than expected, while it waits
to cut the next one.
"""


class Outcomes(Protocol):
    """The device thread calls this with the outcome of each job; its methods must return at
    once.
    """

    def finished(self, jobs: list[HeldJob], *, is_idle: bool) -> None:
        """`is_idle`: no batch waits for this thread."""

    def failed(self, job: HeldJob, error: ShoalError) -> None: ...

    def written(self, job: HeldJob, index: int, ids: list[int]) -> None:
        """All tokens so far of a sequence that is unfinished, of a job whose client reads along."""

    def device_changed(self) -> None:
        """A forward pass began, or the device has nothing left to do."""


class IdleWork(Protocol):
    """Work for the device that no job waits for, in pieces of tens of milliseconds: captures of
    CUDA graphs.
    """

    @property
    def is_pending(self) -> bool: ...

    def run(self) -> None:
        """Do one piece. Called on the device thread while no batch waits or is in progress; raises
        nothing.
        """


@runtime_checkable
class KeepsSequences(Protocol):
    """A model that keeps what it has of sequences from one forward to the next."""

    def drop(self, sequences: Sequence[InputSequence]) -> None:
        """Frees it. Called on the device thread, also between two layers of a forward for
        others.
        """


class Runner:
    """`add` prepared jobs from any thread; `outcomes` is called exactly once for each job, unless
    the job became unwanted.

    `clock` is monotonic, `unix_time` is for deadlines (both seconds). `ladder` runs forward passes;
    if it raises, the device is lost and `ended` has its error. `enter` runs first on the device
    thread. `waste` counts every forward pass. `idle_work` is done while no batch waits or is on the
    device. `launches_ahead`: the next batch may be launched before the last one is over, if the
    model can do so.
    """

    def __init__(
        self,
        limits: Limits,
        outcomes: Outcomes,
        *,
        clock: Callable[[], float],
        unix_time: Callable[[], float],
        ladder: OomRecovery,
        enter: Callable[[], None],
        waste: Waste,
        idle_work: IdleWork | None = None,
        launches_ahead: bool = False,
    ) -> None:
        self.ended: Future[None] = Future()
        self.limits = limits
        self.device_time = DeviceTime()
        self._outcomes = outcomes
        self._clock = clock
        self._unix_time = unix_time
        self._ladder = ladder
        self._enter = enter
        self._waste = waste
        self._idle_work = idle_work
        self._launches_ahead = launches_ahead
        # Of the device thread alone.
        self._caps = Caps(limits.tokens)
        self._cut_at: float | None = (
            None  # of the batch that is to run, if this thread waited for it
        )
        self._overtaken_cpu = 0.0
        self._over_at = 0.0  # when the last of the launched batches was over
        self._begun: set[int] = set()  # jobs with sequences that are unfinished
        # Mutable state, all of it guarded by the condition's lock.
        self._condition = threading.Condition()
        self._room = WaitingRoom()
        self._jobs: dict[int, HeldJob] = {}
        self._meters: dict[str, Meter] = {}
        self._free_at = 0.0
        self._computing: list[str] = []  # the model of each batch that was cut and is not over
        self._stopping = False
        # A daemon, because a forward pass cannot be cancelled and must not delay the end of a
        # worker beyond its grace period.
        self._thread = threading.Thread(target=self._main, name="device", daemon=True)

    def start(self) -> None:
        # so that a waiter that is cancelled does not cancel the future itself
        self.ended.set_running_or_notify_cancel()
        self._thread.start()

    def stop(self) -> None:
        """Runs no further batch and reports no further outcome; `ended` resolves when the batch in
        progress is over.
        """
        with self._condition:
            self._stopping = True
            self._condition.notify()

    def wake(self) -> None:
        """Makes an idle device thread look for idle work. Any thread."""
        with self._condition:
            self._condition.notify()

    @property
    def waiting_tokens(self) -> int:
        return self._room.tokens

    def waiting(self) -> dict[tuple[str, str], dict[Flow, int]]:
        """Waiting tokens of each flow, by model and adapter."""
        with self._condition:
            return {lane: dict(flows) for lane, flows in self._room.lanes.items()}

    def batch_tokens(self, models: Iterable[str]) -> dict[str, int]:
        """The largest batch of each model that would be run now: the token budget, or less if the
        model is slow.
        """
        with self._condition:
            return {model: self._most_tokens(model) for model in models}

    @property
    def is_running(self) -> bool:
        """Whether a forward pass is in progress."""
        return self._free_at > 0.0

    def is_computing(self, model: str) -> bool:
        """Whether a batch of the model was cut and is not over. No later batch has jobs that were
        unwanted before. Any thread.
        """
        with self._condition:
            return model in self._computing

    @property
    def busy_seconds(self) -> float:
        """A lower bound of the time until the next batch is cut; 0 if none is in progress, or its
        speed is unknown.

        It is below the expected time, because a pull that is sent too late misses a whole batch.
        """
        return max(0.0, self._free_at - self._clock())

    def add(self, jobs: Collection[HeldJob]) -> None:
        """Queues prepared jobs for the device. Each must have at least one sequence whose output is
        not known.
        """
        with self._condition:
            now = self._clock()
            for held in jobs:
                prepared = held.ready
                self._jobs[held.number] = held
                self._meters[held.resident.name] = held.resident.meter
                for head, indices in prepared.groups().items():
                    waiting = [
                        Waiting(held.number, index, prepared.sequences[index].tokens, now)
                        for index in indices
                    ]
                    self._room.add(Group(held.resident.name, head), waiting, held.flow, held.weight)
            self._condition.notify()

    def _main(self) -> None:
        try:
            self._enter()
            if self._launches_ahead:
                self._run_ahead()
            else:
                while (batch := self._next()) is not None:
                    self._serve(batch, self._jobs_of(batch))
        except BaseException as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def _next(self) -> Batch | None:
        """Waits for work and cuts the next batch; None when the runner stops."""
        has_waited = False
        with self._condition:
            while not self._stopping:
                self._drop_stale()
                batch = self._room.take(self.limits, self._clock(), self._cap)
                if batch is not None:
                    now = self._clock()
                    self._cut_at = now if has_waited else None
                    self._free_at = now + self._least_seconds(batch)
                    self._computing.append(batch.group.model)
                    self._outcomes.device_changed()
                    return batch
                self._free_at = 0.0
                self._outcomes.device_changed()
                if not self._do_idle_work():
                    self._condition.wait()
                has_waited = True
        return None

    def _do_idle_work(self) -> bool:
        """Does one piece of idle work, without the lock, so that jobs can be added. False: there is
        none.
        """
        if self._idle_work is None or not self._idle_work.is_pending:
            return False
        self._condition.release()
        try:
            self._idle_work.run()
        finally:
            self._condition.acquire()
        return True

    def _run_ahead(self) -> None:
        """Runs batches until the runner stops, at most two of them on the device at a time."""
        launched: Launched | None = None
        while True:
            batch = self._next() if launched is None else self._next_behind(launched)
            if batch is not None:
                launched = self._launch_and_collect(batch, launched)
            elif launched is not None:
                self._collect(launched)
                launched = None
            else:
                return

    def _next_behind(self, launched: Launched) -> Batch | None:
        """Waits until the launched batch is about to end, and cuts the next one. None: that one is
        to be collected first, since nothing waits, its time is short or unknown, or the runner
        stops."""
        pending = launched.pending
        if (
            launched.least_seconds < MIN_AHEAD_SECONDS
            or pending is None
            or isinstance(pending, Failure)
        ):
            return None
        with self._condition:
            while (
                not self._stopping
                and (left := launched.cut_next_at - self._clock()) > 0
                and not pending.is_done()
            ):
                self._condition.wait(min(left, POLL_SECONDS))
            if self._stopping or not self._room.tokens:
                return None
            # A job that is on the device as a whole is not waiting for it any more: it gets its
            # outcome when that is collected.
            self._drop_stale(
                {one.job for one in launched.batch.chosen if not self._room.holds(one.job)}
            )
            batch = self._room.take(self.limits, self._clock(), self._cap)
            if batch is not None:
                self._computing.append(batch.group.model)
                self._outcomes.device_changed()
            return batch

    def _launch_and_collect(self, batch: Batch, before: Launched | None) -> Launched | None:
        """Launches a batch, then collects the one before. Returns what is on the device then."""
        jobs = self._jobs_of(batch)
        model = jobs[0].resident.model
        if not isinstance(model, LaunchesBatches) or not model.can_launch(batch.group.head):
            if before is not None:
                self._collect(before)
            self._serve(batch, jobs)
            return None
        launched = self._launch(batch, jobs, model, before)
        if before is not None:
            self._collect(before, launched)
        if not launched.is_on_device:
            if not launched.is_over:
                self._collect(launched)
            return None
        if before is not None:
            with self._condition:
                launched.cut_next_at = self._over_at + launched.least_seconds - LAUNCH_LEAD_SECONDS
                self._free_at = max(self._over_at, launched.cut_next_at)
        return launched

    def _launch(
        self, batch: Batch, jobs: list[HeldJob], model: LaunchesBatches, before: Launched | None
    ) -> Launched:
        cpu_started, started = time.thread_time(), self._clock()
        resident = jobs[0].resident
        if before is None:
            self.device_time.began(started, queued_at(jobs), self._cut_at)
        spared = spare(sequences_of(batch, jobs), resident.images)
        pending: PendingBatch | Failure | None = None
        if spared.needed:
            pending = attempt(
                partial(model.launch, batch.group.head, spared.needed), spared.needed, resident.name
            )
        # Charged as expected for now, so that the next batch is not chosen as if these callers had
        # not had this one.
        charged = max(resident.meter.expected_seconds(spared.tokens), MIN_SECONDS)
        least = resident.meter.least_seconds(spared.tokens)
        with self._condition:
            now = self._clock()
            begins = now if before is None else max(now, before.cut_next_at + LAUNCH_LEAD_SECONDS)
            cut_next_at = begins + least - LAUNCH_LEAD_SECONDS
            self._free_at = max(now, cut_next_at)
            self._room.ran(batch, charged, now)
        cpu_seconds = time.thread_time() - cpu_started
        return Launched(
            batch,
            jobs,
            spared,
            pending,
            started,
            cpu_seconds,
            charged,
            least,
            before is not None,
            cut_next_at,
        )

    def _collect(self, launched: Launched, following: Launched | None = None) -> None:
        """Waits for a launched batch and hands on its outcomes. `following`: was launched after it.

        If it failed, the following one is finished before anything is recovered or repeated.
        """
        launched.is_over = True
        cpu_started = time.thread_time()
        batch, needed, resident = launched.batch, launched.spared.needed, launched.jobs[0].resident
        pending, launched.pending = launched.pending, None
        climbed, seconds = RecoveryResult([], is_clean=False), None
        if pending is not None:
            found = (
                pending
                if isinstance(pending, Failure)
                else attempt(partial(collect, pending), needed, resident.name)
            )
            pending = (
                None  # what is left of a failed batch must not be in memory while it is repeated
            )
            if isinstance(found, Failure):
                if following is not None:
                    following_started = time.thread_time()
                    self._collect(following)
                    cpu_started += time.thread_time() - following_started
                climbed = self._ladder.climb(
                    resident.name, partial(resident.model.forward, batch.group.head), needed, found
                )
            else:
                climbed, seconds = RecoveryResult([*found.outputs]), found.seconds
                if launched.is_ahead:
                    self.device_time.idled(found.idle_seconds)
            keep(resident.images, needed, climbed.outcomes)
        ended = self._clock()
        if seconds is None:
            seconds = ended - max(launched.started, self._over_at)
        self._over_at = ended
        self.device_time.computed(launched.cpu_seconds + time.thread_time() - cpu_started)
        self.device_time.ended(ended)
        is_last = following is None or following.is_over
        self._finish(
            Done(
                batch,
                launched.jobs,
                launched.spared,
                climbed,
                max(launched.started, ended - seconds),
                ended,
                seconds,
            ),
            charged=launched.charged,
            is_last=is_last,
        )

    def _jobs_of(self, batch: Batch) -> list[HeldJob]:
        """The job of each sequence."""
        return [self._jobs[one.job] for one in batch.chosen]

    def _overtaking(self, running: Batch) -> float:
        """Called between two layers of the running batch: runs the batches that preempt it. Returns
        the seconds that they took.
        """
        if (
            not self._room.tokens
        ):  # Read without the lock: what arrives at this moment is seen after the next layer.
            return 0.0
        started = self._clock()
        batch = self._next_overtaking(running)
        if batch is None:
            return self._clock() - started
        cpu_started, computed = time.thread_time(), 0.0
        while batch is not None:
            metrics.OVERTAKEN.inc()
            computed += self._serve(batch, self._jobs_of(batch), is_overtaking=True)
            batch = self._next_overtaking(running)
        seconds = self._clock() - started
        self._overtaken_cpu += time.thread_time() - cpu_started
        self.device_time.overtaken(seconds - computed)
        return seconds

    def _next_overtaking(self, running: Batch) -> Batch | None:
        with self._condition:
            if self._stopping or not self._room.overtakes(running, self.limits):
                return None
            self._drop_stale({one.job for one in running.chosen})
            if not self._room.overtakes(running, self.limits):
                return None
            batch = self._room.take(
                replace(self.limits, tokens=self.limits.tokens - running.tokens),
                self._clock(),
                self._cap,
            )
            if batch is not None:
                self._free_at += self._least_seconds(batch)
                self._computing.append(batch.group.model)
                self._outcomes.device_changed()
        return batch

    def _least_seconds(self, batch: Batch) -> float:
        return self._jobs[batch.chosen[0].job].resident.meter.least_seconds(batch.tokens)

    def _cap(self, group: Group) -> int:
        # The time of a forward that writes hardly depends on how many sequences it is for.
        return (
            self._caps.of(group)
            if group.is_continuous
            else min(self._caps.of(group), self._most_tokens(group.model))
        )

    def _most_tokens(self, model: str) -> int:
        """The largest batch of the model within the time that a batch may take."""
        is_shared = self._room.is_shared(model)
        meter, seconds = self._meters.get(model), self.limits.seconds
        if meter is None or not meter.tokens_per_second:
            most = self.limits.tokens // UNMEASURED if is_shared else self.limits.tokens
        elif is_shared:
            most = max(
                meter.most_tokens(seconds), min(meter.most_tokens(SLOW * seconds), EFFICIENT_TOKENS)
            )
        else:
            most = meter.most_tokens(ALONE * seconds)
        return max(1, min(most, self.limits.tokens))

    def _drop_stale(self, kept: Collection[int] = ()) -> None:
        """Drops cancelled and expired jobs before a forward pass, except those with the numbers
        `kept`.
        """
        now = self._unix_time()
        jobs = [held for number, held in self._jobs.items() if number not in kept]
        expired = [held for held in jobs if held.deadline_unix <= now and not held.unwanted]
        unwanted = [held for held in jobs if held.unwanted]
        self._forget([*expired, *unwanted])
        for held in expired:
            self._waste.dropped(held)
            self._outcomes.failed(
                held, DeadlinePassed("the deadline passed while the job waited for the device")
            )

    def _forget(self, jobs: Collection[HeldJob]) -> None:
        if jobs:
            self._room.remove({held.number for held in jobs})
            for held in jobs:
                del self._jobs[held.number]
                model = held.resident.model
                if held.number in self._begun and isinstance(model, KeepsSequences):
                    model.drop(held.ready.sequences)
                self._begun.discard(held.number)

    def _serve(self, batch: Batch, jobs: list[HeldJob], *, is_overtaking: bool = False) -> float:
        """Runs a batch to its end. Returns the seconds of its own forward pass."""
        overtaken = 0.0

        def yield_point() -> None:
            nonlocal overtaken
            overtaken += self._overtaking(batch)

        called: YieldPoint = never_yield if is_overtaking else yield_point
        resident = jobs[0].resident
        overtaken_cpu, cpu_started = self._overtaken_cpu, time.thread_time()
        started = self._clock()
        if not is_overtaking:
            self.device_time.began(started, queued_at(jobs), self._cut_at)
        spared = spare(sequences_of(batch, jobs), resident.images)
        climbed = RecoveryResult([], is_clean=False)
        if spared.needed:
            forward = partial(resident.model.forward, batch.group.head, yield_point=called)
            climbed = self._ladder.run(resident.name, forward, spared.needed)
            keep(resident.images, spared.needed, climbed.outcomes)
        ended = self._clock()
        self.device_time.computed(
            time.thread_time() - cpu_started - (self._overtaken_cpu - overtaken_cpu)
        )
        if not is_overtaking:
            self.device_time.ended(ended)
        seconds = ended - started - overtaken
        self._finish(
            Done(batch, jobs, spared, climbed, started, ended, seconds), is_last=not is_overtaking
        )
        return seconds

    def _finish(self, done: Done, *, charged: float = 0.0, is_last: bool) -> None:
        """Charges and measures a batch, and hands on its outcomes. `is_last`: no other batch is on
        the device.
        """
        batch, jobs, climbed, seconds = done.batch, done.jobs, done.climbed, done.seconds
        resident = jobs[0].resident
        self._waste.computed(jobs, [one.tokens for one in batch.chosen], seconds)
        with self._condition:
            self._room.ran(batch, seconds, done.ended, charged)
            resident.turn = self._room.turn(resident.name)
        self._caps.ran(batch.group, climbed.fitted_tokens)
        if climbed.is_clean:
            resident.meter.add_forward(
                batch.tokens if batch.group.is_continuous else done.spared.tokens, seconds
            )
        measured: dict[str, Value] = {
            "model": resident.name,
            "tenant": jobs[0].job.tenant,
            "tokens": batch.tokens,
            "sequences": len(jobs),
            "seconds": seconds,
        }
        log.debug("batch", extra=fields(measured))
        traced = [held.span for held in dict.fromkeys(jobs)]
        spans.batch(
            resident.name,
            traced,
            done.started,
            done.ended,
            tokens=batch.tokens,
            sequences=len(jobs),
        )
        self._measure(batch, jobs, seconds)
        for held in dict.fromkeys(jobs):
            held.forward_seconds += seconds
        outcomes = done.spared.outcomes(climbed.outcomes)
        if self._launches_ahead:
            batch, jobs, outcomes = self._without_gone(batch, jobs, outcomes)
        self._hand_on(batch, jobs, outcomes, is_last=is_last)

    def _without_gone(
        self, batch: Batch, jobs: list[HeldJob], outcomes: list[Outcome]
    ) -> tuple[Batch, list[HeldJob], list[Outcome]]:
        """Leaves out the jobs that had their outcome while this batch was on the device, and counts
        their time as wasted.
        """
        gone = {held for held in jobs if held.number not in self._jobs}
        if not gone:
            return batch, jobs, outcomes
        for held in gone:
            self._waste.dropped(held)
        kept = [place for place, held in enumerate(jobs) if held not in gone]
        chosen = tuple(batch.chosen[place] for place in kept)
        return (
            replace(batch, chosen=chosen),
            [jobs[place] for place in kept],
            [outcomes[place] for place in kept],
        )

    def _measure(self, batch: Batch, jobs: list[HeldJob], seconds: float) -> None:
        model = jobs[0].resident.name
        metrics.FORWARD_SECONDS.labels(model).observe(seconds)
        metrics.BATCH_TOKENS.labels(model).observe(batch.tokens)
        metrics.BATCH_FILL.labels(model).observe(batch.tokens / self.limits.tokens)
        for held, one in zip(jobs, batch.chosen, strict=True):
            metrics.TENANT_TOKENS.labels(metrics.TENANTS.of(held.job.tenant)).inc(one.tokens)

    def _hand_on(
        self, batch: Batch, jobs: list[HeldJob], outcomes: list[Outcome], *, is_last: bool
    ) -> None:
        broken: dict[HeldJob, ShoalError] = {}
        unfinished: list[tuple[HeldJob, Waiting]] = []
        for one, held, outcome in zip(batch.chosen, jobs, outcomes, strict=True):
            if isinstance(outcome, Unfinished):
                self._begun.add(held.number)
                unfinished.append((held, replace(one, tokens=1)))
                if held.job.written_to and outcome.ids:
                    self._outcomes.written(held, one.index, list(outcome.ids))
                continue
            if not isinstance(outcome, ShoalError):
                held.outputs[one.index] = outcome
                continue
            if isinstance(outcome, OutOfMemory):
                outcome.field = item_path(held.ready, one.index)
            broken.setdefault(held, outcome)
        finished = [held for held in dict.fromkeys(jobs) if held.is_complete]
        with self._condition:
            self._computing.remove(batch.group.model)
            if self._stopping:
                return
            for held, waiting in unfinished:
                if held not in broken:
                    self._room.add(batch.group, [waiting], held.flow, held.weight)
            self._forget([*broken, *finished])
            is_idle = is_last and not self._room.tokens
        for held, error in broken.items():
            self._outcomes.failed(held, error)
        if finished:
            self._outcomes.finished(finished, is_idle=is_idle)
