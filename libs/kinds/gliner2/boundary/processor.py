"""Answers of GLiNER2.5 to a schema, or to entity labels alone, as by the gliner2 package's
`extract`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Entity, Extraction, Relation, Structure
from shoal.schema import Schema

from libs.catalog.card import Card
from libs.errors import InvalidInput
from libs.kinds.gliner2.boundary.edges import RelationEdge, distinct
from libs.kinds.gliner2.boundary.fields import FieldChoices, Frame, StructureReader
from libs.kinds.gliner2.boundary.head import BoundaryPlaces
from libs.kinds.gliner2.boundary.places import TextPlaces
from libs.kinds.gliner2.boundary.records import RecordBound, Scores
from libs.kinds.gliner2.boundary.spans import ScoredSpan, disjoint, sent
from libs.kinds.gliner2.card import Boundary
from libs.kinds.gliner2.processor import SchemaNotes, SchemaProcessor, ended
from libs.kinds.gliner2.schemas import BEFORE_TEXT, THRESHOLD, SchemaPrompt
from libs.kinds.gliner2.spans.processor import classifications
from libs.models.interface.sequences import Output, SparseRow
from libs.models.text.processing.answers import sigmoid
from libs.models.text.processing.extraction.words import WordFrame, Words, WordSequence

Array = NDArray[np.float32]
Numbers = NDArray[np.int64]
Row = tuple[Array, Array, tuple[SparseRow, ...]]
"""The output of a sequence with queries. A sequence without queries has only the first part."""


class BoundaryProcessor(SchemaProcessor):
    """The processor of one model."""

    def __init__(self, card: Card, frame: WordFrame, settings: Boundary) -> None:
        super().__init__(card, frame)
        self._settings = settings

    def places(
        self, schema: Schema, prompt: SchemaPrompt, sequence: WordSequence
    ) -> BoundaryPlaces:
        return _places(schema, prompt, sequence)

    def read_output(
        self, text: str, words: Words, notes: SchemaNotes, output: Output, path: str
    ) -> Extraction:
        return _Answers(
            text, words, notes, cast("tuple[Output, ...]", output), self._settings, path
        ).extraction()


def _places(schema: Schema, prompt: SchemaPrompt, sequence: WordSequence) -> BoundaryPlaces:
    begin = _begin(prompt)
    before, queries, classes = (
        sequence.prompt[begin:],
        sequence.prompt[prompt.fields],
        sequence.prompt[prompt.classes],
    )
    if (before < 0).any():
        raise InvalidInput(
            "a choice of the schema has no token in the model's tokenizer",
            field="structure.structures",
        )
    words = np.concatenate([before, sequence.pieces])
    choices = np.array(prompt.choices, dtype=np.int32) - np.int32(begin)
    threshold = THRESHOLD if schema.threshold is None else schema.threshold
    if not len(words):  # no text to search
        return BoundaryPlaces(words, queries[:0], (), 0, threshold, classes, choices)
    records = tuple(
        tuple(field.dtype == "str" for field in structure.fields) for structure in schema.structures
    )
    return BoundaryPlaces(
        words, queries, records, len(schema.relations), threshold, classes, choices
    )


def _begin(prompt: SchemaPrompt) -> int:
    """Return the index of the first word of choices among the prompt's words."""
    return prompt.words.index(BEFORE_TEXT) + 1


