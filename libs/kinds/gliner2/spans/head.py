"""Answers to schemas (GLiNER2): the number of instances of each task, the spans that fill their
fields, and the scores of classes.

The numbers of instances decide how many queries are compared with all spans, and only spans that
reach their field's threshold leave the device. The head waits for the device twice per batch: for
all numbers of instances, and for all selected spans (one more wait for each `_CHUNK_SCORES`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.kernels.layout import to_device
from libs.kinds.gliner2.card import Counting
from libs.kinds.gliner2.spans.counting import MAX_INSTANCES, InstanceQueries, layer
from libs.models.interface.head import Array
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output, SparseRow
from libs.models.text.heads.extraction.spans import SpanMarker, enumerate_spans, folded
from libs.models.text.heads.extraction.words import prefix_sums

Ids = NDArray[np.int32]
_CHUNK_ELEMENTS: Final = 1 << 24  # elements of the spans' hidden layer in memory at a time: 64 MiB
_MAX_SPANS: Final = 1024
"""Maximum spans selected for one field of one instance, among the words scored at a time."""
_CHUNK_SCORES: Final = 1 << 23
"""Scores in memory, 32 MiB, before those that reach their threshold are selected."""


@dataclass(frozen=True, slots=True)
class FieldQuery:
    """A field of a task."""

    threshold: float
    best: bool = False
    """Only the best span is selected."""
    choices: tuple[int, ...] | None = None
    """The choices of the sequence that can fill the field; None for spans."""


@dataclass(frozen=True, slots=True)
class SpanTask:
    """A task that finds instances of its fields."""

    fields: tuple[FieldQuery, ...]
    is_single: bool = False
    """The task has at most one instance, as entities do."""


class Query(NamedTuple):
    """The field of an instance that a row of scores belongs to."""

    task: int
    instance: int
    field: int


def build_queries(tasks: Sequence[SpanTask], counts: Array) -> list[Query]:
    """Return the queries of one sequence, in the order of the head's output.

    Args:
        counts: A logit for each number of instances, [tasks, 20].
    """
    steps = [
        _steps(task, int(count)) for task, count in zip(tasks, counts.argmax(axis=1), strict=True)
    ]
    return [
        Query(number, instance, field)
        for number, (task, most) in enumerate(zip(tasks, steps, strict=True))
        for instance in range(most)
        for field in range(len(task.fields))
    ]


def _steps(task: SpanTask, count: int) -> int:
    return min(count, 1) if task.is_single else count


@dataclass(frozen=True, slots=True)
class SchemaPlaces:
    """The head's input for a sequence (`Sequence.input`). Rows count from the sequence's first
    token."""

    tasks: tuple[SpanTask, ...]
    names: Ids
    """The token of each task with the state that predicts its number of instances."""
    fields: Ids
    """Tokens of the fields of all tasks."""
    classes: Ids
    """Tokens of the labels of classifications."""
    words: Ids
    """Tokens of the text's words."""
    choices: Ids
    """Tokens of the choices before the text."""


