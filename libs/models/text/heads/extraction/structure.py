"""Answers to schemas (GLiNER2): how many instances each task has, the spans that fill their fields, and the scores of classes.

How many instances there are decides how many queries are compared with all spans, and only spans that reach their field's threshold
leave the device: the head waits for the device twice, which it need not elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.catalog.kinds.extraction.gliner2 import Counting
from libs.kernels.layout import to_device
from libs.models.head import Array
from libs.models.packed import Packed, Rows
from libs.models.text.heads.extraction.counting import MOST_INSTANCES, InstanceQueries, layer
from libs.models.text.heads.extraction.spans import SpanMarker, folded, spans_of
from libs.models.text.heads.extraction.words import prefix_sums
from libs.models.work import InputSequence, Output, SparseRow

Ids = NDArray[np.int32]
_AT_ONCE: Final = 1 << 24  # elements of the spans' hidden layer held at a time: 64 MiB
_MOST_SPANS: Final = 1024
"""The best spans kept for one field of one instance, among so many words as are scored at a time."""


@dataclass(frozen=True, slots=True)
class FieldQuery:
    """A field: `best`: only its best span is wanted. `choices`: it is filled by these of the sequence's choices, not by spans."""

    threshold: float
    best: bool = False
    choices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class SpanTask:
    """A task that finds instances of its fields. `once`: one instance at most, as of entities."""

    fields: tuple[FieldQuery, ...]
    once: bool = False


class Query(NamedTuple):
    """A field of an instance: what a row of scores is for."""

    task: int
    instance: int
    field: int


def queries_of(tasks: Sequence[SpanTask], counts: Array) -> list[Query]:
    """Those of one sequence, in the order of the head's output. `counts` [tasks, 20]: a logit for each number of instances."""
    steps = [_steps(task, int(count)) for task, count in zip(tasks, counts.argmax(axis=1), strict=True)]
    return [
        Query(number, instance, field)
        for number, (task, most) in enumerate(zip(tasks, steps, strict=True))
        for instance in range(most)
        for field in range(len(task.fields))
    ]


def _steps(task: SpanTask, count: int) -> int:
    return min(count, 1) if task.once else count


@dataclass(frozen=True, slots=True)
class SchemaPlaces:
    """The head's input for a sequence (`Sequence.input`). Rows count from the sequence's first token.

    `names`: the token whose state says how many instances each of `tasks` has. `fields`: those of the fields of all tasks.
    `classes`: those of the labels of classifications. `words`: those of the text's words, `choices` of the choices before it.
    """

    tasks: tuple[SpanTask, ...]
    names: Ids
    fields: Ids
    classes: Ids
    words: Ids
    choices: Ids


