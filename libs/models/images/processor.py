"""Encode, score and classify with a model of images, or of images and texts in one space.

An item is one image or one text: it becomes one sequence for the backbone of its kind. Images are
decoded here, on the threads that prepare jobs. A model that reads several parts as one sequence has
another processor with the same interface (`libs/models/interface/processor.py`), which receives
every item's parts in order (`work.items_as_parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Extraction

from libs.catalog.card import Card
from libs.errors import TaskNotSupported
from libs.models.images.patches import ImageInput
from libs.models.images.texts import ImageModelTexts
from libs.models.interface.output_cache import JobOutputCache, OutputCache
from libs.models.interface.results import EncodeResult, ExtractResult, Result, ScoreResult
from libs.models.interface.sequences import Head, InputSequence, Output, Prepared
from libs.models.interface.work import (
    CancelCheck,
    ClassifyWork,
    EncodeWork,
    Part,
    Parts,
    ScoreWork,
    Truncation,
    Work,
    items_as_parts,
    never_cancelled,
    query_as_parts,
    without_images,
)
from libs.models.runtime.answer_budget import build_result
from libs.models.text.checks import hypotheses, need_labels, need_task, refuse_chunks, unsupported
from libs.models.text.processing import answers
from libs.models.text.processing.embedding import asked_forms, check_encode
from libs.models.text.processing.entities import softmax

Array = NDArray[np.float32]

TEXT_HEAD, IMAGE_HEAD = "dense", "image"


@dataclass(frozen=True, slots=True)
class LabelScale:
    """Conversion of cosines of images and labels to logits: cosine * `scale` + `bias`.

    Attributes:
        each_alone: Whether the model was trained to score each label independently (sigmoid)
            instead of by softmax over the labels.
    """

    scale: float
    bias: float
    each_alone: bool


def _unmade(tokens: int) -> InputSequence:
    return InputSequence(np.zeros(tokens, np.int32))


class ImageProcessor:
    """The processor of an image model.

    Attributes:
        texts: For models that read texts.
        labels: For models that compare images with texts.
        output_cache: Looks up cached outputs.
    """

    def __init__(
        self,
        card: Card,
        images: ImageInput,
        texts: ImageModelTexts | None,
        labels: LabelScale | None,
        output_cache: OutputCache | None = None,
    ) -> None:
        self._card, self._images, self._texts, self._labels = card, images, texts, labels
        self._recall = output_cache or OutputCache()

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        need_task(work, self._card)
        refuse_chunks(work, self._card)
        match work:
            case EncodeWork():
                check_encode(work, asked_forms(work, self._card), self._card)
                items = items_as_parts(work)
            case ScoreWork():
                items = [query_as_parts(work), *items_as_parts(work)]
            case ClassifyWork():
                need_labels(work.labels, self._card, "classify.labels")
                prompts = enumerate(hypotheses(work))
                items = [
                    *items_as_parts(work),
                    *((Part(text, f"classify.labels[{i}]"),) for i, text in prompts),
                ]
            case _:
                raise unsupported(work, self._card)
        known = self._recall.job()
        found = [self._sequence(parts, work.truncation, check_cancelled, known) for parts in items]
        heads = tuple(head for head, _ in found)
        return Prepared(
            without_images(work),
            heads[0],
            [sequence for _, sequence in found],
            heads=heads,
            fields=tuple(parts[0].field for parts in items),
            image_tokens=sum(sequence.tokens for head, sequence in found if head == IMAGE_HEAD),
            known=known.known([sequence for _, sequence in found]),
        )

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        work, rows = prepared.work, cast("Sequence[Array]", outputs)
        match work:
            case EncodeWork():
                return EncodeResult(dense=answers.dense_rows(work, self._card, rows))
            case ScoreWork():
                return ScoreResult(answers.cosine_scores(rows[0], np.stack(rows[1:]), work.scale))
            case ClassifyWork():
                return self._classified(
                    work, np.stack(rows), prepared.answer_bytes, check_cancelled
                )
        raise unsupported(work, self._card)

    def _sequence(
        self,
        parts: Parts,
        truncation: Truncation,
        check_cancelled: CancelCheck,
        known: JobOutputCache,
    ) -> tuple[Head, InputSequence]:
        check_cancelled()
        if len(parts) > 1:
            field = parts[1].field.rpartition(".")[0]
            raise TaskNotSupported(
                f"{self._card.model} reads one image or one text per item, not {len(parts)} parts",
                field=field,
            )
        (part,) = parts
        if isinstance(part.content, bytes):
            return IMAGE_HEAD, known.sequence(
                IMAGE_HEAD, parts, partial(self._images.sequence, part.content, part.field), _unmade
            )
        if self._texts is None:
            raise TaskNotSupported(f"{self._card.model} reads images, not texts", field=part.field)
        return TEXT_HEAD, self._texts.sequence(
            part.content, part.field, truncation, check_cancelled
        )

    def _classified(
        self, work: ClassifyWork, vectors: Array, answer_bytes: int, check_cancelled: CancelCheck
    ) -> ExtractResult:
        """Score labels. `vectors`: those of the items, then those of the labels' prompts."""
        if self._labels is None:
            raise unsupported(work, self._card)
        items, labels = (
            answers.unit(vectors[: len(work.texts)]),
            answers.unit(vectors[len(work.texts) :]),
        )
        logits = items @ labels.T * np.float32(self._labels.scale) + np.float32(self._labels.bias)
        alone = self._labels.each_alone if work.multi_label is None else work.multi_label
        scores = answers.sigmoid(logits) if alone else np.stack([softmax(row) for row in logits])
        found = (
            answers.best_first(list(zip(work.labels, row, strict=True)), work.threshold)
            for row in scores
        )
        return build_result(
            (Extraction(labels=each) for each in found), answer_bytes, check_cancelled
        )
