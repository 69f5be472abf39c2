"""Answers to a schema, or to labels of entities alone, with GLiNER2.5: what the gliner2 package's `extract` finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from libs.catalog.card import Card
from libs.catalog.kinds.gliner2 import Boundary
from libs.errors import InvalidInput
from libs.models.results import Entity, Extraction, ExtractResult, Relation, Result, Structure
from libs.models.schema import Schema
from libs.models.text.checks import item_path, need_task, unsupported
from libs.models.text.heads.boundary.head import BoundaryPlaces
from libs.models.text.processing.answers import sigmoid
from libs.models.text.processing.boundary.edges import Edge, distinct
from libs.models.text.processing.boundary.fields import Choices, Frame, StructureReader
from libs.models.text.processing.boundary.records import RecordBound, Scores
from libs.models.text.processing.boundary.spans import Span, disjoint, sent
from libs.models.text.processing.extraction.schemas import BEFORE_TEXT, THRESHOLD, SchemaPrompt, prompt_of
from libs.models.text.processing.extraction.structure import apart, classifications, ended, schema_of
from libs.models.text.processing.extraction.words import Framed, WordFrame, Words
from libs.models.work import EntitiesWork, GoOn, InputSequence, Output, Prepared, StructureWork, Work, go_on_anyway

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Notes:
    """The schema, how it stands in the sequences, and the words of each text."""

    schema: Schema
    prompt: SchemaPrompt
    words: list[Words]


class BoundaryProcessor:
    """The processor of one model."""

    def __init__(self, card: Card, frame: WordFrame, settings: Boundary) -> None:
        self._card, self._frame, self._settings = card, frame, settings

    def prepare(self, work: Work, go_on: GoOn = go_on_anyway) -> Prepared:
        need_task(work, self._card)
        if not isinstance(work, EntitiesWork | StructureWork):
            raise unsupported(work, self._card)
        schema, path = schema_of(work, self._card)
        prompt = prompt_of(schema)
        framed = self._frame.encode([ended(text) for text in work.texts], prompt.words, work.truncation, path, go_on)
        sequences = [InputSequence(one.ids, input=_places(schema, prompt, one)) for one in framed]
        return Prepared(work, "structure", sequences, _Notes(schema, prompt, [one.words for one in framed]))

    def finish(self, prepared: Prepared, outputs: Sequence[Output]) -> Result:
        work, notes = prepared.work, cast("_Notes", prepared.notes)
        if not isinstance(work, EntitiesWork | StructureWork):
            raise unsupported(work, self._card)
        items = []
        for number, (text, words, row) in enumerate(zip(work.texts, notes.words, outputs, strict=True)):
            answers = _Answers(text, words, notes, cast("tuple[Array, ...]", row), self._settings, item_path(number))
            found = answers.extraction()
            if isinstance(work, EntitiesWork) and work.flat:
                found = Extraction(entities=apart(found.entities))
            items.append(found)
        return ExtractResult(items)


def _places(schema: Schema, prompt: SchemaPrompt, framed: Framed) -> BoundaryPlaces:
    begin = _begin(prompt)
    before, queries, classes = framed.prompt[begin:], framed.prompt[prompt.fields], framed.prompt[prompt.classes]
    if (before < 0).any():
        raise InvalidInput("a choice of the schema has nothing that the model's tokenizer knows", field="structure.structures")
    words = np.concatenate([before, framed.pieces])
    fields = sum(len(structure.fields) for structure in schema.structures)
    choices = np.array(prompt.choices, dtype=np.int32) - np.int32(begin)
    if not len(words):  # nothing to find anything in
        return BoundaryPlaces(words, queries[:0], 0, 0, classes, choices)
    return BoundaryPlaces(words, queries, fields, len(schema.relations), classes, choices)


def _begin(prompt: SchemaPrompt) -> int:
    """The index of the first word of choices among the prompt's words."""
    return prompt.words.index(BEFORE_TEXT) + 1


