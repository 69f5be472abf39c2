"""Encode, score and classify with an embedding model: vectors of texts, and how near they are to each other.

A job fails as a whole, and alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from libs.catalog.card import Card
from libs.errors import InvalidInput, TaskNotSupported
from services.worker.models.processing import answers
from services.worker.models.processing.checks import (
    document_path,
    item_path,
    need_labels,
    need_task,
    prompt_of,
    query_path,
    unsupported,
)
from services.worker.models.processing.late import Kept, LateFrame
from services.worker.models.processing.text import TextProcessor, Where
from services.worker.models.results import EncodeResult, Extraction, ExtractResult, Result, ScoreResult
from services.worker.models.work import ClassifyWork, EncodeWork, Output, Prepared, ScoreWork, Sequence, Truncation, Work

_PLACE = "{}"
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Which token vectors of each sequence are answered (None: all)."""

    masks: list[Kept]


class EmbeddingProcessor:
    """Of one model. `late`: for models that answer a vector a token."""

    def __init__(self, card: Card, text: TextProcessor, late: LateFrame | None) -> None:
        self._card, self._text, self._late = card, text, late

    def prepare(self, work: Work) -> Prepared:
        need_task(work, self._card)
        match work:
            case EncodeWork():
                return self._encode(work)
            case ScoreWork():
                return self._score(work)
            case ClassifyWork():
                return self._classify(work)
        raise unsupported(work, self._card)

    def finish(self, prepared: Prepared, outputs: Many[Output]) -> Result:
        work = prepared.work
        rows = cast("Many[Array]", outputs)
        match work:
            case EncodeWork():
                return self._vectors(work, prepared, rows)
            case ScoreWork():
                return ScoreResult(self._scores(work, prepared, rows))
            case ClassifyWork():
                return ExtractResult([Extraction(labels=labels) for labels in answers.nearest_labels(work, np.stack(rows))])
        raise unsupported(work, self._card)

    def _encode(self, work: EncodeWork) -> Prepared:
        check_encode(work, self._card)
        prompt = work.instruction or prompt_of(self._card, work.role)
        if self._late is None:
            return Prepared(work, "dense", self._dense(work.texts, prompt, work.truncation, item_path))
        frame = self._late.queries if work.role == "query" else self._late.documents
        sequences, kept = frame(work.texts, prompt, work.truncation, item_path)
        return Prepared(work, "multi_vector", sequences, _Kept(kept))

    def _score(self, work: ScoreWork) -> Prepared:
        """The query first, then the documents."""
        prompt, other = work.instruction or prompt_of(self._card, "query"), prompt_of(self._card, "document")
        if self._late is None:
            queries = self._dense([work.query], prompt, work.truncation, query_path)
            return Prepared(work, "dense", queries + self._dense(work.documents, other, work.truncation, document_path))
        if work.scale == "probability":
            raise InvalidInput("a multi-vector model's scores have no probability: leave `scale` empty", field="scale")
        queries, query_kept = self._late.queries([work.query], prompt, work.truncation, query_path)
        documents, kept = self._late.documents(work.documents, other, work.truncation, document_path)
        return Prepared(work, "multi_vector", queries + documents, _Kept(query_kept + kept))

    def _classify(self, work: ClassifyWork) -> Prepared:
        """The texts, then one prompt a label."""
        need_labels(work.labels, self._card, "classify.labels")
        hypothesis = work.hypothesis or _PLACE
        if _PLACE not in hypothesis:
            raise InvalidInput(f"the hypothesis must hold {_PLACE}, where the label goes", field="classify.hypothesis")
        prompts = [hypothesis.replace(_PLACE, label) for label in work.labels]
        default = prompt_of(self._card, "")
        texts = self._dense(work.texts, default, work.truncation, item_path)
        return Prepared(work, "dense", texts + self._dense(prompts, default, work.truncation, _label_path))

    def _dense(self, texts: list[str], prompt: str, truncation: Truncation, where: Where) -> list[Sequence]:
        sequences = self._text.encode(texts, truncation, where, prompt=prompt)
        if self._card.pool_prompt or not prompt:
            return sequences
        skip = self._text.prompt_tokens(prompt)
        # At least the last token is pooled: a text that was cut could else have nothing left.
        return [Sequence(item.ids, item.type_ids, skip=min(skip, item.tokens - 1)) for item in sequences]

    def _vectors(self, work: EncodeWork, prepared: Prepared, rows: Many[Array]) -> EncodeResult:
        if prepared.head == "dense":
            return EncodeResult(dense=answers.dense_rows(work, self._card, rows))
        return EncodeResult(multi_vector=answers.token_rows(work, self._card, _kept(prepared, rows)))

    def _scores(self, work: ScoreWork, prepared: Prepared, rows: Many[Array]) -> Array:
        if prepared.head == "dense":
            return answers.cosine_scores(rows[0], np.stack(rows[1:]), work.scale)
        kept = _kept(prepared, rows)
        return answers.maxsim_scores(kept[0], kept[1:], self._card)


def check_encode(work: EncodeWork, card: Card) -> None:
    """Raises TaskNotSupported or InvalidInput for forms and sizes that the model does not have."""
    for number, form in enumerate(work.representations):
        if form not in card.representations:
            message = f"{card.model} has no {form} vectors; it has {', '.join(card.representations)}"
            raise TaskNotSupported(message, field=f"representations[{number}]")
    if "dense" not in card.representations:
        if work.dimensions:
            raise InvalidInput(f"only dense vectors can be cut, and {card.model} has none: leave it 0", field="dimensions")
        if work.data_type in ("int8", "uint8", "binary"):
            raise InvalidInput(f"{work.data_type} is for dense vectors, and {card.model} has none", field="data_type")
    elif work.dimensions > card.dimensions:
        raise InvalidInput(f"{work.dimensions} are asked for; {card.model} has {card.dimensions}", field="dimensions")


def _kept(prepared: Prepared, rows: Many[Array]) -> list[Array]:
    """The token vectors that count."""
    notes = prepared.notes
    masks = notes.masks if isinstance(notes, _Kept) else [None] * len(rows)
    return [row if mask is None else row[mask] for row, mask in zip(rows, masks, strict=True)]


def _label_path(number: int) -> str:
    return f"classify.labels[{number}]"
