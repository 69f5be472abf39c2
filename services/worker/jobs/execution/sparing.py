"""What of a batch need not be computed: sequences whose output was kept, and those that the batch
has twice.

Called by `runner.py` on the device thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libs.errors import ShoalError
from libs.models import InputSequence, Output, Unfinished, is_finite
from libs.telemetry import metrics
from services.worker.jobs.execution.ladder import Outcome
from services.worker.memory.images import ImageOutputs


@dataclass(frozen=True, slots=True)
class Spared:
    """`needed`: the sequences to compute. `places`: of each sequence of the batch, its place among
    them; -1: its output is in `known`, by its index."""

    needed: list[InputSequence]
    places: list[int]
    known: dict[int, Output]

    @property
    def tokens(self) -> int:
        """Of the sequences to compute."""
        return sum(sequence.tokens for sequence in self.needed)

    def outcomes(self, computed: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes of all sequences of the batch, of those of the computed ones."""
        return [
            self.known[index] if place < 0 else computed[place]
            for index, place in enumerate(self.places)
        ]


def spare(sequences: Sequence[InputSequence], kept: ImageOutputs | None) -> Spared:
    """Which sequences of a batch are to be computed, and counts the others."""
    if kept is None or not any(sequence.key for sequence in sequences):
        return Spared(list(sequences), list(range(len(sequences))), {})
    needed: list[InputSequence] = []
    places: list[int] = []
    known: dict[int, Output] = {}
    first: dict[bytes, int] = {}
    for index, sequence in enumerate(sequences):
        place, event = first.get(sequence.key, -1), "shared"
        if place < 0:
            found = kept.find(sequence.key) if sequence.key else None
            if found is None:
                place, event = len(needed), "miss"
                needed.append(sequence)
            else:
                known[index], event = found.output, "hit"
        if sequence.key:
            metrics.IMAGE_CACHE_EVENTS.labels(event).inc()
            if place >= 0:
                first[sequence.key] = place
        places.append(place)
    return Spared(needed, places, known)


def keep(
    kept: ImageOutputs | None, sequences: Sequence[InputSequence], computed: Sequence[Outcome]
) -> None:
    """Keeps the outputs of computed sequences that may be found again."""
    if kept is None:
        return
    for sequence, outcome in zip(sequences, computed, strict=True):
        if sequence.key and not isinstance(outcome, ShoalError | Unfinished) and is_finite(outcome):
            kept.keep(sequence.key, outcome, sequence.tokens)
