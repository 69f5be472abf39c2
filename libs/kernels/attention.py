"""Attention over packed sequences: the one seam behind which every device's kernel stands.

Called once a layer. On CUDA: flash-attn where it is installed, else torch's own varlen kernel. Elsewhere, and for what those
kernels do not take (float32, a position bias), runs of equally long sequences are viewed as one dense batch: no padding, no masks
and no copy of the whole. Nothing here reads a tensor's value on the host: what the host must know comes as plain numbers
(`groups`, `max_seqlen`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

Group = tuple[int, int, int]
"""A run of neighbours of equal length: (row of its first token, number of sequences, length of each)."""

# Below and above these sizes torch's fused kernel beats softmax between two matrix products (measured on AVX512-BF16 cores, torch
# 2.13).
_SDPA_UP_TO_TOKENS_BF16 = 48
_SDPA_FROM_LENGTH_FP32 = 192

_HALF = (torch.bfloat16, torch.float16)
_CudaKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, tuple[int, int]], Tensor]


def equal_length_groups(lengths: Sequence[int]) -> tuple[Group, ...]:
    """The runs of equal neighbours in `lengths`, which are packed in this order."""
    groups: list[Group] = []
    start = 0
    for length, run in groupby(lengths):
        count = sum(1 for _ in run)
        groups.append((start, count, length))
        start += count * length
    return tuple(groups)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    groups: Sequence[Group],
    scale: float,
    causal: bool = False,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(q k' * scale + bias) v within each sequence.

    q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim], where kv_heads divides heads. `window`: tokens visible on each side of
    the query. `bias` [heads, 2 * reach + 1]: added to the scores by distance, column `reach + key - query`; `reach` is at
    least max_seqlen - 1. Returns [tokens, heads, dim].
    """
    if q.is_cuda and q.dtype in _HALF and bias is None:
        sides = (-1 if window is None else window, 0 if causal else -1 if window is None else window)
        return _cuda_kernel()(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale, sides)
    out = q.new_empty(q.shape)
    for start, count, length in groups:
        rows = slice(start, start + count * length)
        added = _added_scores(length, causal, window, bias, q)
        out[rows] = _dense(q[rows], k[rows], v[rows], count, scale, added)
    return out


def row_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, groups: Sequence[Group], scale: float
) -> Tensor:
    """Attention of one query a sequence, which sees the whole of its sequence. q: [sequences, heads, dim]; returns the same
    shape.
    """
    if q.is_cuda and q.dtype in _HALF:
        starts = torch.arange(q.shape[0] + 1, device=q.device, dtype=torch.int32)
        return _cuda_kernel()(q, k, v, starts, cu_seqlens, 1, max_seqlen, scale, (-1, -1))
    out = q.new_empty(q.shape)
    first = 0
    for start, count, length in groups:
        rows = slice(start, start + count * length)
        out[first : first + count] = _dense(q[first : first + count], k[rows], v[rows], count, scale, None)
        first += count
    return out


def _dense(q: Tensor, k: Tensor, v: Tensor, count: int, scale: float, added: Tensor | None) -> Tensor:
    """One run: q [count * queries, heads, dim], k and v [count * length, kv_heads, dim], `added` [1 or heads, queries, length]."""
    heads, dim = q.shape[1:]
    queries, length = q.shape[0] // count, k.shape[0] // count
    if _prefers_fused(q.dtype, count, length):
        q, k, v = (t.view(count, -1, t.shape[1], dim).transpose(1, 2) for t in (q, k, v))
        fused = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale, enable_gqa=k.shape[1] != heads)
        return fused.transpose(1, 2).reshape(-1, heads, dim)
    shared = k.shape[1]
    # Queries that share a key head become more rows of one product, so keys are never repeated.
    q = q.view(count, queries, shared, heads // shared, dim).permute(0, 2, 3, 1, 4).reshape(count * shared, -1, dim)
    k, v = (t.view(count, length, shared, dim).transpose(1, 2).reshape(count * shared, length, dim) for t in (k, v))
    if added is None:
        scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=scale)
    else:
        added = added.expand(count, heads, queries, length).reshape(count * shared, -1, length)
        scores = torch.baddbmm(added, q, k.transpose(1, 2), alpha=scale)
    mixed = torch.bmm(scores.softmax(-1), v).view(count, heads, queries, dim)
    return mixed.transpose(1, 2).reshape(-1, heads, dim)


def _prefers_fused(dtype: torch.dtype, count: int, length: int) -> bool:
    if dtype in _HALF:
        return count * length <= _SDPA_UP_TO_TOKENS_BF16
    return length >= _SDPA_FROM_LENGTH_FP32


def _added_scores(length: int, causal: bool, window: int | None, bias: Tensor | None, like: Tensor) -> Tensor | None:
    """What is added to one sequence's scores: [1 or heads, length, length] in the type of `like`, or None."""
    if bias is not None:
        reach = bias.shape[1] // 2
        # Row i of the score matrix is the stretch of the table that begins at reach - i: overlapping views, reversed.
        added = bias.unfold(1, length, 1)[:, reach - length + 1 : reach + 1].flip(1)
    elif causal or window is not None:
        added = like.new_zeros(1, length, length)
    else:
        return None
    if causal or window is not None:
        position = torch.arange(length, device=like.device)
        distance = position - position[:, None]
        unseen = distance > (0 if causal else window or 0)
        if window is not None:
            unseen |= distance < -window
        added = added.masked_fill(unseen, float("-inf"))
    return added


@cache
def _cuda_kernel() -> _CudaKernel:
    return _flash_attn() if importlib.util.find_spec("flash_attn") is not None else _torch_varlen()


def _flash_attn() -> _CudaKernel:
    kernel = importlib.import_module("flash_attn").flash_attn_varlen_func

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, sides: tuple[int, int]
    ) -> Tensor:
        out: Tensor = kernel(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, window_size=sides)
        return out

    return attend


def _torch_varlen() -> _CudaKernel:
    kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, sides: tuple[int, int]
    ) -> Tensor:
        grouped = k.shape[1] != q.shape[1]
        out: Tensor = kernel(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=sides, enable_gqa=grouped)
        return out

    return attend
