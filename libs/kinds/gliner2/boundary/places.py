"""The columns of the head's sparse rows. A span, or a pair of spans, has the same column for any
number of scored spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
MAX_WORDS: Final = 1 << 15
"""Pairs of spans among more words would not fit 64 bits."""


@dataclass(frozen=True, slots=True)
class TextPlaces:
    """The columns of a text."""

    words: int
    """Number of words, choices included."""

    @property
    def spans(self) -> int:
        """Number of columns of spans. Those of choices follow."""
        return (self.words + 1) ** 2

    def span_columns(self, spans: Numbers) -> Numbers:
        """Return the columns [spans] of spans [spans, 2]: the first word, and the word after the
        last."""
        return spans[:, 0] * (self.words + 1) + spans[:, 1]

    def choice_columns(self, count: int) -> Numbers:
        return self.spans + np.arange(count, dtype=np.int64)

    def pair_columns(self, heads: Numbers, tails: Numbers) -> Numbers:
        """Return the columns of pairs of spans' columns: head and tail, or the span that identifies
        a record and a span that fills its field.
        """
        return heads * self.spans + tails

    def span(self, columns: Numbers) -> Numbers:
        """Invert `span_columns`."""
        return np.stack(np.divmod(columns, self.words + 1), axis=1)

    def pair(self, columns: Numbers) -> tuple[Numbers, Numbers]:
        """Invert `pair_columns`."""
        return np.divmod(columns, self.spans)
