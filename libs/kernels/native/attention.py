"""Varlen attention by the native library: packed queries, keys and values are read in place."""

from __future__ import annotations

import math
from struct import Struct
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from libs.kernels.layout import BatchLayout
from libs.kernels.native.library import TYPES, Native, native

_CALL: Final = Struct("7P8q7if")
"""`struct Attention` of source/attention/attention.h."""
ALL: Final = 1 << 30
"""A window that includes every key."""
_PADDING: Final = 32
"""Columns at both ends of a table of biases that whole-vector reads may touch."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BatchLayout,
    scale: float,
    causal: bool,
    window: int | None,
    bias: Tensor | None,
) -> Tensor | None:
    """Compute `varlen_attention`; None if the library does not support it: it is missing, another
    device or type, non-adjacent elements of a head, gradients.
    """
    if not q.is_cpu or (library := native()) is None:
        return None
    return attend_with(library, q, k, v, layout, scale, causal, window, bias)


def attend_with(
    library: Native,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BatchLayout,
    scale: float,
    causal: bool,
    window: int | None,
    bias: Tensor | None,
) -> Tensor | None:
    """Compute `attend` with this library."""
    kind = TYPES.get(q.dtype)
    if kind is None or not (q.dtype == k.dtype == v.dtype) or q.requires_grad:
        return None
    (q_row, q_head, q_step), (k_row, k_head, k_step), (v_row, v_head, v_step) = (
        q.stride(),
        k.stride(),
        v.stride(),
    )
    (queries, heads, dim), (keys, kv_heads, _) = q.shape, k.shape
    if (
        not q_step == k_step == v_step == 1
        or v.shape != k.shape
        or (queries, keys) != _rows(layout)
    ):
        return None
    biases, middle = (None, 0) if bias is None else table(bias, layout)
    left = ALL if window is None else window
    out = q.new_empty((queries, heads, dim))
    packed = _CALL.pack(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        layout.cu_queries.data_ptr(),
        layout.cu_keys.data_ptr(),
        0 if biases is None else biases.data_ptr(),
        q_row,
        q_head,
        k_row,
        k_head,
        v_row,
        v_head,
        0 if biases is None else biases.shape[1],
        middle,
        layout.cu_queries.shape[0] - 1,
        heads,
        kv_heads,
        dim,
        min(left, ALL),
        0 if causal else min(left, ALL),
        torch.get_num_threads(),
        scale,
    )
    return out if library.attention(packed, kind) == 0 else None


def _rows(layout: BatchLayout) -> object:
    """Return the expected numbers of queries and keys, counted once per batch."""
    rows = layout.memo.get(_rows)
    if rows is None:
        last = layout.runs[-1]
        rows = layout.memo[_rows] = (
            last.query + last.count * last.queries,
            last.key + last.count * last.keys,
        )
    return rows


def table(bias: Tensor, layout: BatchLayout) -> tuple[Tensor, int]:
    """Return the bias times log2(e) by query - key, so adjacent queries are adjacent, and the
    column of distance 0.

    Built once per batch, for its distances. [heads, 2 * reach + 1] -> [heads, 2 * (shorter reach +
    _PADDING) + 1]
    """
    made = layout.memo.get(table)
    if not isinstance(made, tuple) or made[0] is not bias:
        middle = bias.shape[1] // 2
        reach = min(middle, layout.max_positions)
        used = bias[:, middle - reach : middle + reach + 1].float()
        biases = F.pad(used.flip(1), (_PADDING, _PADDING)).mul_(math.log2(math.e))
        made = layout.memo[table] = (bias, biases, reach + _PADDING)
    return made[1], made[2]