class StructureHead(nn.Module):
    """Hidden states -> for each sequence (logits of counts [tasks, 20], of classes [classes], probabilities of spans).

    Spans are a sparse row over queries x (spans in `spans_of`'s order, then choices).
    """

    reads_device: Literal[True] = True

    def __init__(self, state: Mapping[str, Tensor], counting: Counting, *, size: int, width: int, file: str) -> None:
        """`size`: of hidden states. `width`: words of the longest span. Raises ModelBroken for a tensor's shape."""
        super().__init__()
        self.classify = _two_layers(state, "classifier", size, 1, file)
        self.count = _two_layers(state, "count_pred", size, MOST_INSTANCES, file)
        self.queries = InstanceQueries(state, counting, size=size, file=file)
        self.marker = SpanMarker(state, "span_rep.span_rep_layer", size=size, mean=False, file=file)
        self.width = width

    @property
    def rows(self) -> Rows | None:
        return None

    def forward(self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]) -> tuple[Tensor, ...]:
        places = _places(sequences)
        parts = [[place.names, place.fields, place.classes, place.words, place.choices] for place in places]
        starts = prefix_sums(batch.lengths[:-1])
        rows = [np.concatenate([start + part[kind] for start, part in zip(starts, parts, strict=True)]) for kind in range(5)]
        states = hidden.index_select(0, to_device(np.concatenate(rows).astype(np.int32), hidden.device)).float()
        names, fields, classes, words, choices = torch.split(states, [len(part) for part in rows])
        counts = self.count(names)
        steps = [
            _steps(task, count)
            for task, count in zip((task for place in places for task in place.tasks), counts.argmax(-1).tolist(), strict=True)
        ]
        queries = self.queries.forward(fields, [len(task.fields) for place in places for task in place.tasks], steps)
        found = list(self._found(places, steps, queries, words, choices))
        sizes = to_device(np.array([len(one.values) for one in found], dtype=np.int32), hidden.device)
        indices, values = torch.cat([one.indices for one in found]), torch.cat([one.values for one in found])
        return counts, self.classify(classes)[:, 0], indices, values, sizes

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
        self, places: Sequence[SchemaPlaces], steps: Sequence[int], queries: Tensor, words: Tensor, choices: Tensor
    ) -> Iterator[_Found]:
        """The spans and choices of each sequence that reach their field's threshold."""
        keys, base = folded(self.marker.out.outer, queries)
        first, last = self.marker.halves(words, [len(words)])
        chosen_first, chosen_last = self.marker.halves(choices, [len(choices)])
        chosen = (chosen_first + chosen_last).relu_()
        task = query = word = choice = 0
        for place in places:
            own = steps[task : task + len(place.tasks)]
            fields = [field for each, most in zip(place.tasks, own, strict=True) for field in each.fields * most]
            rows = slice(query, query + len(fields))
            of_words, of_choices = slice(word, word + len(place.words)), slice(choice, choice + len(place.choices))
            yield self._of_sequence(fields, keys[rows], base[rows], first[of_words], last[of_words], chosen[of_choices])
            task, query = task + len(place.tasks), query + len(fields)
            word, choice = word + len(place.words), choice + len(place.choices)

    def _of_sequence(
        self, fields: Sequence[FieldQuery], keys: Tensor, base: Tensor, first: Tensor, last: Tensor, chosen: Tensor
    ) -> _Found:
        """`keys`, `base`: of the fields. `first`, `last`: the halves of spans of words. `chosen`: the hidden layer of choices."""
        starts, ends = spans_of(len(first), self.width)
        columns = len(starts) + len(chosen)
        free = [number for number, field in enumerate(fields) if field.choices is None]
        bound = [number for number, field in enumerate(fields) if field.choices is not None]
        found = [_Found(torch.zeros(0, dtype=torch.int32, device=keys.device), base.new_empty(0))]
        if free:
            own_keys, own_base, floor = _rows(free, fields, keys, base)
            best = torch.tensor([[fields[number].best] for number in free], device=keys.device)
            owners = to_device(np.array(free, dtype=np.int32), keys.device) * columns
            at_once = max(1, _AT_ONCE // max(first.shape[1], len(free)))
            for begin in range(0, len(starts), at_once):
                begins, lasts = (to_device(side[begin : begin + at_once], keys.device) for side in (starts, ends))
                hidden = (first.index_select(0, begins) + last.index_select(0, lasts)).relu_()
                scores = torch.addmm(own_base, hidden, own_keys.T).sigmoid().T
                found.append(_kept(scores, torch.where(best, scores.amax(1, keepdim=True).maximum(floor), floor), owners, begin))
        if bound and len(chosen):
            own_keys, own_base, floor = _rows(bound, fields, keys, base)
            owners = to_device(np.array(bound, dtype=np.int32), keys.device) * columns
            scores = torch.addmm(own_base, chosen, own_keys.T).sigmoid().T
            found.append(_kept(scores, floor, owners, len(starts)))
        return _Found(torch.cat([one.indices for one in found]), torch.cat([one.values for one in found]))


class _Found(NamedTuple):
    """Flat indices int32 and probabilities float32, [found] each."""

    indices: Tensor
    values: Tensor


def _two_layers(state: Mapping[str, Tensor], stem: str, size: int, outputs: int, file: str) -> nn.Sequential:
    return nn.Sequential(
        layer(state, f"{stem}.0", (size * 2, size), file, relu=True), layer(state, f"{stem}.2", (outputs, size * 2), file)
    )


def _places(sequences: Sequence[InputSequence]) -> list[SchemaPlaces]:
    return [cast("SchemaPlaces", sequence.input) for sequence in sequences]


def _rows(numbers: Sequence[int], fields: Sequence[FieldQuery], keys: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and bases of these queries, and their thresholds [queries, 1]."""
    chosen = to_device(np.array(numbers, dtype=np.int32), keys.device)
    floor = torch.tensor([[fields[number].threshold] for number in numbers], dtype=torch.float32, device=keys.device)
    return keys.index_select(0, chosen), base.index_select(0, chosen), floor


def _kept(scores: Tensor, floor: Tensor, owners: Tensor, begin: int) -> _Found:
    """The scores [queries, columns] that reach the floor [queries, 1]; at most the best `_MOST_SPANS` of a query."""
    if scores.shape[1] > _MOST_SPANS:
        best, places = scores.topk(_MOST_SPANS, dim=1)
        rows, ranks = (best >= floor).nonzero(as_tuple=True)
        columns = places[rows, ranks]
        return _Found(owners[rows] + (columns + begin).int(), best[rows, ranks])
    rows, columns = (scores >= floor).nonzero(as_tuple=True)
    return _Found(owners[rows] + (columns + begin).int(), scores[rows, columns])


def _sorted(indices: Array, values: Array) -> SparseRow:
    order = np.argsort(indices, kind="stable")
    return SparseRow(indices[order].astype(np.int32, copy=False), values[order].astype(np.float32, copy=False))
