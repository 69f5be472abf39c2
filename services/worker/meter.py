"""Measured rates of one resident model: what routers price jobs with, and when the device will be free. Pure."""

from __future__ import annotations

_KEPT = 0.9
"""How much of what was measured before counts beside a new measurement: about the last ten count."""


class Meter:
    """Ratios of decaying sums, so that a large batch counts for more than a small one. A rate is 0 until measured."""

    def __init__(self) -> None:
        self._forwards = 0
        self._forward_tokens = 0.0
        self._forward_squares = 0.0
        self._forward_seconds = 0.0
        self._off_seconds = 0.0
        self._text_tokens = 0.0
        self._text_bytes = 0.0

    def add_forward(self, tokens: int, seconds: float) -> None:
        off = abs(seconds - self.expected_seconds(tokens)) if self._forwards > 1 else 0.0
        self._forwards += 1
        kept = 0.0 if self._forwards == 2 else _KEPT  # the first one pays for warming up: it counts until there is another
        self._forward_tokens = self._forward_tokens * kept + tokens
        self._forward_squares = self._forward_squares * kept + tokens * tokens
        self._forward_seconds = self._forward_seconds * kept + seconds
        self._off_seconds = self._off_seconds * kept + off

    def add_texts(self, tokens: int, text_bytes: int) -> None:
        self._text_tokens = self._text_tokens * _KEPT + tokens
        self._text_bytes = self._text_bytes * _KEPT + text_bytes

    @property
    def tokens_per_second(self) -> float:
        return self._forward_tokens / self._forward_seconds if self._forward_seconds else 0.0

    @property
    def batch_tokens(self) -> int:
        """What the speed was measured on: the size of the batch that the average token was in; 0 until measured."""
        return round(self._forward_squares / self._forward_tokens) if self._forward_tokens else 0

    @property
    def tokens_per_byte(self) -> float:
        return self._text_tokens / self._text_bytes if self._text_bytes else 0.0

    def most_tokens(self, seconds: float) -> int:
        """What a forward pass can be expected to get done in so long; 0 if nothing was measured yet."""
        return int(self.tokens_per_second * seconds)

    def expected_seconds(self, tokens: int) -> float:
        """How long a forward pass over `tokens` will take; 0 if nothing was measured yet."""
        return tokens / self.tokens_per_second if self._forward_seconds else 0.0

    def least_seconds(self, tokens: int) -> float:
        """What it will hardly take less than: twice as far below what is expected as passes were off it, at most half of it."""
        off = self._off_seconds / self._forward_seconds if self._forward_seconds else 0.0
        return self.expected_seconds(tokens) * max(0.5, 1 - 2 * off)
