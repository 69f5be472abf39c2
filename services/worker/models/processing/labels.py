"""Score pairs and classify texts with a model that gives logits: cross-encoders and classifiers with labels of their own."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import cast

import numpy as np
from numpy.typing import NDArray

from libs.catalog.card import Card
from services.worker.models.processing import answers
from services.worker.models.processing.checks import item_path, known_labels, need_task, prompt_of, unsupported
from services.worker.models.processing.text import TextProcessor
from services.worker.models.results import Extraction, ExtractResult, Result, ScoreResult
from services.worker.models.work import ClassifyWork, Output, Prepared, ScoreWork, Work


class LabelsProcessor:
    """Of one model."""

    def __init__(self, card: Card, text: TextProcessor) -> None:
        self._card, self._text = card, text

    def prepare(self, work: Work) -> Prepared:
        need_task(work, self._card)
        match work:
            case ScoreWork():
                # A cross-encoder's prompts are no pair of roles: sentence-transformers puts its default one before the query.
                query = (work.instruction or prompt_of(self._card, "")) + work.query
                return Prepared(work, "logits", self._text.encode_pairs(query, work.documents, work.truncation))
            case ClassifyWork():
                known_labels(work.labels, self._card, "classify.labels")
                return Prepared(work, "logits", self._text.encode(work.texts, work.truncation, item_path))
        raise unsupported(work, self._card)

    def finish(self, prepared: Prepared, outputs: Many[Output]) -> Result:
        work = prepared.work
        logits = np.stack(cast("Many[NDArray[np.float32]]", outputs))
        match work:
            case ScoreWork():
                return ScoreResult(answers.pair_scores(logits, self._card, work.scale))
            case ClassifyWork():
                return ExtractResult([Extraction(labels=answers.class_labels(work, self._card, row)) for row in logits])
        raise unsupported(work, self._card)
