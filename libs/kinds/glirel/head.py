"""Logits of relations between entities that are known before the forward (GLiREL)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.kernels.layout import to_device
from libs.models.interface.head import Array
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import (
    InputSequence,
    Output,
    SparseRow,
    YieldPoint,
    never_yield,
)
from libs.models.runtime.answer_budget import MAX_RELATIONS
from libs.models.text.heads.extraction.spans import TwoLayers, chunks, folded
from libs.models.text.heads.extraction.words import WordPlaces, WordReader, prefix_sums
from libs.models.text.heads.linear import HeadLinear, check_shape

Ids = NDArray[np.int32]
Places = NDArray[np.int16]
"""Numbers of entities in a text. 120 entities have 14,280 pairs, kept for each text from its
preparation to its answer.
"""
# Elements of the pairs' hidden layer in memory at a time, twice during the sum: 8 MiB
_CHUNK_ELEMENTS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PairPlaces:
    """The head's input for a sequence (`Sequence.input`)."""

    words: WordPlaces
    """`labels` are the tokens with states that represent labels; the second one of each label, if
    any, is in `relations`."""
    firsts: Ids
    """First words of the entities."""
    lasts: Ids
    """Last words of the entities."""
    heads: Places
    """First entities of the pairs."""
    tails: Places
    """Second entities of the pairs."""


class EntityMarker(nn.Module):
    """The representation of an entity, computed from its first and last word."""

    def __init__(self, state: Mapping[str, Tensor], stem: str, *, size: int, file: str) -> None:
        super().__init__()
        self.start = TwoLayers(state, f"{stem}.project_start", size=size, inputs=size, file=file)
        self.end = TwoLayers(state, f"{stem}.project_end", size=size, inputs=size, file=file)
        self.out = TwoLayers(state, f"{stem}.out_project", size=size, inputs=size * 2, file=file)

    def forward(self, firsts: Tensor, lasts: Tensor) -> Tensor:
        """Map states of first and last words, [entities, size] each, to [entities, size]."""
        sides = torch.cat([self.start.forward(firsts), self.end.forward(lasts)], dim=1)
        return self.out.forward(sides.relu())


class PairDotScorer(nn.Module):
    """The dot product of a pair's and a label's representation. The pairs' last layer is linear and
    folded into the labels.
    """

    def __init__(self, last: HeadLinear) -> None:
        super().__init__()
        self.last = last

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Score the pairs of one text: [pairs, labels].

        Args:
            hidden: The input of the pairs' last layer, [pairs, 4 size].
            labels: [labels, size]
        """
        keys, base = folded(self.last, labels)
        return torch.addmm(base, hidden, keys.T)


class ConcatScorer(nn.Module):
    """Two layers over the concatenated product, difference, pair and label. Labels are scored one
    at a time, which bounds memory.
    """

    def __init__(
        self, last: HeadLinear, state: Mapping[str, Tensor], stem: str, *, size: int, file: str
    ) -> None:
        super().__init__()
        for name, shape in (("0", (size * 4, size * 4)), ("3", (1, size * 4))):
            check_shape(state, f"{stem}.{name}.weight", shape, file)
            check_shape(state, f"{stem}.{name}.bias", shape[:1], file)
        self.last = last
        self.inner, self.outer = (
            HeadLinear(state, f"{stem}.0", "relu"),
            HeadLinear(state, f"{stem}.3", "identity"),
        )

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Score as `PairDotScorer` does."""
        pairs = self.last.forward(hidden)
        return torch.cat([self._column(pairs, label) for label in labels], dim=1)

    def _column(self, pairs: Tensor, label: Tensor) -> Tensor:
        features = torch.cat([pairs * label, pairs - label, pairs, label.expand_as(pairs)], dim=1)
        return self.outer.forward(self.inner.forward(features))


