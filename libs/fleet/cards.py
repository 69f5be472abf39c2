"""Merge the cards that several workers report of a model into one. Pure.

1. The part from the model's files and the catalog is the same on every worker, unless some have
  other files. Then the last card that was new for its worker wins; a worker that repeats its card
  changes nothing.
2. Measurements (bytes, data type, tokens per byte) differ between workers, stay in each one's
  record, and are merged here.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

from shoal.v1 import models_pb2

from libs.fleet.snapshot import WorkerModelRecord

SAME_RATE: Final = 0.05
"""Tokens per byte that differ by at most this share count as equal: estimates change with every
text, and each change is written to Redis.
"""


def without_measures(card: models_pb2.ModelCard) -> models_pb2.ModelCard:
    """Return the part of the card that is from files and catalog."""
    plain = models_pb2.ModelCard()
    plain.CopyFrom(card)
    for field in ("bytes", "data_type", "tokens_per_byte"):
        plain.ClearField(field)
    return plain


def card_digest(card: models_pb2.ModelCard) -> int:
    """Return a digest of the part from files and catalog, to compare cards within this process'
    lifetime.
    """
    return hash(without_measures(card).SerializeToString(deterministic=True))


def merged(
    plain: models_pb2.ModelCard, known: models_pb2.ModelCard, copies: Sequence[WorkerModelRecord]
) -> models_pb2.ModelCard:
    """Return `plain` with the measurements of the workers' `copies`; values that none has measured
    stay as in `known`.

    Bytes and data type are those of the largest copy, tokens per byte are the median of the
    measurements.
    """
    card = models_pb2.ModelCard()
    card.CopyFrom(plain)
    largest = max(
        (copy for copy in copies if copy.data_type),
        key=lambda copy: (copy.bytes, copy.data_type),
        default=None,
    )
    card.bytes, card.data_type = (
        (known.bytes, known.data_type) if largest is None else (largest.bytes, largest.data_type)
    )
    rates = [copy.tokens_per_byte for copy in copies if copy.tokens_per_byte > 0]
    rate = median(rates) if rates else known.tokens_per_byte
    is_same = abs(rate - known.tokens_per_byte) <= SAME_RATE * known.tokens_per_byte
    card.tokens_per_byte = known.tokens_per_byte if is_same else rate
    return card
