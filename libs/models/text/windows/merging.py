"""Merge the results of a text's windows. Pure; the rules are those of docs/long-texts.md.

Places in a window's result count from the window's first character, those of a merged result from
the text's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import (
    Classification,
    Entity,
    Extraction,
    LabelScore,
    Relation,
    Structure,
    Value,
)

from libs.models.interface.work import CancelCheck, Span

_NO_WINDOW: Final = -1
_CHECK_EVERY: Final = 256
"""Results that are merged between two checks for cancellation."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class MergeRules:
    """Describe how a work's results are merged.

    Attributes:
        flat: Entities of different labels do not overlap either.
        exclusive: Labels share a probability of 1: their scores are averaged. Otherwise the
            highest counts.
        exclusive_questions: The same for the classifications of a schema, by name.
    """

    flat: bool = True
    exclusive: bool = False
    exclusive_questions: Mapping[str, bool] | None = None


@dataclass(frozen=True, slots=True)
class _Placed:
    """An entity of the text, and the window that it was found in.

    Attributes:
        at_edge: It begins or ends where the window does, within the text: the rest may be missing.
    """

    entity: Entity
    window: int
    at_edge: bool


def merged(
    text: str,
    spans: Sequence[Span],
    found: Sequence[Extraction],
    rules: MergeRules,
    check_cancelled: CancelCheck,
) -> Extraction:
    """Return the result of a text from those of its windows, in order."""
    if len(spans) == 1 and spans[0].start == 0:
        return found[0]
    windows = _Windows(text, spans)
    weights = [span.end - span.start for span in spans]
    check_cancelled()
    return Extraction(
        entities=_entities(windows, found, rules, check_cancelled),
        labels=_labels([one.labels for one in found], weights, exclusive=rules.exclusive),
        relations=_relations(windows, found, check_cancelled),
        classifications=_classifications(found, weights, rules),
        structures=_structures(windows, found, check_cancelled),
        truncated=any(one.truncated for one in found),
    )


