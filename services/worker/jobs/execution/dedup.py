"""Removes cached and duplicate sequences from a batch. `runner.py` calls it on the device
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libs.errors import ShoalError
from libs.models import InputSequence, Output, Unfinished, is_finite
from libs.telemetry import metrics
from services.worker.jobs.execution.oom_recovery import Outcome
from services.worker.memory.images import ImageOutputs


@dataclass(frozen=True, slots=True)
class Deduplicated:
    """A batch without its cached and duplicate sequences."""

    needed: list[InputSequence]
    """The sequences to compute."""
    positions: list[int]
    """The index in `needed` of each sequence of the batch; -1 if its output is in `known`."""
    known: dict[int, Output]
    """Cached outputs, by index in the batch."""

    @property
    def tokens(self) -> int:
        """Tokens of the sequences to compute."""
        return sum(sequence.tokens for sequence in self.needed)

    def outcomes(self, computed: Sequence[Outcome]) -> list[Outcome]:
        """Return the outcomes of all sequences of the batch, given those of `needed`."""
        return [
            self.known[index] if position < 0 else computed[position]
            for index, position in enumerate(self.positions)
        ]


def deduplicate(sequences: Sequence[InputSequence], kept: ImageOutputs | None) -> Deduplicated:
    """Remove cached and duplicate sequences, and count them."""
    if kept is None or not any(sequence.key for sequence in sequences):
        return Deduplicated(list(sequences), list(range(len(sequences))), {})
    needed: list[InputSequence] = []
    positions: list[int] = []
    known: dict[int, Output] = {}
    first: dict[bytes, int] = {}
    for index, sequence in enumerate(sequences):
        position, event = first.get(sequence.key, -1), "shared"
        if position < 0:
            found = kept.find(sequence.key) if sequence.key else None
            if found is None:
                position, event = len(needed), "miss"
                needed.append(sequence)
            else:
                known[index], event = found.output, "hit"
        if sequence.key:
            metrics.IMAGE_CACHE_EVENTS.labels(event).inc()
            if position >= 0:
                first[sequence.key] = position
        positions.append(position)
    return Deduplicated(needed, positions, known)


def cache_outputs(
    kept: ImageOutputs | None, sequences: Sequence[InputSequence], computed: Sequence[Outcome]
) -> None:
    """Cache the outputs of computed sequences that have a key."""
    if kept is None:
        return
    for sequence, outcome in zip(sequences, computed, strict=True):
        if sequence.key and not isinstance(outcome, ShoalError | Unfinished) and is_finite(outcome):
            kept.keep(sequence.key, outcome, sequence.tokens)
