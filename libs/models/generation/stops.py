"""Stop strings: where an answer ends, and which part of an unfinished text is sure to stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from libs.models.generation.decoding.rules import Ids

SPARE_TOKENS: Final = 8
"""Tokens that are decoded before a stop string's longest form: the first of them may be a part of a
character.
"""


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Says whether an answer has one of its stop strings: a `Request.ends`. `decode`: token ids to
    their text.
    """

    decode: Callable[[Sequence[int]], str]
    stops: Sequence[str]

    def __call__(self, written: Ids) -> bool:
        """Decodes the last tokens alone: what came before was looked at when it was written, and
        each has a byte at least.
        """
        tokens = max(len(stop.encode()) for stop in self.stops) + SPARE_TOKENS
        text = self.decode(written[-tokens:].tolist())
        return any(stop in text for stop in self.stops)


def before_stop(text: str, stops: Iterable[str]) -> str:
    """The text before the first stop string in it; all of it where it has none."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def settled(text: str, stops: Sequence[str]) -> str:
    """What of an unfinished text is in the answer whatever follows: it ends before a stop string or
    what may become one.
    """
    found = before_stop(text, stops)
    if len(found) < len(text):
        return found
    return text[: len(text) - max((_begun(text, stop) for stop in stops), default=0)]


def _begun(text: str, stop: str) -> int:
    """The most characters at the text's end that the stop string begins with."""
    return next(
        (
            size
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )
