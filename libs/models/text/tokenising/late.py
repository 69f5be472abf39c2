"""Tokenisation of queries and documents for a late-interaction model: prompt, lengths, query
expansion, and the choice of returned vectors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from libs.catalog.card import Expansion, LateInteraction
from libs.errors import ModelBroken
from libs.models.interface.sequences import InputSequence
from libs.models.interface.work import CancelCheck, Truncation, never_cancelled
from libs.models.text.tokenising.text import TextProcessor, Where

Kept = NDArray[np.bool_] | None


class LateFrame:
    """Tokenises queries and documents.

    Args:
        fill: The token that expands queries if the checkpoint names none: its mask token, else its
            end-of-sequence token.
    """

    def __init__(self, late: LateInteraction, text: TextProcessor, fill: str) -> None:
        text.keep_whole(late.markers)
        self._late, self._text = late, text
        self._fill = _fill_id(late.expansion, text, fill) if late.expansion else 0
        words = [text.token_id(word) for word in late.skip_words]
        self._skipped = np.array(
            sorted({word for word in words if word is not None and word != text.unknown}),
            dtype=np.int32,
        )

    def longest(self, role: str) -> int:
        """Return the maximum tokens of a query or a document."""
        return self._limit(
            self._late.query_tokens if role == "query" else self._late.document_tokens
        )

    def queries(
        self,
        texts: list[str],
        prompt: str,
        truncation: Truncation,
        where: Where,
        check_cancelled: CancelCheck = never_cancelled,
    ) -> tuple[list[InputSequence], list[Kept]]:
        expansion = self._late.expansion
        limit = (
            expansion.length
            if expansion is not None and expansion.fixed
            else self._late.query_tokens
        )
        sequences = self._text.encode(
            texts,
            truncation,
            where,
            limit=self._limit(limit),
            prompt=prompt,
            check_cancelled=check_cancelled,
        )
        kept = [self.kept(sequence, "query") for sequence in sequences]
        if expansion is None:
            return sequences, kept
        longer = [self._expanded(sequence, expansion) for sequence in sequences]
        return longer, [
            _padded(mask, sequence.tokens) for mask, sequence in zip(kept, longer, strict=True)
        ]

    def documents(
        self,
        texts: list[str],
        prompt: str,
        truncation: Truncation,
        where: Where,
        check_cancelled: CancelCheck = never_cancelled,
    ) -> tuple[list[InputSequence], list[Kept]]:
        limit = self._limit(self._late.document_tokens)
        sequences = self._text.encode(
            texts, truncation, where, limit=limit, prompt=prompt, check_cancelled=check_cancelled
        )
        return sequences, [self.kept(sequence, "document") for sequence in sequences]

    def _limit(self, wanted: int) -> int:
        return min(wanted, self._text.limit) if wanted else self._text.limit

    def kept(self, sequence: InputSequence, role: str) -> Kept:
        """Return which token vectors of a sequence are returned (None: all)."""
        skips = role in self._late.skip_roles and len(self._skipped) > 0
        if not skips and not self._late.leading:
            return None
        kept = (
            ~np.isin(sequence.ids, self._skipped)
            if skips
            else np.ones(sequence.tokens, dtype=np.bool_)
        )
        kept[: self._late.leading] = False
        return kept

    def _expanded(self, sequence: InputSequence, expansion: Expansion) -> InputSequence:
        """Pad the query to the expansion's length. Vectors of all added tokens are kept, even if
        other tokens do not attend to them.
        """
        missing = min(expansion.length, self._text.limit) - sequence.tokens
        if missing <= 0:
            return sequence
        ids = np.pad(sequence.ids, (0, missing), constant_values=self._fill)
        seen = 0 if expansion.attend else sequence.tokens
        return InputSequence(ids, seen=seen, cut=sequence.cut)


def _padded(kept: Kept, tokens: int) -> Kept:
    return None if kept is None else np.pad(kept, (0, tokens - len(kept)), constant_values=True)


def _fill_id(expansion: Expansion, text: TextProcessor, fill: str) -> int:
    token = expansion.token or fill
    found = text.token_id(token)
    if found is None:
        raise ModelBroken(f"tokenizer.json: token {token!r}, which expands queries, is missing")
    return found
