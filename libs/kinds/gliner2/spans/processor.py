"""Answers of a GLiNER2 model to a schema, or to entity labels alone, as by the gliner2 package's
`extract`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, cast

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
from shoal.schema import Schema, SchemaClassification, SchemaField

from libs.catalog.card import Card
from libs.errors import InvalidInput
from libs.kinds.gliner2.card import Gliner2
from libs.kinds.gliner2.processor import SchemaNotes, SchemaProcessor
from libs.kinds.gliner2.schemas import SchemaPrompt
from libs.kinds.gliner2.spans.head import Query, SchemaPlaces, SpanTask, build_queries
from libs.models.interface.sequences import Output, SparseRow
from libs.models.text.heads.extraction.spans import enumerate_spans
from libs.models.text.processing.answers import best_first, labels_reaching, sigmoid
from libs.models.text.processing.entities import softmax
from libs.models.text.processing.extraction.spans import Candidates, disjoint
from libs.models.text.processing.extraction.words import WordFrame, Words, WordSequence

Array = NDArray[np.float32]
Ids = NDArray[np.int32]
_ANSWER: Final = (16, 1 << 16)
"""Maximum characters of an answer's texts: a factor on the text's characters, and an addend. A low
threshold selects a large number of spans.
"""


class StructureProcessor(SchemaProcessor):
    """The processor of one model."""

    def __init__(self, card: Card, frame: WordFrame, settings: Gliner2) -> None:
        super().__init__(card, frame)
        self._settings = settings

    def places(self, schema: Schema, prompt: SchemaPrompt, sequence: WordSequence) -> SchemaPlaces:
        return _places(prompt, sequence)

    def read_output(
        self, text: str, words: Words, notes: SchemaNotes, output: Output, path: str
    ) -> Extraction:
        row = cast("tuple[Array, Array, SparseRow]", output)
        return _Answers(text, words, self._settings, notes, row, path).extraction()


def _places(prompt: SchemaPrompt, sequence: WordSequence) -> SchemaPlaces:
    names, fields, classes, choices = (
        sequence.prompt[np.array(numbers, dtype=np.int64)]
        for numbers in (prompt.names, prompt.fields, prompt.classes, prompt.choices)
    )
    if (choices < 0).any():
        raise InvalidInput(
            "a choice of the schema has no token in the model's tokenizer",
            field="structure.structures",
        )
    return SchemaPlaces(tuple(prompt.tasks), names, fields, classes, sequence.pieces, choices)


class AnswerBound:
    """Bounds the characters of a text's answer."""

    def __init__(self, text: str, path: str) -> None:
        self._left, self._path = _ANSWER[0] * len(text) + _ANSWER[1], path

    def claim(self, characters: int) -> None:
        """Count characters. Raises InvalidInput with the text's path beyond the bound."""
        self._left -= characters
        if self._left < 0:
            raise self.exceeded()

    def exceeded(self) -> InvalidInput:
        """Return the error for a text with too long an answer. The caller raises it."""
        message = (
            f"the answer for {self._path} is too long: raise the thresholds, or reduce the schema"
        )
        return InvalidInput(message, field=self._path)


