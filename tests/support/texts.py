"""Real texts for tests: this project's pages and licence as they once were, cut to wanted lengths.

A copy, because a test's inputs may not change with the documentation: the test tokenizers are made
from these words.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

_PAGES = Path(__file__).with_suffix(".txt")


@lru_cache(maxsize=1)
def words() -> tuple[str, ...]:
    """Every word of texts.txt, in order."""
    return tuple(_PAGES.read_text(encoding="utf-8").split())


def texts(count: int, shortest: int, longest: int, seed: int = 0) -> list[str]:
    """`count` runs of consecutive words, of lengths spread evenly between `shortest` and `longest`
    words.
    """
    generator = random.Random(seed)
    source = words()
    lengths = [
        shortest + (longest - shortest) * index // max(1, count - 1) for index in range(count)
    ]
    starts = [generator.randrange(len(source) - length) for length in lengths]
    made = [
        " ".join(source[start : start + length])
        for start, length in zip(starts, lengths, strict=True)
    ]
    generator.shuffle(made)
    return made