def best_scores(scores: NDArray[np.float32], counts: Sequence[int]) -> NDArray[np.float32]:
    """Return each document's best score among its windows (MaxP, Dai and Callan 2019).

    Args:
        scores: [windows]
        counts: Windows of each document, at least one.
    """
    firsts = np.cumsum([0, *counts[:-1]])
    best: NDArray[np.float32] = np.maximum.reduceat(scores, firsts)
    return best


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows of a text."""

    text: str
    spans: Sequence[Span]

    def placed(self, entity: Entity, window: int) -> _Placed:
        shift, last = self.spans[window].start, len(self.spans) - 1
        start, end = entity.start + shift, entity.end + shift
        at_edge = (window > 0 and entity.start <= 0) or (
            window < last and end >= self.spans[window].end
        )
        return _Placed(replace(entity, start=start, end=end), window, at_edge)

    def overlapping(self, window: int) -> list[int]:
        """Return the other windows that have some of this one. Windows begin and end in order."""
        own = self.spans[window]
        first = bisect_right(self.spans, own.start, key=lambda span: span.end)
        end = bisect_left(self.spans, own.end, key=lambda span: span.start)
        return [number for number in range(first, end) if number != window]

    def is_repeated(self, one: _Placed) -> bool:
        """Return whether another window has some of the entity."""
        return (one.window > 0 and one.entity.start < self.spans[one.window - 1].end) or (
            one.window + 1 < len(self.spans) and one.entity.end > self.spans[one.window + 1].start
        )


def _entities(
    windows: _Windows, found: Sequence[Extraction], rules: MergeRules, check_cancelled: CancelCheck
) -> tuple[Entity, ...]:
    """Merge entities. Those that only one window can see are all kept.

    1. Entities that do not touch an edge precede those that do, since these may be cut.
    2. Among the former the best score is first, among the latter the longest.
    3. In this order, each is kept unless it overlaps one of another window that was kept and has
      the same label, or any label if entities are flat.
    """
    kept: list[_Placed] = []
    groups: dict[str, list[_Placed]] = {}
    for number, one in enumerate(found):
        for entity in _checked(one.entities, check_cancelled):
            placed = windows.placed(entity, number)
            if windows.is_repeated(placed):
                groups.setdefault("" if rules.flat else entity.label, []).append(placed)
            else:
                kept.append(placed)
    owners = np.full(len(windows.text), _NO_WINDOW, np.int32)
    for group in groups.values():
        chosen = list(_compatible(group, owners, check_cancelled))
        for placed in chosen:
            owners[placed.entity.start : placed.entity.end] = _NO_WINDOW
        kept += chosen
    ordered = sorted(kept, key=lambda one: (one.entity.start, one.window))
    return tuple(one.entity for one in ordered)


def _checked(results: Sequence[_Result], check_cancelled: CancelCheck) -> Iterator[_Result]:
    """Yield the results, and check for cancellation before each few hundred."""
    for number, one in enumerate(results):
        if number % _CHECK_EVERY == 0:
            check_cancelled()
        yield one


def _compatible(
    group: Iterable[_Placed], owners: NDArray[np.int32], check_cancelled: CancelCheck
) -> Iterator[_Placed]:
    """Yield the entities that overlap no earlier entity of another window, best first.

    Args:
        owners: The window of the entity at each character, `_NO_WINDOW` at first; changed here.
    """
    for one in _checked(sorted(group, key=_rank), check_cancelled):
        place = owners[one.entity.start : one.entity.end]
        if ((place != _NO_WINDOW) & (place != one.window)).any():
            continue
        place[:] = one.window
        yield one


def _rank(one: _Placed) -> tuple[bool, float, float]:
    length, score = one.entity.end - one.entity.start, one.entity.score
    return (True, -length, -score) if one.at_edge else (False, -score, -length)


def _labels(
    found: Sequence[Sequence[LabelScore]], weights: Sequence[int], *, exclusive: bool
) -> tuple[LabelScore, ...]:
    """Merge the scores of all labels, best first: their highest, or the mean of exclusive ones.

    Args:
        found: All labels in each window, in any order.
        weights: Of each window, for the mean.
    """
    scores: dict[str, float] = {}
    total = sum(weights)
    for labels, weight in zip(found, weights, strict=True):
        for one in labels:
            if exclusive:
                scores[one.label] = scores.get(one.label, 0.0) + one.score * (weight / total)
            else:
                scores[one.label] = max(scores.get(one.label, one.score), one.score)
    ranked = sorted(scores.items(), key=lambda item: -item[1])
    return tuple(LabelScore(label, score) for label, score in ranked)


def _classifications(
    found: Sequence[Extraction], weights: Sequence[int], rules: MergeRules
) -> tuple[Classification, ...]:
    exclusive = rules.exclusive_questions or {}
    return tuple(
        Classification(
            question.name,
            _labels(
                [one.classifications[number].labels for one in found],
                weights,
                exclusive=exclusive.get(question.name, False),
            ),
        )
        for number, question in enumerate(found[0].classifications)
    )


@dataclass(frozen=True, slots=True)
class _PlacedRelation:
    relation: Relation
    window: int
    at_edge: bool


_Key = tuple[int, int, int, int, str]
"""A relation's head span, tail span and label."""


def _relations(
    windows: _Windows, found: Sequence[Extraction], check_cancelled: CancelCheck
) -> tuple[Relation, ...]:
    """Merge relations, best first.

    1. Those of one head span, tail span and label are one, with the best score.
    2. One with an entity at an edge is dropped if another window has one of the same label without,
      and heads and tails overlap.
    """
    best: dict[_Key, _PlacedRelation] = {}
    for number, one in enumerate(found):
        for relation in _checked(one.relations, check_cancelled):
            head, tail = (
                windows.placed(entity, number) for entity in (relation.head, relation.tail)
            )
            placed = _PlacedRelation(
                replace(relation, head=head.entity, tail=tail.entity),
                number,
                head.at_edge or tail.at_edge,
            )
            before = best.setdefault(_key(placed.relation), placed)
            if before.relation.score < relation.score:
                best[_key(placed.relation)] = placed
    groups: dict[str, list[_PlacedRelation]] = {}
    for each in best.values():
        groups.setdefault(each.relation.label, []).append(each)
    kept: list[Relation] = []
    for group in groups.values():
        kept += _uncut(windows, group, check_cancelled)
    return tuple(sorted(kept, key=lambda one: -one.score))