class StructureHead(nn.Module):
    """Map hidden states to each sequence's logits of counts [tasks, 20] and of classes [classes],
    and probabilities of spans.

    Spans are a sparse row over queries x (spans in `enumerate_spans`'s order, then choices).
    """

    reads_device: Literal[True] = True

    def __init__(
        self, state: Mapping[str, Tensor], counting: Counting, *, size: int, width: int, file: str
    ) -> None:
        """Build the head. Raises ModelBroken for a tensor's shape.

        Args:
            size: Size of hidden states.
            width: Words of the longest span.
        """
        super().__init__()
        self.classify = _two_layers(state, "classifier", size, 1, file)
        self.count = _two_layers(state, "count_pred", size, MAX_INSTANCES, file)
        self.queries = InstanceQueries(state, counting, size=size, file=file)
        self.marker = SpanMarker(state, "span_rep.span_rep_layer", size=size, mean=False, file=file)
        self.width = width

    @property
    def rows(self) -> Rows | None:
        return None

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        places = _places(sequences)
        parts = [
            [place.names, place.fields, place.classes, place.words, place.choices]
            for place in places
        ]
        starts = prefix_sums(batch.lengths[:-1])
        rows = [
            np.concatenate([start + part[kind] for start, part in zip(starts, parts, strict=True)])
            for kind in range(5)
        ]
        states = hidden.index_select(
            0, to_device(np.concatenate(rows).astype(np.int32), hidden.device)
        ).float()
        names, fields, classes, words, choices = torch.split(states, [len(part) for part in rows])
        counts = self.count(names)
        steps = [
            _steps(task, count)
            for task, count in zip(
                (task for place in places for task in place.tasks),
                counts.argmax(-1).tolist(),
                strict=True,
            )
        ]
        queries = self.queries.forward(
            fields, [len(task.fields) for place in places for task in place.tasks], steps
        )
        return (
            counts,
            self.classify(classes)[:, 0],
            *self._found(places, steps, queries, words, choices),
        )

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        places = _places(sequences)
        counts, classes, indices, values, sizes = arrays
        tasks = pairwise(prefix_sums([len(place.tasks) for place in places]))
        labels = pairwise(prefix_sums([len(place.classes) for place in places]))
        spans = pairwise(prefix_sums(sizes.tolist()))
        return [
            (
                counts[slice(*of_tasks)].astype(np.float32, copy=False),
                classes[slice(*of_labels)].astype(np.float32, copy=False),
                _sorted(indices[slice(*of_spans)], values[slice(*of_spans)]),
            )
            for of_tasks, of_labels, of_spans in zip(tasks, labels, spans, strict=True)
        ]

    def _found(
        self,
        places: Sequence[SchemaPlaces],
        steps: Sequence[int],
        queries: Tensor,
        words: Tensor,
        choices: Tensor,
    ) -> _Found:
        """Return the spans and choices of each sequence that reach their field's threshold."""
        keys, base = folded(self.marker.out.outer, queries)
        first, last = self.marker.halves(words, [len(words)])
        chosen_first, chosen_last = self.marker.halves(choices, [len(choices)])
        chosen = (chosen_first + chosen_last).relu_()
        plan = _Plan.build(places, steps, self.width, first.shape[1])
        order, owners, is_best = to_device(plan.rows, keys.device)
        keys, base = keys.index_select(0, order), base.index_select(0, order)
        floors = to_device(plan.floors, keys.device, np.float32)
        starts, ends = to_device(plan.spans, keys.device)
        columns = torch.arange(plan.most_columns, dtype=torch.int32, device=keys.device)
        picked = _Picked(keys.device)
        for parts in plan.parts:
            for part in parts:
                if part.of_choices:
                    hidden = chosen[part.at]
                else:
                    hidden = (
                        first.index_select(0, starts[part.at]) + last.index_select(0, ends[part.at])
                    ).relu_()
                scores = torch.addmm(base[part.rows], hidden, keys[part.rows].T).sigmoid().T
                floor = floors[part.rows, None]
                if part.has_best:
                    floor = torch.where(
                        is_best[part.rows, None] > 0,
                        scores.amax(1, keepdim=True).maximum(floor),
                        floor,
                    )
                own = columns[part.begin : part.begin + scores.shape[1]]
                if scores.shape[1] > _MAX_SPANS:
                    scores, ranked = scores.topk(_MAX_SPANS, dim=1)
                    own = own[ranked]
                picked.add(owners[part.rows, None] + own, scores, floor)
            picked.end_sequence()
        return picked.found()