class _Answers:
    """One text's answers, from the head's output for the text."""

    def __init__(
        self,
        text: str,
        words: Words,
        settings: Gliner2,
        notes: SchemaNotes,
        row: tuple[Array, Array, SparseRow],
        path: str,
    ) -> None:
        self._text, self._words, self._notes = text, words, notes
        self._counts, classes, self._found = row
        self._classes = classes / np.float32(settings.class_temperature)
        self._starts, self._ends = enumerate_spans(len(words), settings.max_width)
        self._bound = AnswerBound(text, path)

    def extraction(self) -> Extraction:
        schema, tasks = self._notes.schema, self._notes.prompt.tasks
        structures: list[Structure] = []
        entities: list[Entity] = []
        relations: list[Relation] = []
        first = len(schema.structures) + bool(schema.entities)
        for (task, _), group in groupby(self._by_query(tasks), key=lambda one: one[0][:2]):
            fields = list(group)
            if task < len(schema.structures):
                structures += self._structure(task, fields)
            elif task < first:
                entities = [
                    one
                    for query, found in fields
                    for one in self._entities(schema.entities[query.field].label, found)
                ]
            else:
                relations += self._relation(
                    schema.relations[task - first].label, [found for _, found in fields]
                )
        return Extraction(
            entities=tuple(sorted(entities, key=lambda one: (one.start, one.end))),
            relations=tuple(sorted(relations, key=lambda one: -one.score)),
            classifications=tuple(classifications(schema, self._classes)),
            structures=tuple(structures),
        )

    def _by_query(self, tasks: Sequence[SpanTask]) -> Iterator[tuple[Query, tuple[Ids, Array]]]:
        """Yield each query with its columns, ascending, and their probabilities."""
        columns = len(self._starts) + len(self._notes.prompt.choices)
        queries = build_queries(tasks, self._counts)
        bounds = np.searchsorted(
            self._found.indices, np.arange(len(queries) + 1, dtype=np.int64) * columns
        )
        for number, query in enumerate(queries):
            own = slice(int(bounds[number]), int(bounds[number + 1]))
            yield (
                query,
                (self._found.indices[own] - np.int32(number * columns), self._found.values[own]),
            )

    def _spans(self, found: tuple[Ids, Array]) -> Iterator[tuple[int, int, float]]:
        """Yield spans best first, without those that overlap a better one: code points within the
        text as sent, and score.
        """
        columns, scores = found
        starts, ends = self._starts[columns].astype(np.int64), self._ends[columns].astype(np.int64)
        ranked = Candidates(starts, ends, np.zeros_like(starts), scores).take(
            np.argsort(-scores, kind="stable")
        )
        for row in disjoint(ranked, len(self._words)):
            first, last = int(ranked.starts[row]), int(ranked.ends[row])
            if self._words.starts[last] >= len(self._text):  # the full stop that `ended` added
                last -= 1
            if first <= last:
                start, end = (
                    int(self._words.starts[first]),
                    min(int(self._words.ends[last]), len(self._text)),
                )
                self._bound.claim(end - start)
                yield start, end, float(ranked.scores[row])

    def _entity(self, label: str, span: tuple[int, int, float]) -> Entity:
        start, end, score = span
        return Entity(start, end, label, score, self._text[start:end])

    def _entities(self, label: str, found: tuple[Ids, Array]) -> list[Entity]:
        return [self._entity(label, span) for span in self._spans(found)]

    def _relation(self, label: str, found: Sequence[tuple[Ids, Array]]) -> list[Relation]:
        """Return one instance: the best head and the best tail, if both exist."""
        ends = [next(self._spans(one), None) for one in found]
        head, tail = (None if span is None else self._entity("", span) for span in ends)
        if head is None or tail is None:
            return []
        return [Relation(head, tail, label, min(head.score, tail.score))]

    def _structure(
        self, number: int, fields: Sequence[tuple[Query, tuple[Ids, Array]]]
    ) -> list[Structure]:
        """Yield one instance, if any field has a value."""
        schema = self._notes.schema.structures[number]
        values = [self._values(number, query.field, found) for query, found in fields]
        asked = [schema.fields[query.field] for query, _ in fields]
        return build_structures(schema.name, asked, values)

    def _values(self, structure: int, number: int, found: tuple[Ids, Array]) -> tuple[Value, ...]:
        asked = self._notes.schema.structures[structure].fields[number]
        if asked.choices:
            return self._chosen(
                asked, self._notes.prompt.tasks[structure].fields[number].choices or (), found
            )
        spans = self._spans(found)
        if asked.dtype == "str":
            spans = iter([span for span in [next(spans, None)] if span is not None])
        return tuple(Value(self._text[start:end], score, start, end) for start, end, score in spans)

    def _chosen(
        self, asked: SchemaField, places: Sequence[int], found: tuple[Ids, Array]
    ) -> tuple[Value, ...]:
        scores = dict(
            zip((found[0] - np.int32(len(self._starts))).tolist(), found[1].tolist(), strict=True)
        )
        values = [
            Value(choice, scores[place])
            for choice, place in zip(asked.choices, places, strict=True)
            if place in scores
        ]
        for value in values:
            self._bound.claim(len(value.text))
        return tuple(
            values
            if asked.dtype == "list"
            else [max(values, key=lambda one: one.score)]
            if values
            else []
        )


def build_structures(
    name: str, fields: Iterable[SchemaField], values: Iterable[Sequence[Value]]
) -> list[Structure]:
    """Return a structure with the values of its fields; none if no field has a value."""
    found: dict[str, tuple[Value, ...] | Value | None] = {
        field.name: next(iter(own), None) if field.dtype == "str" else tuple(own)
        for field, own in zip(fields, values, strict=True)
    }
    return [Structure(name, found)] if any(found.values()) else []


def classifications(schema: Schema, logits: Array) -> Iterator[Classification]:
    """Yield the classifications. `logits` holds the labels of all questions in order."""
    first = 0
    for question in schema.classifications:
        own = logits[first : first + len(question.labels)]
        first += len(question.labels)
        yield Classification(question.name, _labels(question, own))


def _labels(question: SchemaClassification, logits: Array) -> tuple[LabelScore, ...]:
    """Return the labels that reach the threshold, and always the best one."""
    scores = sigmoid(logits) if question.multi_label else softmax(logits)
    ranked = best_first(
        [(one.label, score) for one, score in zip(question.labels, scores, strict=True)], None
    )
    return labels_reaching(ranked, question.threshold)