class _Answers:
    """One text's answers, from the head's output for the text."""

    def __init__(
        self,
        text: str,
        words: Words,
        notes: SchemaNotes,
        row: Sequence[Output],
        settings: Boundary,
        path: str,
    ) -> None:
        prompt, schema = notes.prompt, notes.schema
        before = len(prompt.words) - _begin(prompt)
        self._frame = Frame(text, ended(text), words.starts, words.ends, before)
        self._schema, self._prompt, self._settings, self._row = schema, prompt, settings, row
        self._threshold = THRESHOLD if schema.threshold is None else schema.threshold
        self._fields = sum(len(structure.fields) for structure in schema.structures)
        self._bound = RecordBound(text, path)
        self._columns = TextPlaces(before + len(words))

    def extraction(self) -> Extraction:
        logits = cast("Array", self._row[0]) / np.float32(self._settings.class_temperature)
        found = Extraction(classifications=tuple(classifications(self._schema, logits)))
        if len(self._row) == 1:
            return found
        _, nothing, rows = cast("Row", self._row)
        queries, rest = rows[: len(nothing)], rows[len(nothing) :]
        edges, records = rest[: len(self._schema.relations)], rest[len(self._schema.relations) :]
        columns = queries[0].indices.astype(np.int64)
        keys = columns[columns < self._columns.spans]
        spans, likely = self._columns.span(keys), np.stack([row.values for row in queries])
        return Extraction(
            entities=tuple(
                sorted(
                    self._entities(spans, likely, sigmoid(nothing)),
                    key=lambda one: (one.start, one.end),
                )
            ),
            relations=tuple(
                sorted(self._relations(spans, likely, keys, edges), key=lambda one: -one.score)
            ),
            classifications=found.classifications,
            structures=tuple(self._structures(spans, likely, keys, records)),
        )

    def _entities(self, spans: Numbers, likely: Array, absent: Array) -> Iterator[Entity]:
        for number, label in enumerate(self._schema.entities, start=self._fields):
            if float(absent[number]) > self._settings.abstention:
                continue
            own, threshold = (
                likely[number, : len(spans)],
                self._threshold if label.threshold is None else label.threshold,
            )
            kept = np.flatnonzero(own >= np.float32(threshold))
            for span in disjoint(
                ScoredSpan(int(spans[one, 0]), int(spans[one, 1]), float(own[one])) for one in kept
            ):
                if (where := self._frame.characters(span.start, span.end)) is not None:
                    yield from self._entity(
                        label.label, ScoredSpan(where.start, where.end, span.score)
                    )

    def _entity(self, label: str, span: ScoredSpan) -> Iterator[Entity]:
        if (one := sent(span, self._frame.text)) is not None:
            self._bound.claim(one.end - one.start)
            yield Entity(
                one.start, one.end, label, one.score, self._frame.text[one.start : one.end]
            )

    def _relations(
        self, spans: Numbers, likely: Array, keys: Numbers, edges: Sequence[SparseRow]
    ) -> Iterator[Relation]:
        first = len(likely) - 2 * len(self._schema.relations)
        for number, (asked, row) in enumerate(zip(self._schema.relations, edges, strict=True)):
            threshold = self._threshold if asked.threshold is None else asked.threshold
            kept = np.flatnonzero(row.values.astype(np.float64) >= threshold)
            sides = [
                np.searchsorted(keys, side)
                for side in self._columns.pair(row.indices[kept].astype(np.int64))
            ]
            found = []
            for head, tail, score in zip(*sides, row.values[kept], strict=True):
                ends = [
                    self._end(spans, likely[first + 2 * number + role], one)
                    for role, one in enumerate((head, tail))
                ]
                if ends[0] is not None and ends[1] is not None:
                    found.append(RelationEdge(ends[0], ends[1], float(score)))
            for edge in distinct(found, self._frame.read):
                for head_entity in self._entity("", edge.head):
                    for tail_entity in self._entity("", edge.tail):
                        yield Relation(head_entity, tail_entity, asked.label, edge.score)

    def _end(self, spans: Numbers, likely: Array, number: int) -> ScoredSpan | None:
        where = self._frame.characters(int(spans[number, 0]), int(spans[number, 1]))
        return None if where is None else ScoredSpan(where.start, where.end, float(likely[number]))

    def _structures(
        self, spans: Numbers, likely: Array, keys: Numbers, records: Sequence[SparseRow]
    ) -> Iterator[Structure]:
        first, begin = 0, _begin(self._prompt)
        for asked, task in zip(self._schema.structures, self._prompt.tasks, strict=False):
            rows = slice(first, first + len(asked.fields))
            first += len(asked.fields)
            own = likely[rows]
            choices = {
                number: FieldChoices(
                    [self._prompt.choices[one] - begin for one in found],
                    own[number, len(spans) + np.array(found)],
                )
                for number, query in enumerate(task.fields)
                if (found := query.choices) is not None
            }
            scores = self._scores(spans, own[:, : len(spans)], keys, records[rows])
            yield from StructureReader(
                asked, scores, self._frame, choices, self._threshold, self._bound
            ).structures()

    def _scores(
        self, spans: Numbers, own: Array, keys: Numbers, rows: Sequence[SparseRow]
    ) -> Scores:
        """Return the scores of one structure."""
        anchors = np.flatnonzero(own[0] >= np.float32(self._threshold))
        shares = np.zeros((len(own), len(anchors), len(spans)), dtype=np.float32)
        for share, row in zip(shares, rows, strict=True):
            records, filled = self._columns.pair(row.indices.astype(np.int64))
            share[np.searchsorted(keys[anchors], records), np.searchsorted(keys, filled)] = (
                row.values
            )
        return Scores(spans, own, anchors, shares)
