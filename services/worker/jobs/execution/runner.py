"""The device thread: cuts a batch when the device is free, runs it, and passes on finished jobs.

On the request path, between `intake.py`, which adds prepared jobs, and `finisher.py`, which
receives the finished ones. Prepared sequences wait in the batcher's `WaitingRoom`. The device
thread itself cuts the next batch when it is free, so that the batch includes sequences that arrived
during the last forward pass and no event-loop turn stands between two batches.

A forward pass cannot be cancelled, but on a CPU the batch of a less-served caller can preempt it
between two layers. That caller then waits for one layer instead of the whole batch.

An asynchronous device (CUDA) would be idle from the end of one batch until the thread has read its
answers and launched the next one. There the thread launches the next batch shortly before the last
one is expected to end, and collects the last one's answers afterwards (`_run_ahead`;
docs/decisions/0003-one-device-thread.md). At most two batches are on the device.
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
from libs.models import InputSequence, Prepared, Unfinished, YieldPoint, never_yield
from libs.models.interface.pending import LaunchesBatches, PendingBatch
from libs.telemetry import metrics
from libs.telemetry.logs import Value, fields
from services.worker.jobs import spans
from services.worker.jobs.execution.batches import (
    Done,
    Launched,
    batch_sequences,
    collect,
    computed,
    item_path,
    longest_answer,
    queued_at,
    unneeded_tokens,
    waits_for_memory,
)
from services.worker.jobs.execution.dedup import cache_outputs, deduplicate
from services.worker.jobs.execution.device_time import DeviceTime
from services.worker.jobs.execution.oom_recovery import (
    Caps,
    Failure,
    OomRecovery,
    Outcome,
    RecoveryResult,
    attempt,
)
from services.worker.jobs.held import HeldJob
from services.worker.jobs.waste import Waste
from services.worker.memory.resident import Resident
from services.worker.scheduling.batcher import (
    MIN_CHARGE_SECONDS,
    Batch,
    BatchGroup,
    BatchLimits,
    Caller,
    Flow,
    Waiting,
    WaitingRoom,
)
from services.worker.scheduling.meter import Meter

log = logging.getLogger(__name__)

EXCLUSIVE_BATCH_FACTOR: Final = 3
"""Factor on the batch duration limit while the device is not shared. Larger batches would waste
more work on jobs that are cancelled during the pass.
"""

SLOW_MODEL_BATCH_FACTOR: Final = 2
"""Factor on the batch duration limit for a slow model, up to EFFICIENT_TOKENS."""

EFFICIENT_TOKENS: Final = 256
"""Smaller batches lose throughput (on a CPU 20 % with 128 tokens, 10 % with 256)."""

UNMEASURED_BUDGET_DIVISOR: Final = 8
"""Divisor of the token budget for a model of unknown speed while the device is shared."""

LAUNCH_LEAD_SECONDS: Final = 0.002
"""Time before the earliest expected end of a batch at which the next one is cut and launched.
Cutting, packing and the first launches take the host about 1 ms; a longer lead would miss jobs that
arrive in time.
"""

MIN_AHEAD_SECONDS: Final = 0.001
"""A batch expected to take less is collected before the next one is cut. The host needs about as
long to launch a batch, so the host limits such batches, and jobs that arrive during the launch make
the next one larger.
"""

BATCH_POLL_SECONDS: Final = 0.0005
"""Interval at which the device thread, waiting to cut the next batch, checks whether the current
one ended early.
"""


class Outcomes(Protocol):
    """Receives the outcome of each job from the device thread. Its methods must not block."""

    def finished(self, jobs: list[HeldJob], *, is_idle: bool) -> None:
        """Receive finished jobs. `is_idle`: the device thread has no further batch to run."""

    def failed(self, job: HeldJob, error: ShoalError) -> None: ...

    def stream(self, job: HeldJob, index: int, ids: list[int]) -> None:
        """Stream an unfinished sequence. `ids` has all its tokens so far."""

    def computed(self, job: HeldJob) -> None:
        """Report that sequences of a job with `streams_chunks` are computed."""

    def device_changed(self) -> None:
        """Report that a forward pass began, or that the device has nothing left to do."""


class IdleWork(Protocol):
    """Device work without a waiting job, in pieces of tens of milliseconds: captures of CUDA
    graphs.
    """

    @property
    def is_pending(self) -> bool: ...

    def run(self) -> None:
        """Do one piece of work. Called on the device thread while no batch waits or runs; must not
        raise.
        """


@runtime_checkable
class KeepsSequences(Protocol):
    """A model that keeps state of sequences between forward passes."""

    @property
    def pool_tokens(self) -> int:
        """Tokens of the prompts and longest answers that fit into memory together."""

    @property
    def claimed_share(self) -> float:
        """The share of this memory that sequences had claimed during the last forward pass."""

    def drop(self, sequences: Sequence[InputSequence]) -> None:
        """Free the state. Called on the device thread, also between two layers of another forward
        pass.
        """


class DeviceRunner:
    """Runs batches on the device thread. Add prepared jobs from any thread.

    `outcomes` is called exactly once for each job that is still wanted.

    Args:
        clock: Monotonic seconds.
        unix_time: Seconds since 1970 by Redis' clock, which deadlines use.
        oom_recovery: Runs forward passes. If it raises, the device is lost and `ended` has the
            error.
        enter: Runs first on the device thread.
        waste: Counts every forward pass.
        idle_work: Done while no batch waits or is on the device.
        launches_ahead: Launch the next batch before the last one is over, if the model can.
    """

    def __init__(
        self,
        limits: BatchLimits,
        outcomes: Outcomes,
        *,
        clock: Callable[[], float],
        unix_time: Callable[[], float],
        oom_recovery: OomRecovery,
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
        self._oom_recovery = oom_recovery
        self._enter = enter
        self._waste = waste
        self._idle_work = idle_work
        self._launches_ahead = launches_ahead
        # Used by the device thread only.
        self._caps = Caps(limits.tokens)
        self._cut_at: float | None = None  # of the next batch, if this thread waited for it
        self._preempting_cpu_seconds = 0.0
        self._over_at = 0.0  # when the last of the launched batches was over
        self._begun: set[int] = set()  # jobs with unfinished sequences
        # Mutable state, all of it guarded by the condition's lock.
        self._condition = threading.Condition()
        self._waiting_room = WaitingRoom()
        self._jobs: dict[int, HeldJob] = {}
        self._meters: dict[str, Meter] = {}
        self._free_at = 0.0
        # The model and the callers of each batch that was cut and is not over.
        self._computing: list[tuple[str, frozenset[Caller]]] = []
        self._stopping = False
        # A daemon: a forward pass cannot be cancelled and must not delay shutdown beyond the grace
        # period.
        self._thread = threading.Thread(target=self._main, name="device", daemon=True)

    def start(self) -> None:
        # So that cancelling a waiter does not cancel the future itself.
        self.ended.set_running_or_notify_cancel()
        self._thread.start()

    def stop(self) -> None:
        """Run no further batch and report no further outcome. `ended` resolves after the current
        batch.
        """
        with self._condition:
            self._stopping = True
            self._condition.notify()

    def wake(self) -> None:
        """Make an idle device thread check for idle work. Any thread."""
        with self._condition:
            self._condition.notify()

    @property
    def waiting_tokens(self) -> int:
        return self._waiting_room.tokens

    def waiting(self) -> dict[tuple[str, str], dict[Flow, int]]:
        """Return the waiting tokens of each flow, by model and adapter."""
        with self._condition:
            return {lane: dict(flows) for lane, flows in self._waiting_room.lanes.items()}

    def batch_tokens(self, residents: Iterable[Resident]) -> dict[str, int]:
        """Return the largest batch of each model that would run now: the token budget, or less for
        a slow model. Of a model that keeps sequences: half of the prompts and answers that it
        can keep, since pulls may be twice as large (`pulls.py`).
        """
        with self._condition:
            return {
                one.name: min(max(1, one.model.pool_tokens // 2), self.limits.tokens)
                if isinstance(one.model, KeepsSequences)
                else self._max_tokens(one.name)
                for one in residents
            }

    @property
    def is_running(self) -> bool:
        """True while a forward pass is in progress."""
        return self._free_at > 0.0

    def is_computing(self, model: str) -> bool:
        """Return whether a batch of the model was cut and is not over. Later batches exclude jobs
        that are unwanted now. Any thread.
        """
        with self._condition:
            return any(model == other for other, _ in self._computing)

    def serves_others(self, caller: Caller) -> bool:
        """Return whether a batch that was cut and is not over has sequences of another caller. For
        interactive work, only other interactive work counts. Any thread.
        """
        _, is_bulk = caller
        with self._condition:
            return any(
                other != caller and (is_bulk or not other[1])
                for _, callers in self._computing
                for other in callers
            )

    @property
    def busy_seconds(self) -> float:
        """Lower bound of the time until the next batch is cut; 0 if none runs or its speed is
        unknown.

        Not the expected time, because a pull that is sent too late misses a whole batch.
        """
        return max(0.0, self._free_at - self._clock())

    def add(self, jobs: Collection[HeldJob]) -> list[HeldJob]:
        """Queue prepared jobs for the device, and return those that are complete already.

        A job that was growing may be added again with its further sequences (`grow`).
        """
        with self._condition:
            complete = [held for held in jobs if self._add(held, held.ready, is_growing=False)]
            self._condition.notify()
        return complete

    def grow(self, held: HeldJob, prepared: Prepared) -> None:
        """Queue the further sequences of a job that is still prepared."""
        with self._condition:
            self._add(held, prepared, is_growing=True)
            self._condition.notify()

    def _add(self, held: HeldJob, prepared: Prepared, *, is_growing: bool) -> bool:
        """Queue the sequences of a job that were not queued yet. Return whether it is complete."""
        first = held.queued
        if first and held.number not in self._jobs:
            return False  # it got its outcome
        held.prepared, held.is_growing = prepared, is_growing
        held.queued = len(prepared.sequences)
        if held.is_complete:
            self._forget([held] if first else [])
            return True
        now = self._clock()
        self._jobs[held.number] = held
        self._meters[held.resident.name] = held.resident.meter
        for head, indices in prepared.groups().items():
            group = BatchGroup(held.resident.name, head)
            answer = longest_answer(prepared) if group.is_continuous else 0
            waiting = [
                Waiting(held.number, index, prepared.sequences[index].tokens, now, answer)
                for index in indices
                if index >= first
            ]
            self._waiting_room.add(group, waiting, held.flow, held.weight)
        return False

    def _main(self) -> None:
        try:
            self._enter()
            if self._launches_ahead:
                self._run_ahead()
            else:
                while (batch := self._next()) is not None:
                    self._serve(batch, self._sequence_jobs(batch))
        except BaseException as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def _next(self) -> Batch | None:
        """Wait for work and cut the next batch. Return None when the runner stops."""
        has_waited = False
        with self._condition:
            while not self._stopping:
                self._drop_stale()
                batch = self._waiting_room.take(self.limits, self._clock(), self._budget_tokens)
                if batch is not None:
                    now = self._clock()
                    self._cut_at = now if has_waited else None
                    self._free_at = now + self._min_seconds(batch)
                    self._computing.append(_model_and_callers(batch))
                    self._outcomes.device_changed()
                    return batch
                self._free_at = 0.0
                self._outcomes.device_changed()
                if not self._do_idle_work():
                    self._condition.wait()
                has_waited = True
        return None

    def _do_idle_work(self) -> bool:
        """Do one piece of idle work without the lock, so that jobs can be added. Return whether any
        existed.
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
        """Run batches until the runner stops, at most two on the device at a time."""
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
        """Wait until the launched batch is about to end, and cut the next one.

        Return None to collect the launched batch first: nothing waits, its duration is short or
        unknown, or the runner stops.
        """
        pending = launched.pending
        if (
            launched.min_seconds < MIN_AHEAD_SECONDS
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
                self._condition.wait(min(left, BATCH_POLL_SECONDS))
            if self._stopping or not self._waiting_room.tokens:
                return None
            # A job that is wholly on the device no longer waits: it gets its outcome when its batch
            # is collected.
            self._drop_stale(
                {one.job for one in launched.batch.chosen if not self._waiting_room.holds(one.job)}
            )
            batch = self._waiting_room.take(self.limits, self._clock(), self._budget_tokens)
            if batch is not None:
                self._computing.append(_model_and_callers(batch))
                self._outcomes.device_changed()
            return batch

    def _launch_and_collect(self, batch: Batch, before: Launched | None) -> Launched | None:
        """Launch a batch, then collect the previous one. Return the batch that is on the device, if
        any.
        """
        jobs = self._sequence_jobs(batch)
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
                launched.cut_next_at = self._over_at + launched.min_seconds - LAUNCH_LEAD_SECONDS
                self._free_at = max(self._over_at, launched.cut_next_at)
        return launched

    def _launch(
        self, batch: Batch, jobs: list[HeldJob], model: LaunchesBatches, before: Launched | None
    ) -> Launched:
        cpu_started, started = time.thread_time(), self._clock()
        resident = jobs[0].resident
        if before is None:
            self.device_time.began(started, queued_at(jobs), self._cut_at)
        deduplicated = deduplicate(batch_sequences(batch, jobs), resident.images)
        pending: PendingBatch | Failure | None = None
        if deduplicated.needed:
            pending = attempt(
                partial(model.launch, batch.group.head, deduplicated.needed),
                deduplicated.needed,
                resident.name,
            )
        # Charge the expected time now, so that the next choice of a batch counts this one.
        charged = max(resident.meter.expected_seconds(deduplicated.tokens), MIN_CHARGE_SECONDS)
        min_seconds = resident.meter.min_seconds(deduplicated.tokens)
        with self._condition:
            now = self._clock()
            begins = now if before is None else max(now, before.cut_next_at + LAUNCH_LEAD_SECONDS)
            cut_next_at = begins + min_seconds - LAUNCH_LEAD_SECONDS
            self._free_at = max(now, cut_next_at)
            self._waiting_room.ran(batch, charged, now)
        cpu_seconds = time.thread_time() - cpu_started
        return Launched(
            batch,
            jobs,
            deduplicated,
            pending,
            started,
            cpu_seconds,
            charged,
            min_seconds,
            before is not None,
            cut_next_at,
        )

    def _collect(self, launched: Launched, following: Launched | None = None) -> None:
        """Wait for a launched batch and pass on its outcomes.

        If it failed, the batch that was launched after it (`following`) is finished before anything
        is recovered or repeated.
        """
        launched.is_over = True
        cpu_started = time.thread_time()
        batch, needed, resident = (
            launched.batch,
            launched.deduplicated.needed,
            launched.jobs[0].resident,
        )
        pending, launched.pending = launched.pending, None
        recovery, seconds = RecoveryResult([], is_clean=False), None
        if pending is not None:
            found = (
                pending
                if isinstance(pending, Failure)
                else attempt(partial(collect, pending), needed, resident.name)
            )
            pending = None  # free a failed batch's memory before it is repeated
            if isinstance(found, Failure):
                if following is not None:
                    following_started = time.thread_time()
                    self._collect(following)
                    cpu_started += time.thread_time() - following_started
                recovery = self._oom_recovery.recover_from(
                    resident.name, partial(resident.model.forward, batch.group.head), needed, found
                )
            else:
                recovery, seconds = RecoveryResult([*found.outputs]), found.seconds
                if launched.is_ahead:
                    self.device_time.idled(found.idle_seconds)
            cache_outputs(resident.images, needed, recovery.outcomes)
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
                launched.deduplicated,
                recovery,
                max(launched.started, ended - seconds),
                ended,
                seconds,
            ),
            charged=launched.charged,
            is_last=is_last,
        )

    def _sequence_jobs(self, batch: Batch) -> list[HeldJob]:
        """Return the job of each sequence."""
        return [self._jobs[one.job] for one in batch.chosen]

    def _preempt(self, running: Batch) -> float:
        """Run the batches that preempt the running one. Called between two layers; returns the
        seconds taken.
        """
        if (
            not self._waiting_room.tokens
        ):  # read without the lock: a race only delays this by one layer
            return 0.0
        started = self._clock()
        batch = self._next_preempting(running)
        if batch is None:
            return self._clock() - started
        cpu_started, computed = time.thread_time(), 0.0
        while batch is not None:
            metrics.BATCH_PREEMPTIONS.inc()
            done = self._serve(batch, self._sequence_jobs(batch), is_preempting=True)
            computed += done.seconds
            # The running batch may hold the memory that the others wait for.
            batch = None if done.has_only_waited else self._next_preempting(running)
        seconds = self._clock() - started
        self._preempting_cpu_seconds += time.thread_time() - cpu_started
        self.device_time.preempting_seconds(seconds - computed)
        return seconds

    def _next_preempting(self, running: Batch) -> Batch | None:
        with self._condition:
            if self._stopping or not self._waiting_room.preempts(running, self.limits):
                return None
            self._drop_stale({one.job for one in running.chosen})
            if not self._waiting_room.preempts(running, self.limits):
                return None
            batch = self._waiting_room.take(
                replace(self.limits, tokens=self.limits.tokens - running.tokens),
                self._clock(),
                self._budget_tokens,
            )
            if batch is not None:
                self._free_at += self._min_seconds(batch)
                self._computing.append(_model_and_callers(batch))
                self._outcomes.device_changed()
        return batch

    def _min_seconds(self, batch: Batch) -> float:
        return self._jobs[batch.chosen[0].job].resident.meter.min_seconds(batch.tokens)

    def _budget_tokens(self, group: BatchGroup) -> int:
        # The duration of a decoding step hardly depends on the number of sequences.
        return (
            self._caps.token_budget(group)
            if group.is_continuous
            else min(self._caps.token_budget(group), self._max_tokens(group.model))
        )

    def _max_tokens(self, model: str) -> int:
        """Return the largest batch of the model within the limit of a batch's duration."""
        is_shared = self._waiting_room.is_shared(model)
        meter, seconds = self._meters.get(model), self.limits.seconds
        if meter is None or not meter.tokens_per_second:
            max_tokens = (
                self.limits.tokens // UNMEASURED_BUDGET_DIVISOR if is_shared else self.limits.tokens
            )
        elif is_shared:
            max_tokens = max(
                meter.max_tokens(seconds),
                min(meter.max_tokens(SLOW_MODEL_BATCH_FACTOR * seconds), EFFICIENT_TOKENS),
            )
        else:
            max_tokens = meter.max_tokens(EXCLUSIVE_BATCH_FACTOR * seconds)
        return max(1, min(max_tokens, self.limits.tokens))

    def _drop_stale(self, kept: Collection[int] = ()) -> None:
        """Drop cancelled and expired jobs, except those with the numbers `kept`."""
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
            self._waiting_room.remove({held.number for held in jobs})
            for held in jobs:
                del self._jobs[held.number]
                model = held.resident.model
                if held.number in self._begun and isinstance(model, KeepsSequences):
                    model.drop(held.ready.sequences)
                self._begun.discard(held.number)

    def _serve(self, batch: Batch, jobs: list[HeldJob], *, is_preempting: bool = False) -> Done:
        """Run a batch to its end. Its seconds are without those of preempting batches."""
        preempting_seconds = 0.0

        def preempt() -> None:
            nonlocal preempting_seconds
            preempting_seconds += self._preempt(batch)

        called: YieldPoint = never_yield if is_preempting else preempt
        resident = jobs[0].resident
        preempting_cpu_seconds, cpu_started = self._preempting_cpu_seconds, time.thread_time()
        started = self._clock()
        if not is_preempting:
            self.device_time.began(started, queued_at(jobs), self._cut_at)
        deduplicated = deduplicate(batch_sequences(batch, jobs), resident.images)
        recovery = RecoveryResult([], is_clean=False)
        if deduplicated.needed:
            forward = partial(resident.model.forward, batch.group.head, yield_point=called)
            recovery = self._oom_recovery.run(resident.name, forward, deduplicated.needed)
            cache_outputs(resident.images, deduplicated.needed, recovery.outcomes)
        ended = self._clock()
        self.device_time.computed(
            time.thread_time()
            - cpu_started
            - (self._preempting_cpu_seconds - preempting_cpu_seconds)
        )
        if not is_preempting:
            self.device_time.ended(ended)
        seconds = ended - started - preempting_seconds
        done = Done(batch, jobs, deduplicated, recovery, started, ended, seconds)
        self._finish(done, is_last=not is_preempting)
        return done

    def _finish(self, done: Done, *, charged: float = 0.0, is_last: bool) -> None:
        """Charge and measure a batch, and pass on its outcomes. `is_last`: no other batch is on the
        device.
        """
        batch, jobs, recovery, seconds = done.batch, done.jobs, done.recovery, done.seconds
        resident = jobs[0].resident
        outcomes = done.deduplicated.outcomes(recovery.outcomes)
        ran = computed(batch, jobs, outcomes) if batch.group.is_continuous else batch
        self._waste.computed(jobs, [one.tokens for one in ran.chosen], seconds)
        with self._condition:
            self._waiting_room.ran(ran, seconds, done.ended, charged)
            resident.turn = self._waiting_room.turn(resident.name)
        self._caps.ran(batch.group, recovery.fitted_tokens)
        if recovery.is_clean and batch.group.is_continuous:
            tokens = sum(one.tokens for one in ran.chosen)
            resident.meter.add_steps(
                tokens,
                seconds,
                unneeded_tokens(batch, outcomes),
                self._occupied_share(batch, resident, outcomes),
            )
        elif recovery.is_clean:
            resident.meter.add_forward(done.deduplicated.tokens, seconds)
        measured: dict[str, Value] = {
            "model": resident.name,
            "tenant": jobs[0].job.tenant,
            "tokens": ran.tokens,
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
            tokens=ran.tokens,
            sequences=len(jobs),
        )
        self._measure(ran, jobs, seconds)
        for held in dict.fromkeys(jobs):
            held.forward_seconds += seconds
        if self._launches_ahead:
            batch, jobs, outcomes = self._without_gone(batch, jobs, outcomes)
        self._hand_on(batch, jobs, outcomes, is_last=is_last)

    def _occupied_share(
        self, batch: Batch, resident: Resident, outcomes: Sequence[Outcome]
    ) -> float:
        """Return the share of a generative model's sequences, by memory or by the size of a batch,
        that were in progress.
        """
        model = resident.model
        if not isinstance(model, KeepsSequences) or any(map(waits_for_memory, outcomes)):
            return 1.0
        most = min(self.limits.items, self.limits.tokens, self._caps.token_budget(batch.group))
        return min(1.0, max(model.claimed_share, len(batch.chosen) / most))

    def _without_gone(
        self, batch: Batch, jobs: list[HeldJob], outcomes: list[Outcome]
    ) -> tuple[Batch, list[HeldJob], list[Outcome]]:
        """Leave out jobs that got their outcome while this batch ran, and count their time as
        wasted.
        """
        gone = {held for held in jobs if held.number not in self._jobs}
        if not gone:
            return batch, jobs, outcomes
        for held in gone:
            self._waste.dropped(held)
        kept = [position for position, held in enumerate(jobs) if held not in gone]
        chosen = tuple(batch.chosen[position] for position in kept)
        return (
            replace(batch, chosen=chosen),
            [jobs[position] for position in kept],
            [outcomes[position] for position in kept],
        )

    def _measure(self, batch: Batch, jobs: list[HeldJob], seconds: float) -> None:
        model = jobs[0].resident.name
        metrics.FORWARD_SECONDS.labels(model).observe(seconds)
        metrics.BATCH_TOKENS.labels(model).observe(batch.tokens)
        metrics.BATCH_FILL.labels(model).observe(batch.tokens / self.limits.tokens)
        for held, one in zip(jobs, batch.chosen, strict=True):
            metrics.TENANT_TOKENS.labels(metrics.TENANTS.bounded(held.job.tenant)).inc(one.tokens)

    def _hand_on(
        self, batch: Batch, jobs: list[HeldJob], outcomes: list[Outcome], *, is_last: bool
    ) -> None:
        broken: dict[HeldJob, ShoalError] = {}
        unfinished: dict[Flow, list[tuple[HeldJob, Waiting]]] = {}
        for one, held, outcome in zip(batch.chosen, jobs, outcomes, strict=True):
            if isinstance(outcome, Unfinished):
                self._begun.add(held.number)
                prompt = held.ready.sequences[one.index].tokens
                again = (
                    replace(one, tokens=1, counted=len(outcome.ids))
                    if outcome.has_begun
                    else replace(one, tokens=prompt, counted=None)
                )
                unfinished.setdefault(held.flow, []).append((held, again))
                if held.job.stream_to and outcome.ids:
                    self._outcomes.stream(held, one.index, list(outcome.ids))
                continue
            if not isinstance(outcome, ShoalError):
                held.outputs[one.index] = outcome
                continue
            if isinstance(outcome, OutOfMemory):
                outcome.field = item_path(held.ready, one.index)
            broken.setdefault(held, outcome)
        with self._condition:
            finished = [
                held
                for held in dict.fromkeys(jobs)
                if held.is_complete and held.number in self._jobs
            ]
            self._computing.remove(_model_and_callers(batch))
            if self._stopping:
                return
            for flow, sequences in unfinished.items():
                waiting = [one for held, one in sequences if held not in broken]
                self._waiting_room.add(batch.group, waiting, flow, sequences[-1][0].weight)
            self._forget([*broken, *finished])
            is_idle = is_last and not self._waiting_room.tokens
        for held, error in broken.items():
            held.unwanted |= held.is_growing  # ends its preparation
            self._outcomes.failed(held, error)
        for held in [held for held in dict.fromkeys(jobs) if held.streams_chunks]:
            self._outcomes.computed(held)
        if finished:
            self._outcomes.finished(finished, is_idle=is_idle)


def _model_and_callers(batch: Batch) -> tuple[str, frozenset[Caller]]:
    return batch.group.model, frozenset(flow.caller for flow in batch.weighed)
