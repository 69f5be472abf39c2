"""Merges the results of the requests of one call, in order, and adds empty rows for skipped items.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from shoal.errors import InternalError, ModelChanged
from shoal.extractions import Extraction
from shoal.results import (
    Chunks,
    DataType,
    EncodeResult,
    ExtractResult,
    Form,
    Integers,
    Numbers,
    Ragged,
    ResolvedAlias,
    ScoreResult,
    Skipped,
    Sparse,
    Timings,
    Usage,
    Vectors,
)
from shoal.tokens import DetokenizeResult, TokenizeResult

N = TypeVar("N", bound=np.number)


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


class _Result(Protocol):
    """The common part of all results."""

    @property
    def usage(self) -> Usage: ...
    @property
    def timings(self) -> Timings: ...
    @property
    def revision(self) -> str: ...


def merge_encode(parts: Sequence[EncodeResult]) -> EncodeResult:
    """There is at least one part. Raises InternalError if shapes differ, ModelChanged if revisions
    or embedding ids do.
    """
    if len(parts) == 1:
        return parts[0]
    return EncodeResult(
        _vectors([part.vectors for part in parts if "dense" in part.representations]),
        _sparse([part.sparse for part in parts if "sparse" in part.representations]),
        _ragged([part.multi_vector for part in parts if "multi_vector" in part.representations]),
        *_totals(parts),
        embedding_id=merged_embedding_id([part.embedding_id for part in parts]),
        _chunks=_chunks([part.chunks for part in parts if part.is_divided]),
        alias=_alias(parts),
    )


def merge_score(parts: Sequence[ScoreResult], *, top_n: int) -> ScoreResult:
    """`top_n` 0 ranks all documents; equal scores keep document order. Raises as `merge_encode`
    does.
    """
    if len(parts) < 2:
        return parts[0] if parts else NO_SCORES
    scores = _joined([part.scores for part in parts])
    ranking = np.argsort(-scores, kind="stable")[: top_n or None]
    ranking.flags.writeable = False
    return ScoreResult(scores, ranking, *_totals(parts), alias=_alias(parts))


def merge_extract(parts: Sequence[ExtractResult]) -> ExtractResult:
    """Raise ModelChanged if revisions differ."""
    if len(parts) < 2:
        return parts[0] if parts else NO_EXTRACTIONS
    results = tuple(result for part in parts for result in part.results)
    return ExtractResult(results, *_totals(parts), alias=_alias(parts))


def merge_tokenize(parts: Sequence[TokenizeResult]) -> TokenizeResult:
    """Raise ModelChanged if revisions differ."""
    if len(parts) < 2:
        return parts[0] if parts else NO_TOKENS
    texts = tuple(text for part in parts for text in part.texts)
    return TokenizeResult(texts, parts[0].max_tokens, *_totals(parts))


def merge_detokenize(parts: Sequence[DetokenizeResult]) -> DetokenizeResult:
    """Raise ModelChanged if revisions differ."""
    if len(parts) < 2:
        return parts[0] if parts else NO_TEXTS
    texts = tuple(text for part in parts for text in part.texts)
    return DetokenizeResult(texts, *_totals(parts))


def _joined(arrays: Sequence[npt.NDArray[N]]) -> npt.NDArray[N]:
    joined = _shared_base(arrays)
    try:
        joined = np.concatenate(arrays) if joined is None else joined
    except (TypeError, ValueError) as error:
        raise InternalError(
            f"the mesh answered the parts of this call in different shapes: {error}"
        ) from error
    joined.flags.writeable = False  # As the arrays of an unsplit answer are.
    return joined


def _shared_base(arrays: Sequence[npt.NDArray[N]]) -> npt.NDArray[N] | None:
    """Return the array of which these are consecutive rows, cut to them; None if they are not rows
    of one array and must be copied.
    """
    whole = arrays[0].base
    if (
        not isinstance(whole, np.ndarray)
        or not whole.nbytes
        or whole.shape[1:] != arrays[0].shape[1:]
    ):
        return None
    begin = at = arrays[0].ctypes.data
    for array in arrays:
        if (
            array.base is not whole
            or array.dtype != whole.dtype
            or array.ctypes.data != at
            or not array.flags.c_contiguous
        ):
            return None
        at += array.nbytes
    first, end = ((address - whole.ctypes.data) // whole.strides[0] for address in (begin, at))
    return whole if end - first == len(whole) else whole[first:end]


def _vectors(parts: Sequence[Vectors]) -> Vectors | None:
    if not parts:
        return None
    scales = [part.scale for part in parts if part.scale is not None]
    offsets = [part.offset for part in parts if part.offset is not None]
    return Vectors(
        _joined([part.array for part in parts]),
        parts[0].data_type,
        parts[0].dimensions,
        _joined(scales) if scales else None,
        _joined(offsets) if offsets else None,
    )


def _offsets(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Row boundaries of the parts, each shifted by the ends of those before it."""
    starts = np.cumsum([0, *(int(part[-1]) for part in parts)])
    return _joined(
        [
            np.zeros(1, np.int64),
            *(part[1:] + start for part, start in zip(parts, starts, strict=False)),
        ]
    )