class PairHead(nn.Module):
    """Map hidden states to logits [pairs, labels] for each sequence, or only the largest of a large
    number.

    `inner` is the first layer for pairs; `scorer` has the second.
    """

    def __init__(
        self,
        reader: WordReader,
        marker: EntityMarker,
        prompt: TwoLayers,
        inner: HeadLinear,
        scorer: PairDotScorer | ConcatScorer,
    ) -> None:
        super().__init__()
        self.reader, self.marker, self.prompt, self.inner, self.scorer = (
            reader,
            marker,
            prompt,
            inner,
            scorer,
        )

    @property
    def rows(self) -> Rows | None:
        return None

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        return self.forward_preemptible(hidden, batch, sequences, never_yield)

    def forward_preemptible(
        self,
        hidden: Tensor,
        batch: Packed,
        sequences: Sequence[InputSequence],
        yield_point: YieldPoint,
    ) -> tuple[Tensor, ...]:
        places = _places(sequences)
        words = [place.words for place in places]
        states = self.reader.forward(hidden, batch, words)
        labels = (states.labels + states.relations) / 2 if len(states.relations) else states.labels
        labels = self.prompt.forward(labels)
        starts = prefix_sums([place.words for place in words])
        firsts = _moved([place.firsts for place in places], starts, hidden.device)
        lasts = _moved([place.lasts for place in places], starts, hidden.device)
        entities = self.marker.forward(
            states.words.index_select(0, firsts), states.words.index_select(0, lasts)
        )
        return (self._logits(entities, labels, places, yield_point),)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        shapes = [(len(place.heads), len(place.words.labels)) for place in _places(sequences)]
        ends = prefix_sums([pairs * labels for pairs, labels in shapes])
        flat = arrays[0].astype(np.float32, copy=False)
        return [
            _largest(flat[start:end].reshape(shape))
            for (start, end), shape in zip(pairwise(ends), shapes, strict=True)
        ]

    def _logits(
        self,
        entities: Tensor,
        labels: Tensor,
        places: Sequence[PairPlaces],
        yield_point: YieldPoint,
    ) -> Tensor:
        """Return the logits of all sequences, flat, end to end.

        The head's and the tail's part of the hidden layer is computed once per entity. A batch of
        pairs can take as long as several layers of the encoder, so it can be preempted between two
        pieces.
        """
        as_head, as_tail = torch.split(self.inner.weight, entities.shape[1], dim=1)
        heads, tails = F.linear(entities, as_head), F.linear(entities, as_tail, self.inner.bias)
        entity_starts = prefix_sums([len(place.firsts) for place in places])
        label_starts = prefix_sums([len(place.words.labels) for place in places])
        pair_starts = prefix_sums([len(place.heads) for place in places])
        rows = _moved([place.heads for place in places], entity_starts, entities.device)
        columns = _moved([place.tails for place in places], entity_starts, entities.device)
        ends = prefix_sums([len(place.heads) * len(place.words.labels) for place in places])
        # Concatenation would keep all sequences' logits twice.
        logits = entities.new_empty(ends[-1])
        step = max(1, _CHUNK_ELEMENTS // heads.shape[1])
        for some in chunks(pair_starts, step):
            end = pair_starts[some.stop]
            # More than one piece if a single sequence exceeds the budget.
            for first in range(pair_starts[some.start], end, step):
                last = min(first + step, end)
                hidden = (
                    heads.index_select(0, rows[first:last])
                    .add_(tails.index_select(0, columns[first:last]))
                    .relu_()
                )
                for i in some:
                    lowest, highest = max(pair_starts[i], first), min(pair_starts[i + 1], last)
                    scores = self.scorer.forward(
                        hidden[lowest - first : highest - first],
                        labels[label_starts[i] : label_starts[i + 1]],
                    )
                    place = ends[i] + (lowest - pair_starts[i]) * scores.shape[1]
                    logits[place : place + scores.numel()] = scores.flatten()
                yield_point()
        return logits


def _largest(logits: NDArray[np.float32]) -> Output:
    """Return all logits or, of a large number, only those that an answer may contain plus one,
    which indicates that more exist.

    128 entities and 256 labels have 4 million logits, which would be kept until the answer is
    built.
    """
    if logits.size <= MAX_RELATIONS + 1 or not np.isfinite(logits).all():
        return logits
    flat = logits.reshape(-1)
    most = MAX_RELATIONS + 1
    lowest = np.partition(flat, len(flat) - most)[len(flat) - most]
    above = np.flatnonzero(flat > lowest)
    kept = np.sort(np.concatenate([above, np.flatnonzero(flat == lowest)[: most - len(above)]]))
    return SparseRow(kept, flat[kept])


def _places(sequences: Sequence[InputSequence]) -> list[PairPlaces]:
    return [cast("PairPlaces", sequence.input) for sequence in sequences]


def _moved(parts: Sequence[NDArray[Any]], starts: Sequence[int], device: torch.device) -> Tensor:
    """Convert indices within each sequence to indices within the batch, on the device."""
    moved = [part.astype(np.int32) + start for part, start in zip(parts, starts, strict=False)]
    return to_device(np.concatenate(moved).astype(np.int32), device)
