"""Merges the results of the requests of one call, in order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shoal.errors import InternalError, ModelChanged
from shoal.requests.skipping import NO_EXTRACTIONS, NO_SCORES, NO_TEXTS, NO_TOKENS
from shoal.results import (
    Chunks,
    EncodeResult,
    ExtractResult,
    Integers,
    Numbers,
    Ragged,
    ResolvedAlias,
    ScoreResult,
    Sparse,
    Timings,
    Usage,
    Vectors,
)
from shoal.tokens import DetokenizeResult, TokenizeResult

N = TypeVar("N", bound=np.number)


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
        _usage([part.usage for part in parts]),
        _timings([part.timings for part in parts]),
        _revision([part.revision for part in parts]),
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
    usage, timings = (
        _usage([part.usage for part in parts]),
        _timings([part.timings for part in parts]),
    )
    revision = _revision([part.revision for part in parts])
    return ScoreResult(scores, ranking, usage, timings, revision, alias=_alias(parts))


def merge_extract(parts: Sequence[ExtractResult]) -> ExtractResult:
    """Raise ModelChanged if revisions differ."""
    if len(parts) < 2:
        return parts[0] if parts else NO_EXTRACTIONS
    results = tuple(result for part in parts for result in part.results)
    usage, timings = (
        _usage([part.usage for part in parts]),
        _timings([part.timings for part in parts]),
    )
    revision = _revision([part.revision for part in parts])
    return ExtractResult(results, usage, timings, revision, alias=_alias(parts))


def merge_tokenize(parts: Sequence[TokenizeResult]) -> TokenizeResult:
    """Raise ModelChanged if revisions differ."""
    if len(parts) < 2:
        return parts[0] if parts else NO_TOKENS
    texts = tuple(text for part in parts for text in part.texts)
    usage, timings = (
        _usage([part.usage for part in parts]),
        _timings([part.timings for part in parts]),
    )
    return TokenizeResult(
        texts, parts[0].max_tokens, usage, timings, _revision([part.revision for part in parts])
    )


def merge_detokenize(parts: Sequence[DetokenizeResult]) -> DetokenizeResult:
    """Raise ModelChanged if revisions differ."""
    if len(parts) < 2:
        return parts[0] if parts else NO_TEXTS
    texts = tuple(text for part in parts for text in part.texts)
    usage, timings = (
        _usage([part.usage for part in parts]),
        _timings([part.timings for part in parts]),
    )
    return DetokenizeResult(texts, usage, timings, _revision([part.revision for part in parts]))


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


def _usage(parts: Sequence[Usage]) -> Usage:
    counts = ("input_tokens", "image_tokens", "output_tokens", "truncated_items")
    return Usage(
        **{name: sum(getattr(part, name) for part in parts) for name in counts},
        truncated_query=any(part.truncated_query for part in parts),
    )


def _timings(parts: Sequence[Timings]) -> Timings:
    return Timings(
        max(part.queue_seconds for part in parts),
        max(part.prepare_seconds for part in parts),
        max(part.wait_seconds for part in parts),
        max(part.forward_seconds for part in parts),
        max(part.finish_seconds for part in parts),
        max(part.total_seconds for part in parts),
    )


def _revision(parts: Sequence[str]) -> str:
    other = next((revision for revision in parts if revision != parts[0]), None)
    if other is not None:
        raise ModelChanged(
            f"the model's revision changed from {parts[0]} to {other} during this call; repeat "
            "the call, or request model@revision"
        )
    return parts[0]


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
