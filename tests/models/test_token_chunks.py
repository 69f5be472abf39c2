"""Division of texts that arrive in parts: its cost, and equality with the division at once."""

from __future__ import annotations

import numpy as np
import pytest

from libs.models.text.processing.chunking.token_chunks import TokenDivider, by_tokens
from libs.models.text.tokenising.whole import WholeText

PART = 512


def tokens(begin: int, end: int) -> WholeText:
    """Return a part of which each character is a token."""
    places = np.arange(begin, end)
    nothing = np.zeros(0, np.int32)
    return WholeText(
        np.ones(end - begin, np.int32),
        None,
        0,
        end - begin,
        places,
        places + 1,
        np.ones(end - begin, np.bool_),
        nothing,
        None,
    )


@pytest.mark.parametrize("overlap", [0, 16])
@pytest.mark.parametrize("blank", [0, 300, 20_000])
def test_white_space_is_searched_for_ends_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch, blank: int, overlap: int
) -> None:
    text = "a few words " * 200 + "\n\t" * blank + " and more words" * 200
    searched = 0
    borders = TokenDivider._borders

    def counted(self: TokenDivider, text: str) -> object:
        nonlocal searched
        searched += len(self._starts)
        return borders(self, text)

    monkeypatch.setattr(TokenDivider, "_borders", counted)
    divider = TokenDivider(64, overlap)
    found = []
    for begin in range(0, len(text), PART):
        found += divider.add(text, tokens(begin, min(begin + PART, len(text))))
    found += divider.finish(text)
    assert searched < 8 * len(text)
    assert found == by_tokens(text, tokens(0, len(text)), 64, overlap)
