"""The driver's client of streams keeps the client's contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import numpy as np
import pytest
import shoal
from shoal import Delta, Extraction

from tests.chaos.traffic import Answers, Request


class Streams:
    """Fake for a client: streams these deltas, then this text."""

    def __init__(self, deltas: list[Delta], text: str) -> None:
        self._deltas, self._text = deltas, text

    async def extract_stream(self, *_: object, **__: object) -> AsyncIterator[object]:
        for delta in self._deltas:
            yield delta
        yield [Extraction(text=self._text)]


WANTED = Request(1, "stream", "m", (0,), "acme", "interactive", "patient", 5.0, 0.0)


@pytest.mark.parametrize(
    ("deltas", "is_right"),
    [
        ([Delta(0, "one"), Delta(0, " two")], True),
        ([Delta(0, "one t"), Delta(0, "one two", restarted=True)], True),
        ([Delta(0, "one"), Delta(0, "one two")], False),
    ],
)
async def test_deltas_that_are_not_the_beginning_of_the_text_are_a_wrong_answer(
    deltas: list[Delta], is_right: bool
) -> None:
    def rows(*found: Delta) -> shoal.AsyncClient:
        return cast("shoal.AsyncClient", Streams(list(found), "one two"))

    expected = await Answers().ask(rows(), WANTED)
    answer = await Answers().ask(rows(*deltas), WANTED)
    assert np.array_equal(answer, expected) == is_right