class _Answers:
    """One text's answers, from the head's output for it."""

    def __init__(self, text: str, words: Words, notes: _Notes, row: tuple[Array, ...], settings: Boundary, path: str) -> None:
        prompt, schema = notes.prompt, notes.schema
        self._frame = Frame(text, ended(text), words.starts, words.ends, len(prompt.words) - _begin(prompt))
        self._schema, self._prompt, self._settings, self._row = schema, prompt, settings, row
        self._threshold = THRESHOLD if schema.threshold is None else schema.threshold
        self._fields = sum(len(structure.fields) for structure in schema.structures)
        self._bound = RecordBound(text, path)

    def extraction(self) -> Extraction:
        logits = self._row[0] / np.float32(self._settings.class_temperature)
        found = Extraction(classifications=tuple(classifications(self._schema, logits)))
        if len(self._row) == 1:
            return found
        _, places, scores, nothing, edges, records = self._row
        spans, likely = places.astype(np.int64), sigmoid(scores)
        return Extraction(
            entities=tuple(sorted(self._entities(spans, likely, sigmoid(nothing)), key=lambda one: (one.start, one.end))),
            relations=tuple(sorted(self._relations(spans, likely, edges), key=lambda one: -one.score)),
            classifications=found.classifications,
            structures=tuple(self._structures(spans, likely, records)),
        )

    def _entities(self, spans: NDArray[np.int64], likely: Array, absent: Array) -> Iterator[Entity]:
        for number, label in enumerate(self._schema.entities, start=self._fields):
            if float(absent[number]) > self._settings.abstention:
                continue
            own, threshold = likely[number, : len(spans)], self._threshold if label.threshold is None else label.threshold
            kept = np.flatnonzero((spans[:, 0] >= 0) & (own >= np.float32(threshold)))
            for span in disjoint(Span(int(spans[one, 0]), int(spans[one, 1]), float(own[one])) for one in kept):
                if (where := self._frame.characters(span.start, span.end)) is not None:
                    yield from self._entity(label.name, Span(where.start, where.end, span.score))

    def _entity(self, label: str, span: Span) -> Iterator[Entity]:
        if (one := sent(span, self._frame.text)) is not None:
            self._bound.claim(one.end - one.start)
            yield Entity(one.start, one.end, label, one.score, self._frame.text[one.start : one.end])

    def _relations(self, spans: NDArray[np.int64], likely: Array, edges: Array) -> Iterator[Relation]:
        first = len(likely) - 2 * len(self._schema.relations)
        for number, asked in enumerate(self._schema.relations):
            threshold = self._threshold if asked.threshold is None else asked.threshold
            heads, tails = edges[number, :, 0].astype(np.int64), edges[number, :, 1].astype(np.int64)
            scores, roles = sigmoid(edges[number, :, 2]), likely[first + 2 * number : first + 2 * number + 2]
            found = []
            for head, tail, score in zip(heads, tails, scores, strict=True):
                if head < 0 or float(score) < threshold:
                    continue
                ends = [
                    None if where is None else Span(where.start, where.end, float(role[one]))
                    for one, role in zip((head, tail), roles, strict=True)
                    for where in [self._frame.characters(*spans[one].tolist())]
                ]
                if ends[0] is not None and ends[1] is not None:
                    found.append(Edge(ends[0], ends[1], float(score)))
            for edge in distinct(found, self._frame.read):
                for head_entity in self._entity("", edge.head):
                    for tail_entity in self._entity("", edge.tail):
                        yield Relation(head_entity, tail_entity, asked.name, edge.score)

    def _structures(self, spans: NDArray[np.int64], likely: Array, records: Array) -> Iterator[Structure]:
        first, begin = 0, _begin(self._prompt)
        for asked, task in zip(self._schema.structures, self._prompt.tasks, strict=False):
            rows = slice(first, first + len(asked.fields))
            first += len(asked.fields)
            own = likely[rows]
            shares = records[len(spans) :][rows]
            scores = Scores(spans, own[:, : len(spans)], records[: len(spans)], shares)
            choices = {
                number: Choices([self._prompt.choices[one] - begin for one in found], own[number, len(spans) + np.array(found)])
                for number, query in enumerate(task.fields)
                if (found := query.choices) is not None
            }
            yield from StructureReader(asked, scores, self._frame, choices, self._threshold, self._bound).structures()
