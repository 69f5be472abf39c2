"""Zero-shot classification with a natural language inference (NLI) model: does the text entail
"This example is sport."?

Each text is paired with one hypothesis per label. Scores are those of transformers'
zero-shot-classification pipeline (arXiv 1909.00161): softmax over the labels' entailment logits or,
for multi-label, entailment against contradiction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Extraction, LabelScore

from libs.catalog.card import Card
from libs.kinds.sequence_labels.processor import LabelsProcessor
from libs.models.interface.results import Result
from libs.models.interface.sequences import Output, Prepared
from libs.models.interface.work import CancelCheck, ClassifyWork, Work, never_cancelled
from libs.models.runtime.answer_budget import build_result
from libs.models.text.checks import hypotheses, item_path, need_task
from libs.models.text.processing.answers import best_first, is_multi_label, sigmoid
from libs.models.text.processing.entities import softmax
from libs.models.text.tokenising.text import TextProcessor

_HYPOTHESIS = "This example is {}."  # the pipeline's


class NliProcessor:
    """The processor of one model.

    Args:
        own: The processor of other tasks: scoring pairs, and classifying by the model's classes
            without labels.
        contradiction: The index of that class.
    """

    def __init__(
        self, card: Card, contradiction: int, text: TextProcessor, own: LabelsProcessor
    ) -> None:
        self._card, self._contradiction, self._text, self._own = card, contradiction, text, own

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        if not isinstance(work, ClassifyWork) or not work.labels:
            return self._own.prepare(work, check_cancelled)
        need_task(work, self._card)
        asked = hypotheses(work, _HYPOTHESIS)
        crossed = self._text.encode_crossed(
            work.texts, asked, work.truncation, item_path, _label_path, check_cancelled
        )
        return Prepared(work, "logits", crossed)

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        work = prepared.work
        if not isinstance(work, ClassifyWork) or not work.labels:
            return self._own.finish(prepared, outputs, check_cancelled)
        logits = np.stack(cast("Sequence[NDArray[np.float32]]", outputs))
        each = logits.reshape(len(work.texts), len(work.labels), -1)
        items = (Extraction(labels=self._labels(work, rows)) for rows in each)
        return build_result(items, prepared.answer_bytes, check_cancelled)

    def _labels(self, work: ClassifyWork, logits: NDArray[np.float32]) -> tuple[LabelScore, ...]:
        """Score the labels of one text from logits [labels, classes]."""
        entailment, contradiction = logits[:, self._card.positive], logits[:, self._contradiction]
        multi = is_multi_label(work, self._card)
        # The softmax over a single label would always be 1.
        scores = (
            sigmoid(entailment - contradiction)
            if multi or len(logits) == 1
            else softmax(entailment)
        )
        return best_first(list(zip(work.labels, scores, strict=True)), work.threshold)


def _label_path(number: int) -> str:
    return f"classify.labels[{number}]"