class _Found(NamedTuple):
    """The selected spans and choices."""

    indices: Tensor
    """Flat indices, int32 [found]."""
    values: Tensor
    """Probabilities, float32 [found]."""
    sizes: Tensor
    """Number of spans and choices of each sequence, [sequences]."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Some queries of a sequence, and columns compared with them together."""

    rows: slice
    """Rows of the plan."""
    at: slice
    """Spans of the plan, or with `of_choices` choices of the batch."""
    begin: int
    """The first column."""
    of_choices: bool = False
    has_best: bool = False
    """A query selects only its best span."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The comparisons of a batch, computed on the host beforehand."""

    rows: Ids
    """[3, rows]: the query of each row, the index of its first column, and whether only its best
    span is selected."""
    floors: NDArray[np.float32]
    """Thresholds of the rows."""
    spans: Ids
    """[2, spans]: first and last words, counted from the batch's first."""
    most_columns: int
    parts: tuple[tuple[_Part, ...], ...]
    """The parts of each sequence."""

    @staticmethod
    def build(
        places: Sequence[SchemaPlaces], steps: Sequence[int], width: int, inner: int
    ) -> _Plan:
        """Plan the comparisons. `inner` is the size of a span's hidden layer, which decides the
        number of spans computed together.
        """
        rows: list[tuple[int, int, bool]] = []
        floors: list[float] = []
        spans = [np.zeros((2, 0), np.int32)]
        parts: list[tuple[_Part, ...]] = []
        task = query = word = choice = span = most_columns = 0
        for place in places:
            own = steps[task : task + len(place.tasks)]
            fields = [
                field
                for each, most in zip(place.tasks, own, strict=True)
                for field in each.fields * most
            ]
            sides = np.stack(enumerate_spans(len(place.words), width))
            count, columns = sides.shape[1], sides.shape[1] + len(place.choices)
            free, bound = (
                [
                    number
                    for number, field in enumerate(fields)
                    if (field.choices is None) is is_free
                ]
                for is_free in (True, False)
            )
            some: list[_Part] = []
            if free:
                of_free = slice(len(rows), len(rows) + len(free))
                has_best = any(fields[number].best for number in free)
                at_once = max(1, _CHUNK_ELEMENTS // max(inner, len(free)))
                for begin in range(0, count, at_once):
                    at = slice(span + begin, span + min(begin + at_once, count))
                    some.append(_Part(of_free, at, begin, has_best=has_best))
            if bound and place.choices.size:
                of_bound = slice(len(rows) + len(free), len(rows) + len(fields))
                some.append(
                    _Part(
                        of_bound, slice(choice, choice + len(place.choices)), count, of_choices=True
                    )
                )
            rows += [
                (query + number, number * columns, fields[number].best)
                for number in (*free, *bound)
            ]
            floors += [fields[number].threshold for number in (*free, *bound)]
            spans.append(sides + word)
            parts.append(tuple(some))
            most_columns = max(most_columns, columns)
            task, query, span = task + len(place.tasks), query + len(fields), span + count
            word, choice = word + len(place.words), choice + len(place.choices)
        return _Plan(
            rows=np.array(rows, dtype=np.int32).reshape(-1, 3).T,
            floors=np.array(floors, dtype=np.float32),
            spans=np.concatenate(spans, axis=1).astype(np.int32),
            most_columns=most_columns,
            parts=tuple(parts),
        )


class _Picked:
    """Collect scores and select those that reach their floor, with one wait for the device for
    several sequences.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._picked: list[_Found] = []
        self._start()

    def _start(self) -> None:
        self._indices = [torch.empty(0, dtype=torch.int32, device=self._device)]
        self._values = [torch.empty(0, device=self._device)]
        self._is_kept = [torch.empty(0, dtype=torch.bool, device=self._device)]
        self._held, self._ends = 0, [0]

    def add(self, indices: Tensor, scores: Tensor, floor: Tensor) -> None:
        """Add scores. `indices` and `scores` are [queries, columns], `floor` is [queries, 1]."""
        self._indices.append(indices.flatten())
        self._values.append(scores.flatten())
        self._is_kept.append((scores >= floor).flatten())
        self._held += scores.numel()

    def end_sequence(self) -> None:
        self._ends.append(self._held)
        if self._held > _CHUNK_SCORES:
            self._pick()

    def _pick(self) -> None:
        chosen = torch.cat(self._is_kept).nonzero()[:, 0]
        ends = torch.searchsorted(chosen, to_device(np.array(self._ends), self._device, np.int64))
        self._picked.append(
            _Found(
                torch.cat(self._indices)[chosen], torch.cat(self._values)[chosen], ends.diff().int()
            )
        )
        self._start()

    def found(self) -> _Found:
        """Return all selected spans and choices."""
        self._pick()
        return _Found(*(torch.cat(parts) for parts in zip(*self._picked, strict=True)))


def _two_layers(
    state: Mapping[str, Tensor], stem: str, size: int, outputs: int, file: str
) -> nn.Sequential:
    return nn.Sequential(
        layer(state, f"{stem}.0", (size * 2, size), file, relu=True),
        layer(state, f"{stem}.2", (outputs, size * 2), file),
    )


def _places(sequences: Sequence[InputSequence]) -> list[SchemaPlaces]:
    return [cast("SchemaPlaces", sequence.input) for sequence in sequences]


def _sorted(indices: Array, values: Array) -> SparseRow:
    order = np.argsort(indices, kind="stable")
    return SparseRow(
        indices[order].astype(np.int32, copy=False), values[order].astype(np.float32, copy=False)
    )
