"""Varlen attention by the native library: packed queries, keys and values are read where they
lie.
"""

from __future__ import annotations

import math
from struct import Struct
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from libs.kernels.layout import Layout
from libs.kernels.native.library import TYPES, Native, native

_CALL: Final = Struct("7P8q7if")
"""`struct Attention` of source/attention/attention.h."""
ALL: Final = 1 << 30
"""A window that takes in every key."""
_SPARE: Final = 32
"""Columns at both ends of a table of biases, which whole vectors may be read from."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    scale: float,
    causal: bool,
    window: int | None,
    bias: Tensor | None,
) -> Tensor | None:
    """`varlen_attention`, or None where the library does not take this: there is none, another
    device or type, elements of a head that are not adjacent, gradients."""
    if not q.is_cpu or (library := native()) is None:
        return None
    return attend_with(library, q, k, v, layout, scale, causal, window, bias)


def attend_with(
    library: Native,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    scale: float,
    causal: bool,
    window: int | None,
    bias: Tensor | None,
) -> Tensor | None:
    """`attend` with this library."""
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


def _rows(layout: Layout) -> object:
    """How many queries and keys there must be; counted once per batch."""
    rows = layout.memo.get(_rows)
    if rows is None:
        last = layout.runs[-1]
        rows = layout.memo[_rows] = (
            last.query + last.count * last.queries,
            last.key + last.count * last.keys,
        )
    return rows


def table(bias: Tensor, layout: Layout) -> tuple[Tensor, int]:
    """The bias times log2(e) by query - key, so that neighbouring queries are neighbours, and the
    column of distance 0.

    Made once per batch, of the distances that it has. [heads, 2 * reach + 1] -> [heads, 2 *
    (shorter reach + _SPARE) + 1]
    """
    made = layout.memo.get(table)
    if not isinstance(made, tuple) or made[0] is not bias:
        middle = bias.shape[1] // 2
        reach = min(middle, layout.max_positions)
        used = bias[:, middle - reach : middle + reach + 1].float()
        biases = F.pad(used.flip(1), (_SPARE, _SPARE)).mul_(math.log2(math.e))
        made = layout.memo[table] = (bias, biases, reach + _SPARE)
    return made[1], made[2]
