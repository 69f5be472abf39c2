"""Score pairs and classify texts with a sequence classification model: a cross-encoder, or a
classifier with fixed labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Extraction

from libs.catalog.card import Card
from libs.models.interface.processor import Processor
from libs.models.interface.results import Result, ScoreResult
from libs.models.interface.sequences import InputSequence, Output, Prepared
from libs.models.interface.work import (
    CancelCheck,
    ClassifyWork,
    ModelWork,
    ScoreWork,
    Work,
    never_cancelled,
)
from libs.models.runtime.answer_budget import build_result
from libs.models.text.checks import item_path, known_labels, need_task, select_prompt, unsupported
from libs.models.text.processing import answers
from libs.models.text.tokenising.chat import ChatPairs
from libs.models.text.tokenising.text import TextProcessor


class LabelsProcessor:
    """The processor of one model. `chat` is for models that read pairs in a chat template."""

    def __init__(self, card: Card, text: TextProcessor, chat: ChatPairs | None = None) -> None:
        self._card, self._text, self._chat = card, text, chat

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        need_task(work, self._card)
        match work:
            case ScoreWork():
                return Prepared(work, "logits", self._pairs(work, check_cancelled))
            case ClassifyWork():
                known_labels(work.labels, self._card, "classify.labels")
                return Prepared(
                    work,
                    "logits",
                    self._text.encode(
                        work.texts, work.truncation, item_path, check_cancelled=check_cancelled
                    ),
                )
        raise unsupported(work, self._card)

    def _pairs(self, work: ScoreWork, check_cancelled: CancelCheck) -> list[InputSequence]:
        # A cross-encoder has no prompt per role: sentence-transformers uses its default prompt.
        prompt = work.instruction or select_prompt(self._card, "")
        if self._chat is not None:
            return self._chat.encode(
                work.query, work.documents, prompt, work.truncation, check_cancelled
            )
        return self._text.encode_pairs(
            prompt + work.query, work.documents, work.truncation, check_cancelled
        )

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        work = prepared.work
        logits = np.stack(cast("Sequence[NDArray[np.float32]]", outputs))
        match work:
            case ScoreWork():
                return ScoreResult(answers.pair_scores(logits, self._card, work.scale))
            case ClassifyWork():
                items = (
                    Extraction(labels=answers.class_labels(work, self._card, row)) for row in logits
                )
                return build_result(items, prepared.answer_bytes, check_cancelled)
        raise unsupported(work, self._card)


class PaddingTrimmer:
    """A processor of a causal model that removes padding tokens at the end of sequences.

    transformers classifies the rightmost token that is not the padding token, even if a template or
    a text appends padding tokens. No token of a causal model sees later ones, so the other states
    are unchanged.
    """

    def __init__(self, processor: Processor, padding: int) -> None:
        self._processor, self._padding = processor, padding

    def prepare(self, work: ModelWork, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        prepared = self._processor.prepare(work, check_cancelled)
        return replace(
            prepared, sequences=[self._shortened(sequence) for sequence in prepared.sequences]
        )

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        return self._processor.finish(prepared, outputs, check_cancelled)

    def _shortened(self, sequence: InputSequence) -> InputSequence:
        if sequence.ids[-1] != self._padding:
            return sequence
        others = np.flatnonzero(sequence.ids != self._padding)
        # A sequence of padding keeps its first token.
        end = int(others[-1]) + 1 if len(others) else 1
        types = None if sequence.type_ids is None else sequence.type_ids[:end]
        return replace(sequence, ids=sequence.ids[:end], type_ids=types)
