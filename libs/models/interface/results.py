"""The results that `PackedModel.finish` returns, in numpy and without protobuf.

`services/worker/mesh/codec.py` serialises them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Extraction
from shoal.tokens import Tokens

from libs.models.interface.work import DataType


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array as tensor.proto stores it.

    Attributes:
        shape: Counts numbers, also for binary.
        values: The stored numbers, little-endian, so `values.tobytes()` is the message's `data`:
            float32, float16, uint16 (the bits of bfloat16), int8, uint8, or uint8 with eight
            numbers a byte (binary).
        scale: One float32 a row; None where tensor.proto leaves it empty.
        offset: As `scale`.
    """

    data_type: DataType
    shape: tuple[int, ...]
    values: NDArray[np.generic]
    scale: NDArray[np.float32] | None = None
    offset: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Rows of different lengths, concatenated: values [all tokens, dimensions]; offsets [rows + 1],
    the first 0.
    """

    values: StoredArray
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class SparseRows:
    """A sparse matrix in CSR form. Row i has the columns `indices[offsets[i]:offsets[i + 1]]`,
    ascending.
    """

    columns: int
    offsets: list[int]
    indices: NDArray[np.uint32]
    values: StoredArray
    truncated: bool = False
    """True if a row had more numbers than its share of the answer holds. The largest are kept."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of texts. Text i has the chunks `offsets[i]:offsets[i + 1]`.

    Attributes:
        starts: First code point of each chunk in its text.
        ends: Code point after each chunk.
        tokens: Number of tokens that each chunk's vectors are computed from.
        pages: Page of its document on which each chunk begins, 0 for a text; empty without
            documents.
        texts: Text of each chunk; empty if they are not returned.
        continues: The first chunks are further ones of the text before; of a part of an answer.
    """

    offsets: list[int]  # [texts + 1], the first 0
    starts: list[int]
    ends: list[int]
    tokens: list[int]
    pages: Sequence[int] = ()
    texts: Sequence[str] = ()
    continues: bool = False


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """Row i is for text i, or for chunk i of chunked texts. Representations that were not requested
    are None.
    """

    dense: StoredArray | None = None  # [texts or chunks, dimensions]
    sparse: SparseRows | None = None
    multi_vector: RaggedRows | None = None
    chunks: Chunks | None = None


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Scores of documents. Higher is better."""

    scores: NDArray[np.float32]  # [documents]


@dataclass(frozen=True, slots=True)
class ExtractResult:
    """Entry i for item i: entities are ordered by start, and labels, relations and regions best
    first.

    Attributes:
        output_tokens: Number of generated tokens, including stop tokens.
    """

    items: list[Extraction]
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """Entry i for text i.

    Attributes:
        max_tokens: The model's limit.
    """

    items: list[Tokens]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class DetokenizeResult:
    """Text i for sequence i."""

    texts: list[str]


Result = EncodeResult | ScoreResult | ExtractResult | TokenizeResult | DetokenizeResult
