"""Generated texts for profiling without input, with the lengths of typical embedding requests, as
in the benchmarks.

Lengths are log-normal with a median of 36.5 tokens and a sigma of 0.82. The words are common ones
of about one token each; which words are chosen hardly affects the time of a forward pass.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Final

MEDIAN_WORDS: Final = 34.5
"""The median length in words: 36.5 tokens with the two special tokens."""
SIGMA: Final = 0.82
MAX_WORDS: Final = 254

_WORDS: Final = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an
they which one you were all her she there would their we him been has when who will no more if out
so up said what its about than into them can only other time new some could these two may first then
do any like my now over such our man me even most made after also did many fish before must through
years where much your way well down should because each just those people how too little state good
very
"""


def generated(seed: int = 0) -> Iterator[str]:
    """Yield an endless stream of texts, deterministic by seed."""
    chance, known = random.Random(seed), _WORDS.split()  # noqa: S311 — nothing secret
    while True:
        words = min(MAX_WORDS, max(1, round(chance.lognormvariate(math.log(MEDIAN_WORDS), SIGMA))))
        yield " ".join(chance.choices(known, k=words))
