"""Attention over packed sequences: the one seam behind which every device's kernel stands.

Called once a layer. On CUDA: flash-attn where it is installed, else torch's own varlen kernel. Elsewhere, and for what those
kernels do not take (float32, a position bias), runs of equally long sequences are viewed as one dense batch: no padding, no masks
and no copy of the whole. Nothing here reads a tensor's value on the host: what the host must know comes as plain numbers
(`layout.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from libs.kernels.layout import Layout, Run

# Below and above these sizes torch's fused kernel beats softmax between two matrix products (measured on AVX512-BF16 cores, torch
# 2.13).
_SDPA_UP_TO_TOKENS_BF16 = 48
_SDPA_FROM_LENGTH_FP32 = 192

_HALF = (torch.bfloat16, torch.float16)
_CudaKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, tuple[int, int]], Tensor]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(q k' * scale + bias) v within each sequence of `layout`.

    q: [queries, heads, dim]; k, v: [keys, kv_heads, dim], where kv_heads divides heads. A query's place among the keys is its row
    plus the run's `offset`. `window`: keys visible on each side of the query. `bias` [heads, 2 * reach + 1]: added to the scores by
    distance, column `reach + key - query`; `reach` is at least the largest distance. Returns [queries, heads, dim].
    """
    masked = causal or window is not None
    if q.is_cuda and q.dtype in _HALF and bias is None and (layout.ends_align or not masked):
        sides = (-1 if window is None else window, 0 if causal else -1 if window is None else window)
        ends = layout.cu_queries, layout.cu_keys, layout.max_queries, layout.max_keys
        return _cuda_kernel()(q, k, v, *ends, scale, sides)
    out = q.new_empty(q.shape)
    for run in layout.runs:
        queries = slice(run.query, run.query + run.count * run.queries)
        keys = slice(run.key, run.key + run.count * run.keys)
        added = _added_scores(run, causal, window, bias, q)
        out[queries] = _dense(q[queries], k[keys], v[keys], run.count, scale, added)
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


def _added_scores(run: Run, causal: bool, window: int | None, bias: Tensor | None, like: Tensor) -> Tensor | None:
    """What is added to the scores of each sequence of a run: [1 or heads, queries, keys] in the type of `like`, or None."""
    if bias is None and not causal and window is None:
        return None
    query = torch.arange(run.offset, run.offset + run.queries, device=like.device)
    distance = torch.arange(run.keys, device=like.device) - query[:, None]
    added = like.new_zeros(1, run.queries, run.keys) if bias is None else bias[:, distance + bias.shape[1] // 2]
    if causal or window is not None:
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
