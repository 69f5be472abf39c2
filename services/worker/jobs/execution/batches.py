"""Batches on the device and behind it, as `runner.py` keeps them. Times are those of the runner's
clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libs.models import EncodeWork, Forwarded, InputSequence, Prepared, ScoreWork
from libs.models.pending import PendingBatch
from services.worker.jobs.execution.ladder import Failure, RecoveryResult
from services.worker.jobs.execution.sparing import Spared
from services.worker.jobs.held import HeldJob
from services.worker.scheduling.batcher import Batch


@dataclass(slots=True, eq=False)
class Launched:
    """A batch that was launched on an asynchronous device."""

    batch: Batch
    jobs: list[HeldJob]
    """The job of each sequence. It may have its outcome before the batch is over: it failed in
    another batch, or has expired.
    """
    spared: Spared
    pending: PendingBatch | Failure | None
    """Failure: it could not be launched. None: no output needs to be computed."""
    started: float
    cpu_seconds: float
    charged: float
    """The seconds that its flows were charged when it was launched."""
    least_seconds: float
    """The least time that it is expected to take; 0: nothing is known."""
    is_ahead: bool
    """Another batch was on the device when it was launched."""
    cut_next_at: float
    """When the next batch is cut."""
    is_over: bool = False

    @property
    def is_on_device(self) -> bool:
        return (
            not self.is_over and self.pending is not None and not isinstance(self.pending, Failure)
        )


@dataclass(slots=True, eq=False)
class Done:
    """A batch that is over. `seconds`: the device's time for it. Not frozen, as one is made for
    each batch and that costs 1 µs.
    """

    batch: Batch
    jobs: list[HeldJob]
    spared: Spared
    climbed: RecoveryResult
    started: float
    ended: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Collected:
    """What `PendingBatch` gives for a batch that did not fail."""

    outputs: Sequence[Forwarded]
    seconds: float
    idle_seconds: float


def collect(pending: PendingBatch) -> Collected:
    """Waits for the batch. Raises what `PendingBatch.collect` does."""
    outputs = pending.collect()
    return Collected(outputs, pending.seconds, pending.idle_seconds)


def sequences_of(batch: Batch, jobs: Sequence[HeldJob]) -> list[InputSequence]:
    """The sequences of a batch; `jobs`: that of each."""
    return [held.ready.sequences[one.index] for held, one in zip(jobs, batch.chosen, strict=True)]


def queued_at(jobs: Iterable[HeldJob]) -> float:
    """When the first of the jobs was queued."""
    return min(held.received_at - held.queue_seconds for held in jobs)


def item_path(prepared: Prepared, index: int) -> str:
    """The item that a sequence was made of, as a path in the job; empty where items do not match
    sequences one to one.
    """
    if prepared.fields:
        return prepared.fields[index]
    match prepared.work:
        case EncodeWork(texts) if len(texts) == len(prepared.sequences):
            return f"items[{index}].text"
        case ScoreWork(_, documents) if len(documents) == len(prepared.sequences):
            return f"documents[{index}].text"
    return ""