def _ragged(parts: Sequence[Ragged]) -> Ragged | None:
    if not parts:
        return None
    return Ragged(
        _joined([part.values for part in parts]), _offsets([part.offsets for part in parts])
    )


def _sparse(parts: Sequence[Sparse]) -> Sparse | None:
    if not parts:
        return None
    data: Numbers = _joined([part.data for part in parts])
    indices = _joined([part.indices for part in parts])
    shape = (sum(len(part) for part in parts), parts[0].shape[1])
    return Sparse(
        data,
        indices,
        _offsets([part.indptr for part in parts]),
        shape,
        any(part.truncated for part in parts),
    )


def _chunks(parts: Sequence[Chunks]) -> Chunks | None:
    if not parts:
        return None
    starts, ends, tokens = (
        _joined([getattr(part, name) for part in parts]) for name in ("starts", "ends", "tokens")
    )
    return Chunks(
        _chunk_offsets(parts),
        starts,
        ends,
        tokens,
        pages=_pages(parts),
        chunk_texts=[text for part in parts for text in part.chunk_texts],
    )


def _chunk_offsets(parts: Sequence[Chunks]) -> npt.NDArray[np.int64]:
    """Return the first chunk of each item, and the end. An item may continue in the next part."""
    starts = np.cumsum([0, *(len(part.starts) for part in parts)])
    found = [np.zeros(1, np.int64)]
    for part, start in zip(parts, starts, strict=False):
        if part.continues:
            found[-1] = found[-1][:-1]
        found.append(part.offsets[1:] + start)
    return _joined(found)


def _pages(parts: Sequence[Chunks]) -> Integers | None:
    """Return the pages of all chunks: 0 for those of parts without a document."""
    if all(part.pages is None for part in parts):
        return None
    return _joined(
        [np.zeros_like(part.starts) if part.pages is None else part.pages for part in parts]
    )


def _totals(parts: Sequence[_Result]) -> tuple[Usage, Timings, str]:
    """Return the sums of tokens, the longest times, and the revision. Raises ModelChanged if two
    revisions answered.
    """
    first = parts[0].revision
    other = next((part.revision for part in parts if part.revision != first), None)
    if other is not None:
        raise ModelChanged(
            f"the model's revision changed from {first} to {other} during this call; repeat "
            "the call, or request model@revision"
        )
    counts = ("input_tokens", "image_tokens", "output_tokens", "truncated_items")
    usage = Usage(
        **{name: sum(getattr(part.usage, name) for part in parts) for name in counts},
        truncated_query=any(part.usage.truncated_query for part in parts),
    )
    longest = (
        max(seconds) for seconds in zip(*(astuple(part.timings) for part in parts), strict=True)
    )
    return usage, Timings(*longest), first


def _alias(
    parts: Sequence[EncodeResult] | Sequence[ScoreResult] | Sequence[ExtractResult],
) -> ResolvedAlias | None:
    """Return the alias as in the last answer. Raises ModelChanged if two models answered."""
    found = [part.alias for part in parts]
    models = {None if alias is None else alias.model for alias in found}
    if len(models) > 1:
        raise ModelChanged(
            "the alias was moved to another model during this call; repeat the call, or request "
            "the model"
        )
    return found[-1]


def merged_embedding_id(parts: Sequence[str]) -> str:
    """Return the id of the vectors of several answers: without the number format if that differs,
    and empty if an answer has none. Raises ModelChanged if the vectors cannot be compared.
    """
    if len(set(parts)) <= 1:
        return parts[0] if parts else ""
    recipes = sorted({part.partition(".")[0] for part in parts if part})
    if len(recipes) > 1:
        raise ModelChanged(
            f"the model's files, card or adapter changed during this call: its vectors have the "
            f"embedding ids {' and '.join(recipes)}; repeat the call, or request model@revision"
        )
    return recipes[0] if all(parts) else ""


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
    return replace(
        result,
        _vectors=_vectors_of_all(result.vectors, kept, rows) if "dense" in forms else None,
        _sparse=_sparse_of_all(result.sparse, kept, rows) if "sparse" in forms else None,
        _multi_vector=_ragged_of_all(result.multi_vector, kept, rows)
        if "multi_vector" in forms
        else None,
        skipped=tuple(skipped),
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


def _vectors_of_all(vectors: Vectors, kept: Sequence[int], rows: int) -> Vectors:
    scales = (
        None if part is None else _rows(part, kept, rows)
        for part in (vectors.scale, vectors.offset)
    )
    return Vectors(_rows(vectors.array, kept, rows), vectors.data_type, vectors.dimensions, *scales)


def _sparse_of_all(sparse: Sparse, kept: Sequence[int], rows: int) -> Sparse:
    return replace(sparse, indptr=_bounds(sparse.indptr, kept, rows), shape=(rows, sparse.shape[1]))


def _ragged_of_all(ragged: Ragged, kept: Sequence[int], rows: int) -> Ragged:
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
