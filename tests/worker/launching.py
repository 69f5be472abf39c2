"""FakeModel on the tests' asynchronous device, and a runner that launches its batches ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from shoal.v1 import worker_pb2

from libs.errors import ShoalError
from libs.models import Head, InputSequence, Output, YieldPoint, never_yield
from services.worker.jobs.execution.oom_recovery import OomRecovery
from services.worker.jobs.execution.runner import DeviceRunner
from services.worker.jobs.held import HeldJob, Lease
from services.worker.jobs.waste import Waste
from services.worker.memory.resident import Resident
from services.worker.mesh import job_codec
from services.worker.scheduling.batcher import BatchLimits
from tests.support.asynchronous import FakeQueue, FakeSubmission
from tests.support.waiting import wait_until
from tests.worker.fakes import FakeModel, encode_job

MODEL = "org/fake"


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class FakePending:
    """A `PendingBatch`. `error` is raised once the device has computed the batch."""

    def __init__(
        self, submission: FakeSubmission, log: list[str], name: str, error: Exception | None
    ) -> None:
        self._submission, self._log, self._name, self._error = submission, log, name, error

    def is_done(self) -> bool:
        return self._submission.is_done()

    def wait(self) -> None:
        self._submission.wait()

    def collect(self) -> list[Output]:
        try:
            self._submission.wait()
            if self._error is not None:
                raise self._error
        except Exception:
            self._log.append(f"failed {self._name}")
            raise
        self._log.append(f"collect {self._name}")
        return [copy.numpy() for copy in self._submission.copies]

    @property
    def seconds(self) -> float:
        return self._submission.seconds

    @property
    def idle_seconds(self) -> float:
        return self._submission.idle_seconds


class LaunchingModel(FakeModel):
    """FakeModel, launched on a queue.

    `log` records events of batches, in order, by the first letters of their texts. `at_launch` and
    `at_collect` return the error, if any, for a batch of this name.
    """

    def __init__(self, queue: FakeQueue, log: list[str], name: str = MODEL) -> None:
        super().__init__(name)
        self.queue, self.log = queue, log
        self.is_launched = True
        self.at_launch: Callable[[str], Exception | None] = lambda name: None
        self.at_collect: Callable[[str], Exception | None] = lambda name: None

    def can_launch(self, head: Head) -> bool:
        return self.is_launched

    def launch(self, head: Head, sequences: Sequence[InputSequence]) -> FakePending:
        name = batch_name(sequences)
        self.queue.begin()
        self.log.append(f"launch {name}")
        if error := self.at_launch(name):
            raise error
        outputs = super().forward(head, list(sequences))
        submission = self.queue.submit([torch.as_tensor(output) for output in outputs])
        return FakePending(submission, self.log, name, self.at_collect(name))

    def forward(
        self, head: Head, sequences: list[InputSequence], yield_point: YieldPoint = never_yield
    ) -> list[Output]:
        assert self.queue.pending == 0, (
            "a batch that is not launched runs while another is on the device"
        )
        self.log.append(f"forward {batch_name(sequences)}")
        return super().forward(head, sequences, yield_point)


def batch_name(sequences: Sequence[InputSequence]) -> str:
    return "".join(chr(sequence.ids[0]) for sequence in sequences)


class Outcomes:
    """Records every outcome of every job, in order."""

    def __init__(self) -> None:
        self.of: dict[HeldJob, list[ShoalError | None]] = {}
        self.was_idle: list[bool] = []

    @property
    def done(self) -> list[HeldJob]:
        return [held for held, outcomes in self.of.items() if outcomes == [None]]

    def finished(self, jobs: list[HeldJob], *, is_idle: bool) -> None:
        self.was_idle.append(is_idle)
        for held in jobs:
            self.of.setdefault(held, []).append(None)

    def failed(self, job: HeldJob, error: ShoalError) -> None:
        self.of.setdefault(job, []).append(error)

    def computed(self, job: HeldJob) -> None:
        """Ignored."""

    def stream(self, job: HeldJob, index: int, ids: list[int]) -> None:
        raise NotImplementedError("no job of these tests is read along")

    def device_changed(self) -> None:
        return


class LaunchBench:
    """A runner that launches ahead. Batches have at most `batch_tokens` and an expected duration of
    `expected_seconds`.
    """

    def __init__(
        self, *, is_manual: bool = True, batch_tokens: int = 4, expected_seconds: float = 0.002
    ) -> None:
        self.log: list[str] = []
        self.queue = FakeQueue(is_manual=is_manual)
        self.model = LaunchingModel(self.queue, self.log)
        self.resident = Resident(MODEL, self.model, load_seconds=0.0, loaded_at=0.0, last_used=0.0)
        if expected_seconds:
            self.resident.meter.add_forward(batch_tokens, expected_seconds)
        self.outcomes = Outcomes()
        self.waste = Waste()
        self.is_lost = False
        self.numbers = iter(range(1_000_000))
        self.runner = DeviceRunner(
            BatchLimits(batch_tokens, 256, 1.0, seconds=1000.0),
            self.outcomes,
            clock=time.monotonic,
            unix_time=time.time,
            oom_recovery=OomRecovery(
                self._recover, lambda: self.log.append("trim"), lambda keep: False
            ),
            enter=lambda: None,
            waste=self.waste,
            launches_ahead=True,
        )

    def _recover(self) -> None:
        assert self.queue.pending == 0, "the device is recovered while a batch is on it"
        self.log.append("recover")
        if self.is_lost:
            raise RuntimeError("device lost")

    def held(
        self,
        *texts: str,
        seconds: float = 600.0,
        tenant: str = "",
        resident: Resident | None = None,
    ) -> HeldJob:
        job = encode_job("job", *texts, seconds=seconds)
        job.tenant = tenant
        resident = resident or self.resident
        number = next(self.numbers)
        held = HeldJob(
            number,
            job,
            Lease(worker_pb2.Lane(), "1", 15.0),
            resident,
            received_at=0.0,
            queue_seconds=0.0,
        )
        held.prepared = resident.model.prepare(job_codec.to_work(job), lambda: None)
        return held

    def launched(self, count: int) -> None:
        """Wait until `count` batches were launched."""
        wait_until(lambda: len(self.queue.submissions) >= count)

    def wait_for_outcomes(self, *jobs: HeldJob) -> None:
        """Wait until each of these jobs has an outcome."""
        wait_until(lambda: all(held in self.outcomes.of for held in jobs))

    def run_until(self, *jobs: HeldJob) -> None:
        """End every launched batch until each of these jobs has an outcome."""
        wait_until(lambda: end_all(self.queue) or all(held in self.outcomes.of for held in jobs))


@contextmanager
def launch_bench(
    *, is_manual: bool = True, batch_tokens: int = 4, expected_seconds: float = 0.002
) -> Iterator[LaunchBench]:
    """Yield a bench. The test starts its runner, so that jobs added before are there from the
    beginning.
    """
    made = LaunchBench(
        is_manual=is_manual, batch_tokens=batch_tokens, expected_seconds=expected_seconds
    )
    try:
        yield made
    finally:
        made.model.gate.set()
        made.runner.stop()
        if made.runner.ended.running():
            wait_until(lambda: end_all(made.queue) or made.runner.ended.done())


def end_all(queue: FakeQueue) -> bool:
    """End all batches on the device. Return False."""
    while queue.pending:
        queue.end_one()
    return False
