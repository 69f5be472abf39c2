"""The results of `tokenize` and `detokenize`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.results import Timings, Usage

TokenIds = Sequence[int] | npt.NDArray[np.integer]
"""The ids of one text's tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of one text.

    Attributes:
        count: Tokens of the whole text, special tokens included if they were added.
        kept_tokens: Tokens that `encode` would keep of it: `count`, unless the text is too long for
            the model.
        ids: uint32 [tokens]. Empty, as are all arrays here, where counts alone were asked for.
        starts: The first character of each token, uint32 [tokens]. Places count Unicode code
            points, as Python's strings do, and are 0 for special tokens. Tokens that are parts of
            one character each have the whole character.
        ends: One past the last character of each token, uint32 [tokens].
        names: The tokens as the vocabulary writes them, if they were asked for.
        special_before: How many of the tokens are special ones before the text.
        special_after: How many of them are special ones after the text.
        kept_start: The first character that `encode` would keep.
        kept_end: One past the last character that `encode` would keep.
    """

    count: int
    kept_tokens: int
    ids: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.uint32]
    ends: npt.NDArray[np.uint32]
    names: tuple[str, ...] = ()
    special_before: int = 0
    special_after: int = 0
    kept_start: int = 0
    kept_end: int = 0

    def __repr__(self) -> str:
        return f"Tokens({self.count} tokens, {self.kept_tokens} kept)"

    def is_special(self, place: int) -> bool:
        """Return True if the token at this index of `ids` is a special token that was added."""
        return place < self.special_before or place >= len(self.ids) - self.special_after


@dataclass(frozen=True, slots=True, eq=False)
class TokenizeResult:
    """The tokens of texts: `result[i]` is for text i.

    Attributes:
        max_tokens: The maximum tokens of a sequence of the model.
    """

    texts: tuple[Tokens, ...]
    max_tokens: int
    usage: Usage
    timings: Timings
    revision: str

    def __repr__(self) -> str:
        return f"TokenizeResult({len(self.texts)} texts, {self.usage.input_tokens} tokens)"

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tokens:
        return self.texts[index]

    def __iter__(self) -> Iterator[Tokens]:
        return iter(self.texts)

    @property
    def counts(self) -> list[int]:
        """Return the number of tokens of each text."""
        return [text.count for text in self.texts]


@dataclass(frozen=True, slots=True)
class DetokenizeResult:
    """The texts of sequences of ids: `texts[i]` is for sequence i."""

    texts: tuple[str, ...]
    usage: Usage
    timings: Timings
    revision: str
