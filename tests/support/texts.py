"""Real texts for tests: paragraphs of the repository's own pages and licence, cut to wanted lengths."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]


@lru_cache(maxsize=1)
def words() -> tuple[str, ...]:
    """Every word of README, docs and LICENSE, in order."""
    pages = [_ROOT / "README.md", _ROOT / "LICENSE", *sorted((_ROOT / "docs").glob("*.md"))]
    return tuple(word for page in pages for word in page.read_text(encoding="utf-8").split())


def texts(count: int, shortest: int, longest: int, seed: int = 0) -> list[str]:
    """`count` runs of consecutive words, of lengths spread evenly between `shortest` and `longest` words."""
    generator = random.Random(seed)
    source = words()
    lengths = [shortest + (longest - shortest) * index // max(1, count - 1) for index in range(count)]
    starts = [generator.randrange(len(source) - length) for length in lengths]
    made = [" ".join(source[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
    generator.shuffle(made)
    return made
