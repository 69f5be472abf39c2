"""The columns of the head's sparse rows: a span, or a pair of spans, is the same number however
many are scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
MAX_WORDS: Final = 1 << 15
"""Pairs of spans among more would not fit 64 bits."""


@dataclass(frozen=True, slots=True)
class Places:
    """Of a text with so many words, those of choices counted."""

    words: int

    @property
    def spans(self) -> int:
        """How many columns spans have; choices come after them."""
        return (self.words + 1) ** 2

    def of_spans(self, spans: Numbers) -> Numbers:
        """spans [spans, 2]: the first word and the one after the last -> [spans]"""
        return spans[:, 0] * (self.words + 1) + spans[:, 1]

    def of_choices(self, count: int) -> Numbers:
        return self.spans + np.arange(count, dtype=np.int64)

    def of_pairs(self, heads: Numbers, tails: Numbers) -> Numbers:
        """Of spans' columns: head and tail, or the span that stands for a record and one that fills
        its field.
        """
        return heads * self.spans + tails

    def span(self, columns: Numbers) -> Numbers:
        """The inverse of `of_spans`."""
        return np.stack(np.divmod(columns, self.words + 1), axis=1)

    def pair(self, columns: Numbers) -> tuple[Numbers, Numbers]:
        """The inverse of `of_pairs`."""
        return np.divmod(columns, self.spans)
