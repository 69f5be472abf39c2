"""The values of a record's fields, spans of the text or choices, as the gliner2 package returns
them for GLiNER2.5.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Structure, Value
from shoal.schema import SchemaField, SchemaStructure

from libs.kinds.gliner2.boundary.records import RecordBound, Scores, StructureRecord, find_records
from libs.kinds.gliner2.boundary.spans import ScoredSpan, disjoint, sent
from libs.kinds.gliner2.spans.processor import build_structures

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Frame:
    """One text as the model read it, and its words' offsets."""

    text: str
    read: str
    """The text with its full stop."""
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]
    before: int
    """Number of words of choices before the text."""

    def characters(self, first: int, last: int) -> ScoredSpan | None:
        """Return the code points of words `first:last`, choices counted; None unless all are in the
        text."""
        if first < self.before:
            return None
        return ScoredSpan(
            int(self.starts[first - self.before]), int(self.ends[last - 1 - self.before]), 0.0
        )


@dataclass(frozen=True, slots=True)
class FieldChoices:
    """The choices of a field."""

    words: Sequence[int]
    """The choices' words among those before the text."""
    scores: Array
    """The choices' scores as spans of one word."""


class StructureReader:
    """The records of one structure in one text. `choices` holds those of fields that have any."""

    def __init__(
        self,
        asked: SchemaStructure,
        scores: Scores,
        frame: Frame,
        choices: Mapping[int, FieldChoices],
        threshold: float,
        bound: RecordBound,
    ) -> None:
        """Raise InvalidInput for more records than `bound` allows."""
        self._asked, self._scores, self._frame, self._choices = asked, scores, frame, choices
        self._threshold, self._bound = threshold, bound
        self._records = find_records(asked, scores, threshold, bound)
        self._anchors = [
            frame.characters(*scores.places[record.anchor].tolist()) for record in self._records
        ]
        self._mentions = (
            {number: self._shared(asked.fields[number]) for number in choices}
            if self._records
            else {}
        )

    def structures(self) -> list[Structure]:
        """Return the records that have a value. Raises InvalidInput for a longer answer than
        `bound` allows."""
        made: list[Structure] = []
        for row, record in enumerate(self._records):
            values = [
                self._values(number, row, record) for number in range(len(self._asked.fields))
            ]
            self._bound.claim(sum(len(value.text) for own in values for value in own))
            made += build_structures(self._asked.name, self._asked.fields, values)
        return made

    def _values(self, number: int, row: int, record: StructureRecord) -> list[Value]:
        field = self._asked.fields[number]
        names = self._spans(number, row, record)
        kept = disjoint(names)
        if field.dtype == "str":
            kept = kept[:1]
        if number in self._choices:
            return self._chosen(number, row, [(names[span], span.score) for span in kept])
        found = [one for span in kept if (one := sent(span, self._frame.text)) is not None]
        return [
            Value(self._frame.text[span.start : span.end], span.score, span.start, span.end)
            for span in found
        ]

    def _spans(self, number: int, row: int, record: StructureRecord) -> dict[ScoredSpan, str]:
        """Return the spans that fill a field, each with its words. A choice before the text has the
        position of its record.
        """
        field, frame = self._asked.fields[number], self._frame
        found: dict[ScoredSpan, str] = {}
        for span, share in record.fields[number]:
            alone = float(self._scores.fields[number, span])
            score = min(alone, share)
            if field.threshold is not None and score < field.threshold:
                continue
            first, last = self._scores.places[span].tolist()
            where = frame.characters(first, last)
            if number in self._choices and last <= frame.before:
                name = dict(zip(self._choices[number].words, field.choices, strict=True)).get(first)
                where = self._anchors[row] or ScoredSpan(0, 0, 0.0)
            else:
                name = None if where is None else frame.read[where.start : where.end]
                if field.dtype == "list" and alone < self._threshold:
                    continue
            if name and where is not None:
                found.setdefault(ScoredSpan(where.start, where.end, score), name)
        return found

    def _chosen(self, number: int, row: int, found: Sequence[tuple[str, float]]) -> list[Value]:
        """Return the field's choices, from the first source that has any.

        1. FieldChoices in the text near the record.
        2. FieldChoices among the record's spans.
        3. The likely choices.
        """
        field, scores = self._asked.fields[number], self._choices[number].scores
        mentioned = self._mentions[number]
        if self._anchors[row] is not None and mentioned is not None:
            return [
                Value(choice, float(scores[field.choices.index(choice)]))
                for choice in mentioned.get(row, ())
            ]
        names = {choice.casefold(): choice for choice in field.choices}
        if own := [
            Value(names[name.casefold()], score)
            for name, score in found
            if name.casefold() in names
        ]:
            return own
        floor = self._threshold if field.threshold is None else field.threshold
        values = [
            Value(choice, float(score)) for choice, score in zip(field.choices, scores, strict=True)
        ]
        if field.dtype == "str":
            values = [max(values, key=lambda one: one.score)]
        return [one for one in values if one.score >= floor]

    def _shared(self, field: SchemaField) -> Mapping[int, Sequence[str]] | None:
        """Return the choices in the text, for each record; None if the text contains none.

        A choice belongs to the last record that begins before it, or to the first record. A single
        value keeps the choice nearest to the record's span.
        """
        mentions = self._found(field.choices)
        if not mentions:
            return None
        order = sorted(
            (anchor.start, row) for row, anchor in enumerate(self._anchors) if anchor is not None
        )
        owned: dict[int, dict[str, tuple[int, int]]] = {}
        for start, choice, end in mentions:
            if order:
                owner = order[max(0, bisect_right(order, (start, len(self._anchors))) - 1)][1]
                owned.setdefault(owner, {}).setdefault(choice, (start, end))
        if field.dtype == "list":
            return {row: list(names) for row, names in owned.items()}
        return {
            row: [min(names, key=lambda name: self._distance(row, names[name]))]
            for row, names in owned.items()
        }

    def _found(self, choices: Sequence[str]) -> list[tuple[int, str, int]]:
        """Find choices in the text as words, ignoring case, in the order of the text."""
        frame = self._frame
        begin, end = (int(frame.starts[0]), int(frame.ends[-1])) if len(frame.starts) else (0, 0)
        found = []
        for choice in choices:
            pattern = re.compile(rf"(?<!\w){re.escape(choice)}(?!\w)", re.IGNORECASE)
            found += [
                (match.start(), choice, match.end())
                for match in pattern.finditer(frame.read, begin, end)
            ]
        return sorted(found, key=lambda one: one[0])

    def _distance(self, row: int, place: tuple[int, int]) -> int:
        anchor = self._anchors[row]
        return 0 if anchor is None else max(anchor.start - place[1], place[0] - anchor.end, 0)
