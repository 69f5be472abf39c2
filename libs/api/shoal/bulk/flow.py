"""Decides how many chunks are in flight. Pure: times are arguments."""

from __future__ import annotations

from collections import deque
from typing import Final

MAX_CHARACTERS_IN_FLIGHT: Final = 64 << 20
"""Characters of texts in flight; a single chunk may have more."""
_DECREASE: Final = 0.5
_SAMPLES_SECONDS: Final = 30.0


class FlowControl:
    """Additive increase, multiplicative decrease of the number of chunks in flight.

    The limit grows by one when as many chunks as the limit were answered, and is halved by an
    overload, at most once for all chunks that were sent before the last decrease.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._limit = float(min(2, maximum))
        self._decreased_at = float("-inf")

    @property
    def limit(self) -> int:
        return int(self._limit)

    def succeeded(self) -> None:
        """A chunk was answered."""
        self._limit = min(self._limit + 1.0 / self.limit, float(self._maximum))

    def overloaded(self, sent_at: float, now: float) -> None:
        """The mesh refused a chunk that was sent at `sent_at`."""
        if sent_at > self._decreased_at:
            self._limit = max(1.0, self._limit * _DECREASE)
            self._decreased_at = now


class JobThroughput:
    """Rows and tokens in a second, over the last 30 seconds."""

    def __init__(self, now: float) -> None:
        self._samples: deque[tuple[float, int, int]] = deque([(now, 0, 0)])
        self._rows = self._tokens = 0

    def add(self, rows: int, tokens: int, now: float) -> None:
        self._rows, self._tokens = self._rows + rows, self._tokens + tokens
        self._samples.append((now, self._rows, self._tokens))
        while len(self._samples) > 2 and now - self._samples[0][0] > _SAMPLES_SECONDS:
            self._samples.popleft()

    def per_second(self, now: float) -> tuple[float, float]:
        """Return rows and tokens in a second."""
        began, rows, tokens = self._samples[0]
        seconds = max(now - began, 1e-3)
        return (self._rows - rows) / seconds, (self._tokens - tokens) / seconds
