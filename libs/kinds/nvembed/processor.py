"""Texts in NV-Embed's format: each ends with the end of a sentence, and as many leading tokens are
excluded from pooling as the instruction has.
"""

from __future__ import annotations

from dataclasses import replace

from libs.catalog.card import Card
from libs.models.interface.work import CancelCheck, Role, Truncation
from libs.models.text.processing.embedding import EmbeddingProcessor, EncodedTexts
from libs.models.text.tokenising.text import TextProcessor, Where


class LatentProcessor(EmbeddingProcessor):
    """The processor of one model. `end` is appended to each text."""

    def __init__(self, card: Card, text: TextProcessor, end: str) -> None:
        super().__init__(card, text)
        # The reference counts the instruction's tokens without special ones, and excludes that
        # number from the first special token on.
        self._end, self._leading = end, text.leading_tokens()

    def longest(self, role: Role) -> int:
        """Return the limit without the end of the sentence."""
        return super().longest(role) - 1

    def encode_texts(
        self,
        texts: list[str],
        prompt: str,
        role: Role,
        truncation: Truncation,
        where: Where,
        check_cancelled: CancelCheck,
    ) -> EncodedTexts:
        found = super().encode_texts(
            [text + self._end for text in texts], prompt, role, truncation, where, check_cancelled
        )
        return replace(
            found,
            sequences=[
                replace(one, skip=max(one.skip - self._leading, 0)) for one in found.sequences
            ],
        )
