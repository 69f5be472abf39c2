"""Stop strings: the end of an answer, and the stable part of an unfinished text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from libs.models.generation.decoding.rules import Ids

EXTRA_TOKENS: Final = 8
"""Tokens decoded in addition to a stop string's longest form: the first of them may be a part of a
character.
"""


@dataclass(frozen=True, slots=True)
class StopStrings:
    """A `Request.ends`, which returns whether an answer contains one of its stop strings.

    Attributes:
        decode: Converts token ids to text.
        stops: The stop strings; at least one.
    """

    decode: Callable[[Sequence[int]], str]
    stops: Sequence[str]

    def __call__(self, generated: Ids) -> bool:
        """Return whether one of the stop strings ends in the last tokens. Earlier tokens were
        checked before. Each token has at least one byte, so a stop string has at most as many
        tokens as bytes.
        """
        tokens = max(len(stop.encode()) for stop in self.stops) + EXTRA_TOKENS
        text = self.decode(generated[-tokens:].tolist())
        return any(stop in text for stop in self.stops)


def text_before_stop(text: str, stops: Iterable[str]) -> str:
    """Return the text before the first stop string; all of it without one."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def stable_text(text: str, stops: Sequence[str]) -> str:
    """Return the part of an unfinished text that stays in the answer: it ends before a stop string
    or the beginning of one.
    """
    found = text_before_stop(text, stops)
    if len(found) < len(text):
        return found
    return text[: len(text) - max((_begun(text, stop) for stop in stops), default=0)]


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the text's end are the beginning of the stop string."""
    return next(
        (
            size
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )
