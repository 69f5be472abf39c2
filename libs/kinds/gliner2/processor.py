"""The shared processor of GLiNER2's architectures: sequences of texts after a schema, and an answer
for each text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from shoal.extractions import Entity, Extraction
from shoal.schema import Schema, SchemaLabel

from libs.catalog.card import Card
from libs.errors import InvalidInput
from libs.kinds.gliner2.schemas import SchemaPrompt, build_prompt
from libs.models.interface.results import Result
from libs.models.interface.sequences import InputSequence, Output, Prepared
from libs.models.interface.work import (
    CancelCheck,
    EntitiesWork,
    ModelWork,
    Span,
    StructureWork,
    Work,
    never_cancelled,
)
from libs.models.runtime.answer_budget import build_result
from libs.models.text.checks import item_path, need_labels, need_task, unsupported
from libs.models.text.processing.extraction.spans import Candidates, choose
from libs.models.text.processing.extraction.words import WordFrame, Words, WordSequence

ENDING: Final = "."
_ENDINGS: Final = (ENDING, "!", "?")


@dataclass(frozen=True, slots=True)
class SchemaNotes:
    """The schema, its prompt in the sequences, and the words of each text."""

    schema: Schema
    prompt: SchemaPrompt
    words: list[Words]


class SchemaProcessor(ABC):
    """The processor of one model. A subclass defines the head's input (`places`) and reads its
    output (`read_output`).
    """

    def __init__(self, card: Card, frame: WordFrame) -> None:
        self._card, self._frame = card, frame

    @abstractmethod
    def places(self, schema: Schema, prompt: SchemaPrompt, sequence: WordSequence) -> object:
        """Return the head's input for a text's sequence.

        Raises InvalidInput for a schema without tokens in the tokenizer.
        """

    @abstractmethod
    def read_output(
        self, text: str, words: Words, notes: SchemaNotes, output: Output, path: str
    ) -> Extraction:
        """Return everything found in a text, from the head's output.

        Raises InvalidInput with `path` for an answer that is too long.
        """

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        need_task(work, self._card)
        if not isinstance(work, EntitiesWork | StructureWork):
            raise unsupported(work, self._card)
        schema, path = _work_schema(work, self._card)
        prompt = build_prompt(schema)
        found = self._frame.encode(
            [ended(text) for text in work.texts],
            prompt.words,
            work.truncation,
            path,
            check_cancelled,
        )
        sequences = [
            InputSequence(one.ids, input=self.places(schema, prompt, one), cut=one.cut)
            for one in found
        ]
        return Prepared(
            work, "structure", sequences, SchemaNotes(schema, prompt, [one.words for one in found])
        )

    def word_windows(
        self,
        work: ModelWork,
        index: int,
        overlap: int | None,
        path: str,
        check_cancelled: CancelCheck,
    ) -> list[Span]:
        """Return the windows of text `index`, as `WordWindows` says."""
        if not isinstance(work, EntitiesWork | StructureWork):
            raise unsupported(work, self._card)
        prompt = build_prompt(_work_schema(work, self._card)[0]).words
        return self._frame.windows(
            work.texts[index], prompt, overlap, path, check_cancelled, after=ENDING
        )

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        work, notes = prepared.work, cast("SchemaNotes", prepared.notes)
        if not isinstance(work, EntitiesWork | StructureWork):
            raise unsupported(work, self._card)
        texts = enumerate(zip(work.texts, notes.words, outputs, strict=True))
        items = (
            self.read_output(text, words, notes, output, item_path(number))
            for number, (text, words, output) in texts
        )
        if isinstance(work, EntitiesWork) and work.flat:
            items = (Extraction(entities=_apart(found.entities)) for found in items)
        return build_result(items, prepared.answer_bytes, check_cancelled)


def _work_schema(work: EntitiesWork | StructureWork, card: Card) -> tuple[Schema, str]:
    """Return the work's schema and its path in a request. Raises InvalidInput for an empty
    schema."""
    if isinstance(work, EntitiesWork):
        need_labels(work.labels, card, "entities.labels")
        return Schema(
            tuple(map(SchemaLabel, dict.fromkeys(work.labels))), threshold=work.threshold
        ), "entities.labels"
    schema = work.schema
    if not (schema.entities or schema.classifications or schema.relations or schema.structures):
        raise InvalidInput("the schema is empty", field="structure")
    return schema, "structure"


def ended(text: str) -> str:
    """Return the text as the model reads it, with a sentence's end."""
    return text if text.endswith(_ENDINGS) else f"{text}{ENDING}"


def _apart(entities: Sequence[Entity]) -> tuple[Entity, ...]:
    """Return the best entities without overlaps, in their order."""
    if not entities:
        return ()
    starts, ends = (
        np.array(places, dtype=np.int64)
        for places in zip(*((one.start, one.end - 1) for one in entities), strict=True)
    )
    scores = np.array([one.score for one in entities], dtype=np.float32)
    chosen = choose(
        Candidates(starts, ends, np.arange(len(entities)), scores), int(ends.max()) + 1, flat=True
    )
    return tuple(entities[number] for number in chosen.labels)
