"""Records of batches in progress, used by `runner.py`. Times are seconds of the runner's clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libs.models import EncodeWork, Forwarded, InputSequence, Prepared, ScoreWork
from libs.models.interface.pending import PendingBatch
from services.worker.jobs.execution.dedup import Deduplicated
from services.worker.jobs.execution.oom_recovery import Failure, RecoveryResult
from services.worker.jobs.held import HeldJob
from services.worker.scheduling.batcher import Batch


@dataclass(slots=True, eq=False)
class Launched:
    """A batch that was launched on an asynchronous device."""

    batch: Batch
    jobs: list[HeldJob]
    """The job of each sequence. A job may have its outcome before the batch is over, if it failed
    in another batch or expired.
    """
    deduplicated: Deduplicated
    pending: PendingBatch | Failure | None
    """A Failure if the launch failed; None if no output needs to be computed."""
    started: float
    cpu_seconds: float
    charged: float
    """Seconds charged to its flows at launch."""
    min_seconds: float
    """Lower bound of its expected duration; 0 if unknown."""
    is_ahead: bool
    """Whether another batch was on the device when it was launched."""
    cut_next_at: float
    """The time at which to cut the next batch."""
    is_over: bool = False

    @property
    def is_on_device(self) -> bool:
        return (
            not self.is_over and self.pending is not None and not isinstance(self.pending, Failure)
        )


@dataclass(slots=True, eq=False)
class Done:
    """A finished batch. Not frozen: constructing a frozen instance for each batch costs 1 µs
    more.
    """

    batch: Batch
    jobs: list[HeldJob]
    deduplicated: Deduplicated
    recovery: RecoveryResult
    started: float
    ended: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of a `PendingBatch` that did not fail."""

    outputs: Sequence[Forwarded]
    seconds: float
    idle_seconds: float


def collect(pending: PendingBatch) -> Collected:
    """Wait for the batch. Raises what `PendingBatch.collect` raises."""
    outputs = pending.collect()
    return Collected(outputs, pending.seconds, pending.idle_seconds)


def batch_sequences(batch: Batch, jobs: Sequence[HeldJob]) -> list[InputSequence]:
    """Return the sequences of a batch, given the job of each."""
    return [held.ready.sequences[one.index] for held, one in zip(jobs, batch.chosen, strict=True)]


def queued_at(jobs: Iterable[HeldJob]) -> float:
    """Return when the first of the jobs was queued."""
    return min(held.received_at - held.queue_seconds for held in jobs)


def item_path(prepared: Prepared, index: int) -> str:
    """Return the path in the job of a sequence's item, or "" if items and sequences do not match
    one to one.
    """
    if prepared.fields:
        return prepared.fields[index]
    match prepared.work:
        case EncodeWork(texts) if len(texts) == len(prepared.sequences):
            return f"items[{index}].text"
        case ScoreWork(_, documents) if len(documents) == len(prepared.sequences):
            return f"documents[{index}].text"
    return ""
