"""Measured rates of one resident model: what routers price jobs with, and when the device will be free. Pure."""

from __future__ import annotations

_KEPT = 0.9
"""How much of what was measured before counts beside a new measurement: about the last ten count."""


class Meter:
    """Ratios of decaying sums, so that a large batch counts for more than a small one. A rate is 0 until measured."""

    def __init__(self) -> None:
        self._forward_tokens = 0.0
        self._forward_seconds = 0.0
        self._text_tokens = 0.0
        self._text_bytes = 0.0

    def add_forward(self, tokens: int, seconds: float) -> None:
        self._forward_tokens = self._forward_tokens * _KEPT + tokens
        self._forward_seconds = self._forward_seconds * _KEPT + seconds

    def add_texts(self, tokens: int, text_bytes: int) -> None:
        self._text_tokens = self._text_tokens * _KEPT + tokens
        self._text_bytes = self._text_bytes * _KEPT + text_bytes

    @property
    def tokens_per_second(self) -> float:
        return self._forward_tokens / self._forward_seconds if self._forward_seconds else 0.0

    @property
    def tokens_per_byte(self) -> float:
        return self._text_tokens / self._text_bytes if self._text_bytes else 0.0

    def expected_seconds(self, tokens: int) -> float:
        """How long a forward pass over `tokens` will take; 0 if nothing was measured yet."""
        return tokens / self.tokens_per_second if self._forward_seconds else 0.0
