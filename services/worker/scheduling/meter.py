"""Measured rates of one model. Routers price jobs by them, and the worker predicts when the device
will be free. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from libs.catalog.card import Card
from libs.models import (
    ClassifyWork,
    EncodeWork,
    InputSequence,
    Prepared,
    RelationsWork,
    ScoreWork,
    StructureWork,
    Work,
)
from libs.models.interface.schema import schema_texts
from libs.models.interface.work import EntitiesWork, RegionsWork, TextWork, TokenWork

TextsWork = (
    EncodeWork
    | ScoreWork
    | EntitiesWork
    | ClassifyWork
    | RelationsWork
    | RegionsWork
    | StructureWork
)
_KEPT = 0.9
"""Decay of earlier measurements at each new one: about the last ten count."""
GENERATION_SECONDS: Final = 10.0
"""Time constant of the decay for a generative model: prompts take much less time for each token
than answers, so that a few forward passes say little.
"""
WORK_SECONDS: Final = 120.0
"""Time constant of the decay for a generative model's work in the tokens of prices. The tokens that
an answer did not need count in its last pass: with a shorter time each end of a long answer would
be a peak, and the scaler takes peaks for the speed.
"""
MAX_BYTES_A_TOKEN: Final = 16
"""A text with more bytes per token was truncated or is unknown to the tokenizer, so it does not
represent other texts.
"""


def whole_texts(work: Work, prepared: Prepared, card: Card) -> tuple[int, int]:
    """Return the tokens and UTF-8 bytes of a job's texts, to estimate tokens per byte.

    Excludes texts that were truncated or reach the model's maximum, jobs with sequences that do not
    correspond to texts, and jobs with images or chunks.
    """
    is_divided = isinstance(work, EncodeWork) and work.chunking is not None
    if prepared.image_tokens or is_divided or isinstance(work, TextWork | TokenWork):
        return 0, 0
    texts = work.documents if isinstance(work, ScoreWork) else work.texts
    sequences, other_bytes = _sequences(work, prepared, card)
    if len(sequences) != len(texts):
        return 0, 0
    tokens = read = 0
    for text, sequence in zip(texts, sequences, strict=True):
        own = sequence.tokens + (0 if sequence.before is None else len(sequence.before))
        size = _utf8(text) + other_bytes
        if own < card.max_tokens and own * MAX_BYTES_A_TOKEN >= size:
            tokens, read = tokens + own, read + size
    return tokens, read


def _sequences(
    work: TextsWork, prepared: Prepared, card: Card
) -> tuple[Sequence[InputSequence], int]:
    """Return the sequences of a job's texts, in order, and the request bytes in each sequence other
    than its text.
    """
    found = prepared.sequences
    if isinstance(work, EncodeWork):
        return found, _utf8(work.instruction)
    if isinstance(work, ScoreWork):
        if prepared.looked_up or len(found) > len(work.documents):
            # A model with separate vectors: the query has its own sequence.
            return found[len(found) - len(work.documents) :], 0
        return found, _utf8(work.query) + _utf8(work.instruction)
    if isinstance(work, StructureWork):
        return found, sum(_utf8(text) for _, text in schema_texts(work.schema))
    count, labels = len(work.texts), len(work.labels)
    names = sum(
        map(_utf8, (*work.labels, *(work.entity_labels if isinstance(work, RelationsWork) else ())))
    )
    if isinstance(work, ClassifyWork):
        names += _utf8(work.hypothesis) * labels
        if labels and card.contradiction is not None:  # each text with each label
            return found[::labels], names // labels
        if len(found) == count + labels:  # an embedding model
            return found[:count], 0
    return found, 0 if card.labels else names


def _utf8(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


class Meter:
    """Ratios of decaying sums, so that a large batch counts for more than a small one. Rates are 0
    until measured.
    """

    def __init__(self) -> None:
        self._forwards = 0
        self._forward_tokens = 0.0
        self._forward_squares = 0.0
        self._forward_seconds = 0.0
        self._work_tokens = 0.0
        self._work_seconds = 0.0
        self._off_seconds = 0.0
        self._text_tokens = 0.0
        self._text_bytes = 0.0

    def add_forward(self, tokens: int, seconds: float) -> None:
        self._add(tokens, seconds, _KEPT)
        self._add_work(tokens, seconds, _KEPT)
        self._forward_squares = self._forward_squares * self._kept_share(_KEPT) + tokens * tokens

    def add_steps(self, tokens: int, seconds: float, unneeded: int, occupied: float) -> None:
        """Add a forward pass of a generative model.

        Args:
            unneeded: Tokens that the price of answers that ended in it counts, and that were not
                generated. The work that waits is counted by the same prices.
            occupied: The share of the sequences that can be in progress together. Passes follow
                one another even for a single sequence, so that their seconds alone would make each
                worker with one look fully used.
        """
        self._add(tokens, seconds, math.exp(-seconds / GENERATION_SECONDS))
        kept = math.exp(-seconds / WORK_SECONDS)
        self._add_work(tokens + unneeded, seconds * occupied, kept)

    def _add(self, tokens: int, seconds: float, kept: float) -> None:
        off = abs(seconds - self.expected_seconds(tokens)) if self._forwards > 1 else 0.0
        self._forwards += 1
        kept = self._kept_share(kept)
        self._forward_tokens = self._forward_tokens * kept + tokens
        self._forward_seconds = self._forward_seconds * kept + seconds
        self._off_seconds = self._off_seconds * kept + off

    def _add_work(self, tokens: int, seconds: float, kept: float) -> None:
        kept = self._kept_share(kept)
        self._work_tokens = self._work_tokens * kept + tokens
        self._work_seconds = self._work_seconds * kept + seconds

    def _kept_share(self, kept: float) -> float:
        """Return the share that is kept of earlier passes. The first one includes warm-up: it only
        counts until the second.
        """
        return 0.0 if self._forwards == 2 else kept

    def add_texts(self, tokens: int, text_bytes: int) -> None:
        """Add the counts of `whole_texts`. Zero counts leave the rate unchanged."""
        if not text_bytes:
            return
        self._text_tokens = self._text_tokens * _KEPT + tokens
        self._text_bytes = self._text_bytes * _KEPT + text_bytes

    @property
    def tokens_per_second(self) -> float:
        """The work done per second, in the tokens of prices. For a generative model: with as many
        sequences as it can have in progress.
        """
        return self._work_tokens / self._work_seconds if self._work_seconds else 0.0

    @property
    def _computed_per_second(self) -> float:
        return self._forward_tokens / self._forward_seconds if self._forward_seconds else 0.0

    @property
    def batch_tokens(self) -> int:
        """The batch size at which the speed was measured: that of the average token's batch; 0
        until measured, and for a generative model: its speed does not depend on it.
        """
        return round(self._forward_squares / self._forward_tokens) if self._forward_tokens else 0

    @property
    def tokens_per_byte(self) -> float:
        return self._text_tokens / self._text_bytes if self._text_bytes else 0.0

    def max_tokens(self, seconds: float) -> int:
        """Return the tokens that a forward pass should process in `seconds`; 0 until measured."""
        return int(self._computed_per_second * seconds)

    def expected_seconds(self, tokens: int) -> float:
        """Return the expected duration of a forward pass over `tokens`; 0 until measured."""
        return tokens / self._computed_per_second if self._computed_per_second else 0.0

    def min_seconds(self, tokens: int) -> float:
        """Return a lower bound of a pass's duration: the expected time less twice the mean error,
        but at least half the expected time.
        """
        off = self._off_seconds / self._forward_seconds if self._forward_seconds else 0.0
        return self.expected_seconds(tokens) * max(0.5, 1 - 2 * off)
