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
    places: list[int]
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
            self.known[index] if place < 0 else computed[place]
            for index, place in enumerate(self.places)
        ]


def deduplicate(sequences: Sequence[InputSequence], kept: ImageOutputs | None) -> Deduplicated:
    """Remove cached and duplicate sequences, and count them."""
    if kept is None or not any(sequence.key for sequence in sequences):
        return Deduplicated(list(sequences), list(range(len(sequences))), {})
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
    return Deduplicated(needed, places, known)


def cache_outputs(
    kept: ImageOutputs | None, sequences: Sequence[InputSequence], computed: Sequence[Outcome]
) -> None:
    """Cache the outputs of computed sequences that have a key."""
    if kept is None:
        return
    for sequence, outcome in zip(sequences, computed, strict=True):
        if sequence.key and not isinstance(outcome, ShoalError | Unfinished) and is_finite(outcome):
            kept.keep(sequence.key, outcome, sequence.tokens)
