"""Zero-shot classification with GLiClass: the request's labels and a text are one sequence, and one
forward scores all labels.

Formats and scores are those of the gliclass package's zero-shot pipeline, except that only texts
are truncated, never labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Extraction, LabelScore
from tokenizers import Tokenizer

from libs.catalog.card import Card
from libs.errors import InvalidInput, ModelBroken
from libs.kinds.gliclass.card import LABEL_MARKER, TEXT_MARKER, Gliclass
from libs.models.interface.results import Result
from libs.models.interface.sequences import InputSequence, Output, Prepared
from libs.models.interface.work import CancelCheck, ClassifyWork, Truncation, Work, never_cancelled
from libs.models.runtime.answer_budget import build_result
from libs.models.text.checks import hypotheses, item_path, need_labels, need_task, need_work
from libs.models.text.processing.answers import best_first, is_multi_label, sigmoid
from libs.models.text.processing.entities import softmax
from libs.models.text.tokenising.cutting import Cutter, TextEncoding, encoded
from libs.models.text.tokenising.text import run_of_ones, too_long

_LABELS = "classify.labels"
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LabelPlaces:
    """Positions of labels and text in a sequence: label i has the tokens `starts[i]:ends[i]`, the
    text begins at token `text`.
    """

    starts: Ids
    ends: Ids
    text: int


class GliclassProcessor:
    """The processor of one model. Raises ModelBroken if the tokenizer does not contain the
    markers."""

    def __init__(self, card: Card, settings: Gliclass, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for marker, index in (
            (LABEL_MARKER, settings.label_index),
            (TEXT_MARKER, settings.text_index),
        ):
            if index not in tokenizer.encode(f"a{marker}a", add_special_tokens=False).ids:
                raise ModelBroken(
                    f"tokenizer.json: {marker!r} is not the token {index} that config.json names"
                )
        self._card, self._settings, self._tokenizer = card, settings, tokenizer
        self._cutter = Cutter(tokenizer)

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        need_task(work, self._card)
        work = need_work(work, ClassifyWork, self._card)
        labels = self._labels(work, check_cancelled)
        prompt = "".join(f"{LABEL_MARKER}{label}" for label in labels) + TEXT_MARKER
        first = self._settings.prompt_first
        before, after = (prompt, "") if first else ("", prompt)
        parts = self._cutter.parts(
            work.texts,
            self._card.max_tokens,
            work.truncation,
            check_cancelled,
            before=before,
            after=after,
        )
        sequences = [
            self._sequence(part, len(labels), work.truncation, item_path(number))
            for number, part in enumerate(parts)
        ]
        return Prepared(work, "labels", sequences)

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        work = need_work(prepared.work, ClassifyWork, self._card)
        rows = cast("Sequence[NDArray[np.float32]]", outputs)
        items = (Extraction(labels=self._scores(work, logits)) for logits in rows)
        return build_result(items, prepared.answer_bytes, check_cancelled)

    def _scores(self, work: ClassifyWork, logits: NDArray[np.float32]) -> tuple[LabelScore, ...]:
        multi = is_multi_label(work, self._card)
        scores = sigmoid(logits) if multi else softmax(logits)
        return best_first(list(zip(work.labels, scores, strict=True)), work.threshold)

    def _labels(self, work: ClassifyWork, check_cancelled: CancelCheck) -> list[str]:
        """Return the labels as they appear in the prompt, validated."""
        need_labels(work.labels, self._card, _LABELS)
        labels = hypotheses(work)
        tokens = encoded(
            labels,
            partial(self._tokenizer.encode_batch_fast, add_special_tokens=False),
            check_cancelled,
        )
        for number, (label, encoding) in enumerate(zip(labels, tokens, strict=True)):
            field = f"{_LABELS}[{number}]"
            if LABEL_MARKER in label or TEXT_MARKER in label:
                raise InvalidInput(
                    f"{field} contains {LABEL_MARKER} or {TEXT_MARKER}, which separate labels",
                    field=field,
                )
            if not len(encoding):
                raise InvalidInput(f"{field} has no token in the model's tokenizer", field=field)
        return labels

    def _sequence(
        self, part: TextEncoding, labels: int, truncation: Truncation, where: str
    ) -> InputSequence:
        ids = np.array(part.encoding.ids, dtype=np.int32)
        mask = part.encoding.special_tokens_mask
        before, after = run_of_ones(mask), run_of_ones(reversed(mask))
        markers, end = self._markers(ids, labels)
        first = self._settings.prompt_first
        text = (end + 1, len(ids) - after) if first else (before, int(markers[0]))
        if truncation == "none" and not part.is_whole:
            raise too_long(
                where,
                len(ids),
                self._card.max_tokens,
                "labels and special tokens included",
                more=True,
            )
        cut = where if len(ids) > self._card.max_tokens else ""
        ids = self._cut(ids, text, truncation, where)
        markers, end = self._markers(ids, labels)
        types = (np.arange(len(ids)) >= end).astype(np.int32) if self._settings.segments else None
        return InputSequence(ids, types, input=self._places(markers, end, len(ids)), cut=cut)

    def _markers(self, ids: Ids, labels: int) -> tuple[NDArray[np.int64], int]:
        """Return rows of the prompt's markers: before each label and after the last. A text may
        contain the same words.
        """
        rows, ends = (
            np.flatnonzero(ids == self._settings.label_index),
            np.flatnonzero(ids == self._settings.text_index),
        )
        return (
            (rows[:labels], int(ends[0]))
            if self._settings.prompt_first
            else (rows[-labels:], int(ends[-1]))
        )

    def _cut(self, ids: Ids, text: tuple[int, int], truncation: Truncation, where: str) -> Ids:
        """Truncate the text, in the rows `text`, by the number of tokens that exceed the limit."""
        limit, excess = self._card.max_tokens, len(ids) - self._card.max_tokens
        if excess <= 0:
            return ids
        start, end = text
        if truncation == "none":
            raise too_long(where, len(ids), limit, "labels and special tokens included")
        if end - start <= excess:
            needed = len(ids) - (end - start) + 1
            raise too_long(
                _LABELS, needed, limit, "with special tokens and at least one token of an item"
            )
        gone = slice(end - excess, end) if truncation == "end" else slice(start, start + excess)
        return np.delete(ids, gone)

    def _places(self, markers: NDArray[np.int64], end: int, tokens: int) -> LabelPlaces:
        """Return the places. An averaged label extends to the next one, the last to the text's
        marker or, as in the package, to the end.
        """
        starts = markers + (0 if self._settings.marks else 1)
        reach = np.append(markers[1:], end if self._settings.text_only else tokens)
        ends = reach if self._settings.averages else starts + 1
        return LabelPlaces(
            starts.astype(np.int32), ends.astype(np.int32), end if self._settings.text_only else 0
        )
