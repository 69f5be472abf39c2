"""Late interaction (ColBERT's MaxSim, arXiv 2004.12832): each query token takes its best document token, and the best are summed.

Called when multi-vector scores are computed in the worker, outside a forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def maxsim(query: Tensor, documents: Tensor, lengths: Sequence[int], *, at_once: int = 1 << 24) -> Tensor:
    """Scores [documents], float32, of documents laid end to end: query [query tokens, dim], documents [tokens, dim].

    `at_once`: similarities held at a time, as numbers, which bounds memory (64 MiB) whatever the number of documents.
    """
    query = query.float()
    scores = []
    start = 0
    for chunk in _chunks(lengths, max(1, at_once // query.shape[0])):
        tokens = sum(chunk)
        similarity = documents[start : start + tokens].float() @ query.T  # [tokens, query tokens]
        sizes = torch.tensor(chunk, device=documents.device)
        scores.append(torch.segment_reduce(similarity, "max", lengths=sizes, axis=0, unsafe=True).sum(1))
        start += tokens
    return torch.cat(scores) if scores else query.new_zeros(0)


def _chunks(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Consecutive documents of at most `budget` tokens together; a longer document stands alone."""
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
