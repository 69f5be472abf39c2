"""Sizes of a request: validation returns them, and pricing reads them. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.v1 import models_pb2

from libs.documents.text_size import TextBudget

MIN_TOKENS_PER_BYTE: Final = 1 / 16
MAX_TOKENS_PER_BYTE: Final = 1.0


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """The images of one item."""

    bytes: int
    """Size of their files."""
    tokens: int
    """Tokens that the model makes of them, computed from the image sizes in their headers."""
    pages: int = 0
    """Pages of documents. The bytes of files that items share are not counted."""


NO_IMAGES: Final = ImageSizes(0, 0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of text in a request, by how often its jobs read them."""

    items: list[int]
    """Bytes of each item."""
    per_sequence_bytes: int = 0
    """Bytes that the model reads again in each sequence, such as labels before each text."""
    per_job_bytes: int = 0
    """Bytes that the model reads once per job, such as a query."""
    sequences_per_item: int = 1
    """Sequences that the model makes of each item, such as one for each label."""
    per_job_texts: int = 1
    """Number of texts in `per_job_bytes`."""
    images: Mapping[int, ImageSizes] = dataclasses.field(default_factory=dict)
    """Images of items that have some, by the item's index."""
    per_job_images: ImageSizes = NO_IMAGES
    """Images of a query, which the model reads once per job."""
    chunks: Sequence[int] = ()
    """Estimated number of each item's chunks or windows; empty: items are not divided."""
    generated: Sequence[int] = ()
    """Tokens that a model may generate for each item; empty: it generates none."""
    budgets: Sequence[TextBudget] = ()
    """Maximum pages and text of each item's document, if items are divided into chunks."""

    @property
    def read(self) -> list[int]:
        """Return the bytes that a worker reads for each item, with those of its sequences."""
        repeated = self.per_sequence_bytes * self.sequences_per_item
        found = [size + repeated for size in self.items]
        for index, own in self.images.items():
            found[index] += own.bytes
        return found


def tokens_per_byte(card: models_pb2.ModelCard | None, default: float) -> float:
    """Return the tokens per byte of text that workers have measured for a model, limited to
    MIN_TOKENS_PER_BYTE to MAX_TOKENS_PER_BYTE.

    Args:
        default: Returned for a model without a measurement.
    """
    rate = (card.tokens_per_byte if card is not None else 0.0) or default
    return min(max(rate, MIN_TOKENS_PER_BYTE), MAX_TOKENS_PER_BYTE)
