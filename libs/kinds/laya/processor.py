"""Classification with laya: a question, its options (the request's labels) and a text are one
sequence; each option has a marker.

Sequences and scores are those of the laya package's questions of the type "choice": `[CLS] choice
question: … [SEP] [MASK] option [MASK] option … [SEP] text [SEP]`, and a softmax over the options'
logits, divided by the checkpoint's temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Extraction, LabelScore
from tokenizers import Tokenizer

from libs.catalog.card import Card
from libs.errors import InvalidInput
from libs.kinds.laya.card import Laya
from libs.models.interface.results import Result
from libs.models.interface.sequences import InputSequence, Output, Prepared
from libs.models.interface.work import CancelCheck, ClassifyWork, Truncation, Work, never_cancelled
from libs.models.runtime.answer_budget import build_result
from libs.models.text.checks import item_path, need_labels, need_task, need_work
from libs.models.text.processing.answers import best_first
from libs.models.text.processing.entities import softmax
from libs.models.text.tokenising.cutting import Cutter, TextEncoding, encoded
from libs.models.text.tokenising.text import too_long

_LABELS: Final = "classify.labels"
_QUESTION: Final = "Which of these labels fits best?"
_MAX_OPTION: Final = 48  # tokens, without its marker; these four limits are the package's
_MIN_OPTION: Final = 4  # tokens, with its marker, if many options share the budget
_MIN_QUESTION: Final = 8
_QUESTION_ROOM: Final = 16
Ids = list[int]


@dataclass(frozen=True, slots=True)
class MarkerTokens:
    """The special tokens of a sequence. `text` is the marker as a text, which texts of a request
    must not contain.
    """

    first: int
    last: int
    option: int
    text: str


@dataclass(frozen=True, slots=True)
class _Head:
    """The tokens before a text, and the rows of the options' markers among them."""

    ids: Ids
    markers: NDArray[np.int32]


class LayaProcessor:
    """The processor of one model."""

    def __init__(
        self, card: Card, settings: Laya, tokenizer: Tokenizer, marks: MarkerTokens
    ) -> None:
        self._card, self._settings, self._marks = card, settings, marks
        self._encode = partial(tokenizer.encode_batch_fast, add_special_tokens=False)
        self._cutter = Cutter(tokenizer)

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        need_task(work, self._card)
        work = need_work(work, ClassifyWork, self._card)
        need_labels(work.labels, self._card, _LABELS)
        if work.multi_label:
            message = f"{self._card.model} chooses one of the labels: its scores add up to 1"
            raise InvalidInput(message, field="classify.multi_label")
        head = self._head(work, check_cancelled)
        room = self._card.max_tokens - len(head.ids) - 1
        if room < 1:
            raise too_long(
                _LABELS,
                len(head.ids) + 2,
                self._card.max_tokens,
                "with special tokens and at least one token of an item",
            )
        texts = [self._plain(text) for text in work.texts]
        parts = self._cutter.parts(texts, room, work.truncation, check_cancelled, frame=False)
        sequences = [
            self._sequence(head, part, room, work.truncation, item_path(number))
            for number, part in enumerate(parts)
        ]
        return Prepared(work, "options", sequences)

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
        shares = softmax(logits / np.float32(self._settings.temperature_for(len(logits))))
        return best_first(list(zip(work.labels, shares, strict=True)), work.threshold)

    def _plain(self, text: str) -> str:
        return text.replace(self._marks.text, " ")

    def _head(self, work: ClassifyWork, check_cancelled: CancelCheck) -> _Head:
        question = f"choice question: {self._plain(work.hypothesis or _QUESTION)}"
        texts = [question, *(f" {self._plain(label)}" for label in work.labels)]
        asked, *labels = (
            encoding.ids for encoding in encoded(texts, self._encode, check_cancelled)
        )
        options, room = self._options(labels)
        ids, markers = [self._marks.first, *asked[:room], self._marks.last], []
        for option in options:
            markers.append(len(ids))
            ids += option
        return _Head([*ids, self._marks.last], np.array(markers, dtype=np.int32))

    def _options(self, labels: Sequence[Ids]) -> tuple[list[Ids], int]:
        """Return the options, each after its marker and truncated if they are numerous or long, and
        the tokens left for the question.

        Raises InvalidInput for labels that are equal after truncation.
        """
        budget = self._settings.head_tokens
        options = [[self._marks.option, *label[:_MAX_OPTION]] for label in labels]
        if budget - sum(map(len, options)) < _QUESTION_ROOM:
            most = max(_MIN_OPTION, (budget - _QUESTION_ROOM) // len(options))
            options = [option[:most] for option in options]
        seen: dict[tuple[int, ...], int] = {}
        for number, option in enumerate(options):
            if (before := seen.setdefault(tuple(option), number)) != number:
                reads = (
                    f"the same as {_LABELS}[{before}] to the model, which reads the first "
                    f"{len(option) - 1} tokens of each"
                )
                raise InvalidInput(f"{_LABELS}[{number}] is {reads}", field=f"{_LABELS}[{number}]")
        return options, max(_MIN_QUESTION, budget - sum(map(len, options)))

    def _sequence(
        self, head: _Head, part: TextEncoding, room: int, truncation: Truncation, where: str
    ) -> InputSequence:
        ids = part.encoding.ids
        cut = where if len(ids) > room else ""
        if cut:
            if truncation == "none":
                needed = len(head.ids) + len(ids) + 1
                how = "question, labels and special tokens included"
                raise too_long(where, needed, self._card.max_tokens, how, more=not part.is_whole)
            ids = ids[:room] if truncation == "end" else ids[-room:]
        return InputSequence(
            np.array([*head.ids, *ids, self._marks.last], dtype=np.int32),
            input=head.markers,
            cut=cut,
        )
