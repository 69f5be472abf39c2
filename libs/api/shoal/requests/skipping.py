"""Results with empty rows for skipped items, and results for no items. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import InternalError
from shoal.results import (
    Chunks,
    DataType,
    EncodeResult,
    Extraction,
    ExtractResult,
    Form,
    Ragged,
    ScoreResult,
    Skipped,
    Sparse,
    Timings,
    Usage,
    Vectors,
)
from shoal.tokens import DetokenizeResult, TokenizeResult

_EMPTY = Usage(0), Timings(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), ""
NO_SCORES = ScoreResult(np.zeros(0, np.float32), np.zeros(0, np.int64), *_EMPTY)
NO_EXTRACTIONS = ExtractResult((), *_EMPTY)
NO_TOKENS = TokenizeResult((), 0, *_EMPTY)
NO_TEXTS = DetokenizeResult((), *_EMPTY)
_STORED: dict[DataType, type[np.number[Any]]] = {
    "float16": np.float16,
    "int8": np.int8,
    "uint8": np.uint8,
    "binary": np.uint8,
}


def no_vectors(
    forms: Sequence[Form], data_type: DataType, dimensions: int, *, is_divided: bool = False
) -> EncodeResult:
    """Return the result for no items: [0, dimensions], where those are known, in each form. Without
    `forms` a dense one: the model's own default is not known here.
    """
    none = np.zeros(0, np.int64)
    stored = _STORED.get(data_type, np.float32)
    width = -(-dimensions // 8) if data_type == "binary" else dimensions
    scale, offset = (
        np.zeros(0, np.float32) if data_type in kinds else None
        for kinds in (("int8", "uint8"), ("uint8",))
    )
    return EncodeResult(
        Vectors(np.zeros((0, width), stored), data_type, dimensions, scale, offset)
        if "dense" in (forms or ["dense"])
        else None,
        Sparse(np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros(1, np.int64), (0, 0))
        if "sparse" in forms
        else None,
        Ragged(np.zeros((0, dimensions), np.float32), np.zeros(1, np.int64))
        if "multi_vector" in forms
        else None,
        *_EMPTY,
        _chunks=Chunks(np.zeros(1, np.int64), none, none, none) if is_divided else None,
    )


def with_skipped_vectors(
    result: EncodeResult, kept: Sequence[int], skipped: Sequence[Skipped]
) -> EncodeResult:
    """Expand the result for the items at `kept` to all items: rows of the `skipped` ones are NaN,
    or have no entries.
    """
    rows, forms = len(kept) + len(skipped), result.representations
    if result.is_divided:  # Rows are chunks; skipped items have none.
        chunks = replace(result.chunks, offsets=_bounds(result.chunks.offsets, kept, rows))
        return replace(result, skipped=tuple(skipped), _chunks=chunks)
    return EncodeResult(
        _vectors(result.vectors, kept, rows) if "dense" in forms else None,
        _sparse(result.sparse, kept, rows) if "sparse" in forms else None,
        _ragged(result.multi_vector, kept, rows) if "multi_vector" in forms else None,
        result.usage,
        result.timings,
        result.revision,
        tuple(skipped),
        embedding_id=result.embedding_id,
        alias=result.alias,
    )


def with_skipped_scores(
    result: ScoreResult, kept: Sequence[int], skipped: Sequence[Skipped]
) -> ScoreResult:
    """Expand the result for the documents at `kept` to all documents: the `skipped` ones have the
    score NaN and no rank.
    """
    scores = _rows(result.scores, kept, len(kept) + len(skipped))
    return replace(
        result,
        scores=scores,
        ranking=np.asarray(kept, np.int64)[result.ranking],
        skipped=tuple(skipped),
    )


def with_skipped_extractions(
    result: ExtractResult, kept: Sequence[int], skipped: Sequence[Skipped]
) -> ExtractResult:
    """Expand the result for the items at `kept` to all items: the `skipped` ones have empty
    extractions.
    """
    _check(len(result), kept)
    results = [Extraction()] * (len(kept) + len(skipped))
    for index, found in zip(kept, result.results, strict=True):
        results[index] = found
    return replace(result, results=tuple(results), skipped=tuple(skipped))


def _vectors(vectors: Vectors, kept: Sequence[int], rows: int) -> Vectors:
    scales = (
        None if part is None else _rows(part, kept, rows)
        for part in (vectors.scale, vectors.offset)
    )
    return Vectors(_rows(vectors.array, kept, rows), vectors.data_type, vectors.dimensions, *scales)


def _sparse(sparse: Sparse, kept: Sequence[int], rows: int) -> Sparse:
    return replace(sparse, indptr=_bounds(sparse.indptr, kept, rows), shape=(rows, sparse.shape[1]))


def _ragged(ragged: Ragged, kept: Sequence[int], rows: int) -> Ragged:
    return replace(ragged, offsets=_bounds(ragged.offsets, kept, rows))


def _rows(array: npt.NDArray[Any], kept: Sequence[int], rows: int) -> npt.NDArray[Any]:
    """[rows, …] with the rows of `array` at `kept`; the others are NaN, or 0 where numbers are
    integers.
    """
    _check(len(array), kept)
    filled = np.full(
        (rows, *array.shape[1:]),
        np.nan if np.issubdtype(array.dtype, np.floating) else 0,
        array.dtype,
    )
    filled[list(kept)] = array
    return filled


def _bounds(
    offsets: npt.NDArray[np.int64], kept: Sequence[int], rows: int
) -> npt.NDArray[np.int64]:
    """Row offsets for all rows, those not at `kept` without entries."""
    _check(len(offsets) - 1, kept)
    lengths = np.zeros(rows + 1, np.int64)
    lengths[np.asarray(kept, np.int64) + 1] = np.diff(offsets)
    return np.cumsum(lengths)


def _check(rows: int, kept: Sequence[int]) -> None:
    if rows != len(kept):
        raise InternalError(f"the mesh returned {rows} rows for {len(kept)} items")
