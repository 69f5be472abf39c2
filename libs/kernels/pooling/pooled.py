"""Pooling of packed hidden states: one vector per sequence, for all sequences in one launch,
accumulated in float32.

Called by the dense head at the end of a forward. `hidden` is [tokens, hidden] in any float type and
`cu_seqlens` [sequences + 1]; every function returns [sequences, hidden] float32. Definitions follow
sentence-transformers' Pooling module.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libs.kernels.rows.segments import reduce


def cls(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the first token's state."""
    return hidden.index_select(0, cu_seqlens[:-1]).float()


def last(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the last token's state."""
    return hidden.index_select(0, cu_seqlens[1:] - 1).float()


def mean(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the mean over the sequence's tokens."""
    return reduce(hidden, "mean", cu_seqlens)


def maximum(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the maximum of each dimension over the sequence's tokens."""
    return reduce(hidden, "max", cu_seqlens)


def weighted_mean(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the mean weighted by position, 1 for the first token, 2 for the second and so on
    (SGPT, arXiv 2202.08904).
    """
    lengths = cu_seqlens.diff()
    tokens = torch.arange(1, hidden.shape[0] + 1, device=hidden.device, dtype=torch.float32)
    starts = cu_seqlens[:-1].repeat_interleave(lengths, output_size=hidden.shape[0])
    total = reduce(hidden.float() * (tokens - starts)[:, None], "sum", cu_seqlens)
    count = lengths.float()
    return total / (count * (count + 1) / 2)[:, None]
