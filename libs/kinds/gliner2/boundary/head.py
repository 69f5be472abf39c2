"""Answers to schemas (GLiNER2.5): scores of a text's spans for every query, and scores of classes,
relations and records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.kernels.layout import to_device
from libs.kinds.gliner2.boundary.encoder import BoundaryEncoder
from libs.kinds.gliner2.boundary.pairs import (
    BoundaryPairs,
    BoundaryPairScorer,
    Marginals,
    Queries,
    TextBoundaries,
)
from libs.kinds.gliner2.boundary.places import TextPlaces
from libs.kinds.gliner2.boundary.record_scorer import MAX_STEPS, RecordScorer, likely_shares, steps
from libs.kinds.gliner2.boundary.relations import RelationScorer
from libs.kinds.gliner2.card import Boundary
from libs.models.interface.head import Array
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output, SparseRow
from libs.models.text.heads.extraction.words import prefix_sums
from libs.models.text.heads.linear import HeadDot, linear_layer

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]

_STEM: Final = "boundary_head"
_RECORDS: Final = "record_decoder"
UNUSED: Final = (
    f"{_STEM}.boundary_proposer.",
    f"{_STEM}.pair_scorer.",
    f"{_STEM}.count_head.",
    *(
        f"{_RECORDS}.{name}"
        for name in (
            "object_head.",
            "latent_seed_head.",
            "instance_embed",
            "q_proj.",
            "k_proj.",
            "v_proj.",
        )
    ),
)
"""Tensors of checkpoints that supported settings do not use: separate pairs for each query, counts,
and records without a field that identifies them."""


@dataclass(frozen=True, slots=True)
class BoundaryPlaces:
    """The head's input for a sequence (`Sequence.input`). Rows count from the sequence's first
    token."""

    words: Ids
    """Tokens of all words; words of choices precede the text's."""
    queries: Ids
    """Tokens of the fields of structures, then of entities, then of each relation's head and
    tail."""
    records: tuple[tuple[bool, ...], ...]
    """Whether a field has a single value, for each structure and field."""
    relations: int
    """Number of relations."""
    threshold: float
    """Minimum probability of a span that identifies a record."""
    classes: Ids
    """Tokens of the labels of classifications."""
    choices: Ids
    """Numbers of words that are choices."""

    @property
    def fields(self) -> int:
        return sum(map(len, self.records))


