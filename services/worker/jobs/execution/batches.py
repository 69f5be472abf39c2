"""Records of batches in progress, used by `runner.py`. Times are seconds of the runner's clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from libs.models import (
    EncodeWork,
    Forwarded,
    GeneratedIds,
    InputSequence,
    Prepared,
    ScoreWork,
    Unfinished,
)
from libs.models.interface.pending import PendingBatch
from libs.models.interface.work import TextWork
from libs.work_estimate import answer_tokens
from services.worker.jobs.execution.dedup import Deduplicated
from services.worker.jobs.execution.oom_recovery import Failure, Outcome, RecoveryResult
from services.worker.jobs.held import HeldJob
from services.worker.scheduling.batcher import Batch, Flow, Waiting


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

    @property
    def has_only_waited(self) -> bool:
        """True if every sequence waits for memory: nothing was computed."""
        return all(map(waits_for_memory, self.deduplicated.outcomes(self.recovery.outcomes)))


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


def longest_answer(prepared: Prepared) -> int:
    """Return the tokens of work that each text to generate has."""
    work = prepared.work
    return answer_tokens(work.max_tokens if isinstance(work, TextWork) else 0)


def computed(batch: Batch, jobs: Sequence[HeldJob], outcomes: Sequence[Outcome]) -> Batch:
    """Return the batch of a generative model with the tokens that its forward computed: a prompt
    once, and each token of an answer. Nothing was computed of sequences that wait for memory.

    Each sequence is charged for one token at least, also one that waits: its flow had its turn, and
    else would have all further ones until it has memory.
    """
    chosen = tuple(
        replace(one, tokens=_computed_tokens(one, outcome))
        for one, outcome in zip(batch.chosen, outcomes, strict=True)
    )
    planned: Counter[Flow] = Counter()
    charged: Counter[Flow] = Counter()
    for held, before, one in zip(jobs, batch.chosen, chosen, strict=True):
        planned[held.flow] += before.tokens
        charged[held.flow] += max(1, one.tokens)
    return replace(
        batch,
        chosen=chosen,
        tokens=charged.total(),
        weighed={
            flow: cost * charged[flow] / max(1, planned[flow])
            for flow, cost in batch.weighed.items()
        },
    )


def waits_for_memory(outcome: Outcome) -> bool:
    return isinstance(outcome, Unfinished) and not outcome.has_begun


def _computed_tokens(one: Waiting, outcome: Outcome) -> int:
    if waits_for_memory(outcome):
        return 0
    ids = len(outcome.ids) if isinstance(outcome, Unfinished | GeneratedIds) else 0
    return one.tokens + ids if one.counted is None else max(0, ids - one.counted)


def unneeded_tokens(batch: Batch, outcomes: Sequence[Outcome]) -> int:
    """Return the tokens by which the answers that ended are shorter than they could be."""
    return sum(
        max(0, one.answer - len(outcome.ids))
        for one, outcome in zip(batch.chosen, outcomes, strict=True)
        if isinstance(outcome, GeneratedIds)
    )


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
