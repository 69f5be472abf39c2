"""Late interaction (ColBERT's MaxSim, arXiv 2004.12832): the sum over query tokens of the highest
similarity to a document token.

Called when multi-vector scores are computed in the worker, outside a forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from libs.kernels.layout import cumulated
from libs.kernels.rows.segments import reduce


def maxsim(
    query: Tensor, documents: Tensor, lengths: Sequence[int], *, chunk_elements: int = 1 << 24
) -> Tensor:
    """Score documents laid end to end: query [query tokens, dim], documents [tokens, dim] ->
    [documents] float32.

    `chunk_elements`: maximum similarities, and maximum float32 elements of documents, at a time;
    bounds memory (64 MiB each).
    """
    query = query.float()
    scores = []
    start = 0
    for chunk in _chunks(lengths, max(1, chunk_elements // max(query.shape))):
        tokens = sum(chunk)
        similarity = documents[start : start + tokens].float() @ query.T  # [tokens, query tokens]
        scores.append(reduce(similarity, "max", cumulated(chunk, documents.device)).sum(1))
        start += tokens
    return torch.cat(scores) if scores else query.new_zeros(0)


def _chunks(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Yield consecutive documents of at most `budget` tokens together; a longer document is a
    separate group.
    """
    chunk: list[int] = []
    used = 0
    for length in lengths:
        if chunk and used + length > budget:
            yield chunk
            chunk, used = [], 0
        chunk.append(length)
        used += length
    if chunk:
        yield chunk