class BoundaryHead(nn.Module):
    """Map hidden states to each sequence's logits of classes [classes] and, if it has queries:

    1. the logit that a query has no span [queries];
    2. sparse rows of probabilities: the spans and choices of each query; the pairs of spans of each
       relation; for each field of structures, the spans that fill it, paired with the spans that
       identify records. `TextPlaces` defines their columns.
    """

    def __init__(
        self, state: Mapping[str, Tensor], settings: Boundary, *, size: int, file: str
    ) -> None:
        """Build the head from a checkpoint's tensors.

        Raises ModelBroken for a tensor that is missing or has another shape.

        Args:
            size: Size of hidden states.
        """
        super().__init__()
        stem = _STEM
        # A model trained without dropout has no module for it.
        last = 2 if "classifier.2.weight" in state else 3
        self.classify = nn.Sequential(
            linear_layer(state, "classifier.0", (size * 2, size), file, "relu"),
            HeadDot(state, f"classifier.{last}", size * 2, file),
        )
        self.encoder = BoundaryEncoder(
            state, f"{stem}.boundary_encoder", settings, size=size, file=file
        )
        self.marginals = Marginals(
            state, f"{stem}.boundary_query_head", settings, size=size, file=file
        )
        self.pairs = BoundaryPairScorer(state, stem, settings, size=size, file=file)
        self.nothing = HeadDot(state, f"{stem}.null_projection", size, file)
        self.relations = RelationScorer(
            state, "relation_scorer", settings.relations, size=size, file=file
        )
        sizes = {"boundary": settings.size, "size": size, "inner": settings.record_size}
        self.records = RecordScorer(
            state, _RECORDS, f"{stem}.candidate_encoder", **sizes, file=file
        )

    @property
    def rows(self) -> Rows | None:
        return None

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        places = _places(sequences)
        words, queries, classes = self._states(hidden, batch, places)
        kinds = torch.split(self.classify(classes), [len(place.classes) for place in places])
        asked = [place for place in places if len(place.queries)]
        found = iter(self._found(words, queries, asked) if asked else ())
        parts: list[Tensor] = []
        for place, own in zip(places, kinds, strict=True):
            parts += [own, *(next(found) if len(place.queries) else ())]
        return (torch.cat([part.flatten().float() for part in parts]),)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        places = _places(sequences)
        shapes = [self._shapes(place) for place in places]
        ends = np.cumsum([int(np.prod(shape)) for own in shapes for shape in own])
        parts = iter(np.split(arrays[0].astype(np.float32, copy=False), ends[:-1]))
        found = [[next(parts).reshape(shape) for shape in own] for own in shapes]
        return [_output(place, *own) for place, own in zip(places, found, strict=True)]

    def _states(
        self, hidden: Tensor, batch: Packed, places: Sequence[BoundaryPlaces]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states of words and queries, of sequences that have queries, and of
        classes."""
        placed = list(zip(prefix_sums(batch.lengths[:-1]), places, strict=True))
        kinds = [
            [start + place.words for start, place in placed if len(place.queries)],
            [start + place.queries for start, place in placed],
            [start + place.classes for start, place in placed],
        ]
        rows = np.concatenate([row for kind in kinds for row in kind]).astype(np.int32)
        states = hidden.index_select(0, to_device(rows, hidden.device)).float()
        words, queries, classes = torch.split(states, [sum(map(len, kind)) for kind in kinds])
        return words, queries, classes

    def _found(
        self, words: Tensor, queries: Tensor, places: Sequence[BoundaryPlaces]
    ) -> Iterator[tuple[Tensor, ...]]:
        """Return the output of each sequence with queries, after its classes."""
        counts, asked = (
            [len(place.words) for place in places],
            [len(place.queries) for place in places],
        )
        boundaries = self.encoder.forward(words, counts)
        marginals, pairs = self.marginals, self.pairs
        of_words = (words, pairs.values.forward(words), marginals.inside.forward(words))
        layers = (
            marginals.starts,
            marginals.ends,
            pairs.first,
            pairs.last,
            pairs.left,
            pairs.right,
        )
        of_boundaries = (*(layer.forward(boundaries) for layer in layers), boundaries)
        named = marginals.queries(queries)
        of_queries = (
            named.states,
            named.starts,
            named.ends,
            named.inside,
            self.nothing.forward(queries),
        )
        texts = zip(*(torch.split(part, counts) for part in of_words), strict=True)
        edges = zip(
            *(torch.split(part, [count + 1 for count in counts]) for part in of_boundaries),
            strict=True,
        )
        wanted = zip(*(torch.split(part, asked) for part in of_queries), strict=True)
        for place, text, (*ends, own), (*query, nothing) in zip(
            places, texts, edges, wanted, strict=True
        ):
            yield self._text_logits(
                place, TextBoundaries(*text, *ends), own, Queries(*query), nothing
            )

    def _text_logits(
        self,
        place: BoundaryPlaces,
        text: TextBoundaries,
        boundaries: Tensor,
        queries: Queries,
        nothing: Tensor,
    ) -> tuple[Tensor, ...]:
        scale = boundaries.shape[1] ** -0.5
        starts, ends = queries.starts @ text.starts.T * scale, queries.ends @ text.ends.T * scale
        spans = self.pairs.choose(text, starts, ends)
        choices = to_device(place.choices, boundaries.device).long()
        scored = BoundaryPairs(
            torch.cat([spans.starts, choices]), torch.cat([spans.ends, choices + 1]),
            torch.cat([spans.valid, torch.ones_like(choices, dtype=torch.bool)]),
        )  # fmt: skip
        logits = self.pairs.forward(text, scored, queries, starts, ends)
        places = torch.stack([spans.starts, spans.ends], dim=-1).masked_fill(
            ~spans.valid[:, None], -1
        )
        found = [places, logits.sigmoid(), nothing]
        if place.relations:
            roles = queries.states[-2 * place.relations :].view(place.relations, 2, -1)
            scores = found[1][-2 * place.relations :, : len(spans.starts)].reshape(
                place.relations, 2, -1
            )
            at_once = self.relations.relations_per_pass(len(spans.starts))
            few = zip(torch.split(roles, at_once), torch.split(scores, at_once), strict=True)
            found += [
                self.relations.forward(text.words, states, spans, some) for states, some in few
            ]
        if place.fields:
            found.append(self.records.forward(boundaries, spans, queries.states[: place.fields]))
        return tuple(found)

    def _shapes(self, place: BoundaryPlaces) -> list[tuple[int, ...]]:
        """Return the shapes of the parts of a sequence's output."""
        shapes: list[tuple[int, ...]] = [(len(place.classes),)]
        queries = len(place.queries)
        if not queries:
            return shapes
        spans = self.pairs.count(len(place.words))
        shapes += [(spans, 2), (queries, spans + len(place.choices)), (queries,)]
        shapes.append((place.relations, self.relations.count(spans), 3))
        shapes.append((spans + place.fields if place.fields else 0, spans + 1))
        return shapes


def _output(place: BoundaryPlaces, classes: Floats, *parts: Floats) -> Output:
    if not parts:
        return (classes,)
    spans, likely, nothing, edges, shares = parts
    places = TextPlaces(len(place.words))
    valid = spans[:, 0] >= 0
    keys = np.where(valid, places.span_columns(spans.astype(np.int64)), places.spans)
    order = np.argsort(keys, kind="stable")[: int(valid.sum())]
    own = keys[order]
    columns = np.concatenate([own, places.choice_columns(len(place.choices))])
    scores = likely[:, np.concatenate([order, np.arange(len(place.choices)) + len(keys)])]
    queries = tuple(SparseRow(columns, row) for row in scores)
    relations = tuple(_edges(places, keys, some) for some in edges)
    records, first, work = [], 0, 0
    for fields in place.records:
        rows = slice(first, first + len(fields))
        first += len(fields)
        anchors = np.flatnonzero(scores[rows.start, : len(own)] >= np.float32(place.threshold))
        work += steps(len(anchors), len(fields))
        if work > MAX_STEPS:  # the processor refuses such a request; a head cannot
            anchors = anchors[:0]
        for found in likely_shares(
            shares[order[anchors]], shares[len(keys) :][rows], order, fields
        ):
            anchor, span = np.nonzero(found)
            records.append(
                SparseRow(places.pair_columns(own[anchors[anchor]], own[span]), found[anchor, span])
            )
    return classes, nothing, (*queries, *relations, *records)


def _edges(places: TextPlaces, keys: NDArray[np.int64], found: Floats) -> SparseRow:
    """Build the sparse row of a text's relations. `RelationScorer` returns `found` [pairs, 3]."""
    kept = found[found[:, 0] >= 0]
    heads, tails = (keys[kept[:, side].astype(np.int64)] for side in (0, 1))
    columns = places.pair_columns(heads, tails)
    order = np.argsort(columns)
    return SparseRow(columns[order], kept[order, 2])


def _places(sequences: Sequence[InputSequence]) -> list[BoundaryPlaces]:
    return [cast("BoundaryPlaces", sequence.input) for sequence in sequences]
