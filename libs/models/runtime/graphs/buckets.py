"""Rules: which shapes share a graph, and when a shape is worth one.

A graph computes a fixed number of tokens in a fixed number of sequences. A batch is padded to that
with further sequences of placeholder tokens (fillers), each of at least one token and none longer
than the encoder's limit: kernels see an ordinary packed batch, and the batch's sequences attend to
nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

TOKENS: Final = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Token counts of graphs."""

MAX_TOKENS: Final = 512
"""Larger batches take the device longer than the host needs to launch them."""

MAX_TOKENS_OF_SMALL_MODELS: Final = 2048
"""The same for models below SMALL_MODEL_WEIGHTS: their kernels are shorter."""

SMALL_MODEL_WEIGHTS: Final = 50_000_000

SEQUENCES: Final = (2, 4, 8, 16, 32, 64)

HOT: Final = ((128, 8), (64, 4), (32, 2), (16, 2))
"""Tokens and sequences of the buckets captured after a load, before any batch needs them: one
query, and a few together. The largest is first: the graphs of a model share memory, and later ones
fit in the memory of the first.
"""

AFTER: Final = 16
"""Number of batches of one bucket that run eagerly before it is captured."""

MAX_WAIT_BATCHES: Final = 1024
"""Maximum batches of one bucket that run eagerly after a refused capture, before the next
attempt.
"""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a graph's input.

    Attributes:
        longest: Maximum tokens of one of its sequences.
    """

    tokens: int
    sequences: int
    longest: int

    def fillers(self, tokens: int, sequences: int) -> tuple[int, ...] | None:
        """Return the lengths of the fillers next to `sequences` with `tokens` tokens in all; None
        if they cannot fill the bucket.
        """
        tokens, sequences = self.tokens - tokens, self.sequences - sequences
        if sequences <= 0:
            return () if sequences == tokens == 0 else None
        if not sequences <= tokens <= sequences * self.longest:
            return None
        each, longer = divmod(tokens, sequences)
        return (each + 1,) * longer + (each,) * (sequences - longer)


def max_tokens(weights: int) -> int:
    """Return the largest token count of graphs for a model of `weights` weights."""
    return MAX_TOKENS_OF_SMALL_MODELS if weights < SMALL_MODEL_WEIGHTS else MAX_TOKENS


def hot_buckets(longest: int) -> list[Bucket]:
    """Return the buckets to capture after a load, the largest first. `longest`: the encoder's limit
    of tokens.
    """
    return [
        Bucket(tokens, count, min(tokens, longest))
        for tokens, count in HOT
        if tokens <= count * longest
    ]


def smallest_bucket(lengths: Sequence[int], longest: int, most: int = MAX_TOKENS) -> Bucket | None:
    """Return the smallest bucket of at most `most` tokens for sequences of these lengths; None if
    they exceed it.

    `longest`: the encoder's limit of tokens.
    """
    total, count = sum(lengths), len(lengths)
    for tokens in TOKENS:
        for sequences in SEQUENCES if total <= tokens <= most else ():
            bucket = Bucket(tokens, sequences, min(tokens, longest))
            if bucket.fillers(total, count) is not None:
                return bucket
    return None


class Uses:
    """Counts batches until their shape is worth a capture: after `after` batches, doubled by each
    refusal up to MAX_WAIT_BATCHES.
    """

    def __init__(self, after: int = AFTER) -> None:
        self._after = after
        self._left: dict[Hashable, int] = {}
        self._waits: dict[Hashable, int] = {}

    def add(self, key: Hashable) -> bool:
        """Count one batch; return True from the batch on that makes its shape worth a capture."""
        self._left[key] = self._left.get(key, self._after) - 1
        return self._left[key] < 0

    def postpone(self, key: Hashable) -> None:
        """Wait longer after a refused capture."""
        self._waits[key] = self._left[key] = min(
            2 * self._waits.get(key, self._after), MAX_WAIT_BATCHES
        )

    def captured(self, key: Hashable) -> None:
        """Forget the shape. If its graph is dropped, counting starts again."""
        self._left.pop(key, None)
        self._waits.pop(key, None)