def _key(relation: Relation) -> _Key:
    head, tail = relation.head, relation.tail
    return head.start, head.end, tail.start, tail.end, relation.label


def _uncut(
    windows: _Windows, group: Sequence[_PlacedRelation], check_cancelled: CancelCheck
) -> Iterator[Relation]:
    """Yield the relations of one label without cut copies of others.

    A relation is compared only with those of windows that overlap its window, so time grows with
    the text and not with its square.
    """
    rows: dict[int, list[tuple[int, ...]]] = {}
    for one in group:
        if not one.at_edge:
            rows.setdefault(one.window, []).append(_key(one.relation)[:4])
    whole = {window: np.array(own, dtype=np.int64) for window, own in rows.items()}
    for one in _checked(group, check_cancelled):
        if one.at_edge:
            near = (whole[number] for number in windows.overlapping(one.window) if number in whole)
            if any(_overlaps(one.relation, places) for places in near):
                continue
        yield one.relation


def _overlaps(relation: Relation, places: NDArray[np.int64]) -> bool:
    """Return whether head and tail overlap those of another relation.

    Args:
        places: Head and tail of the others: [relations, 4].
    """
    head, tail = relation.head, relation.tail
    found = (
        (places[:, 0] < head.end)
        & (places[:, 1] > head.start)
        & (places[:, 2] < tail.end)
        & (places[:, 3] > tail.start)
    )
    return bool(found.any())


_Located = tuple[str, int, int]
"""A value's field and place in the text."""


def _structures(
    windows: _Windows, found: Sequence[Extraction], check_cancelled: CancelCheck
) -> tuple[Structure, ...]:
    """Merge structures, in the order of the windows.

    1. Those of equal values at equal places are one: the first.
    2. One with a value at an edge is dropped if an overlapping window has one of the same name with
      a value at the same place, and without a value at an edge.
    """
    whole: dict[tuple[int, str], set[_Located]] = {}
    placed: list[tuple[int, bool, Structure]] = []
    for number, one in enumerate(found):
        for structure in _checked(one.structures, check_cancelled):
            moved, at_edge = _moved(structure, windows, number)
            placed.append((number, at_edge, moved))
            if not at_edge:
                whole.setdefault((number, moved.name), set()).update(_located(moved))
    kept: dict[tuple[object, ...], Structure] = {}
    for number, at_edge, structure in _checked(placed, check_cancelled):
        near = (whole.get((other, structure.name), set()) for other in windows.overlapping(number))
        if at_edge and any(not seen.isdisjoint(_located(structure)) for seen in near):
            continue
        values = [(name, value.text, value.start, value.end) for name, value in structure.values()]
        kept.setdefault((structure.name, *sorted(values, key=repr)), structure)
    return tuple(kept.values())


def _moved(structure: Structure, windows: _Windows, window: int) -> tuple[Structure, bool]:
    """Return a structure with places in the text, and whether a value touches the window's edge."""
    at_edge = False

    def move(value: Value) -> Value:
        nonlocal at_edge
        if value.start is None or value.end is None:
            return value
        entity = Entity(value.start, value.end, "", value.score, value.text)
        placed = windows.placed(entity, window)
        at_edge |= placed.at_edge
        return replace(value, start=placed.entity.start, end=placed.entity.end)

    fields = {
        name: tuple(map(move, found)) if isinstance(found, tuple) else found and move(found)
        for name, found in structure.fields.items()
    }
    return replace(structure, fields=fields), at_edge


def _located(structure: Structure) -> set[_Located]:
    return {
        (name, value.start, value.end)
        for name, value in structure.values()
        if value.start is not None and value.end is not None
    }
