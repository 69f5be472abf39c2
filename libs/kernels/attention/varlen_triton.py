"""Attention over packed sequences in Triton, for inputs that the flash kernels do not support.

Called by `varlen.py` on CUDA for a bias by distance (T5, MPNet, ALiBi), soft-capped scores (Gemma
2), float32, head sizes that are not a multiple of 8, and masks for sequences with fewer keys than
queries. One program computes a block of queries of one head of one sequence and iterates over their
visible keys, with the online softmax of FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from libs.kernels.layout import BatchLayout

# The device has an instruction for exp2, not for exp.
_LOG2_E = tl.constexpr(1.4426950408889634)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BatchLayout,
    scale: float,
    causal: bool,
    window: int | None,
    bias: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """Compute `varlen_attention` for any head size."""
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    heads, size = q.shape[1:]
    tile, padded = tiles(q.dtype, size)
    blocks = triton.cdiv(layout.max_queries, tile)
    _attend[(blocks, layout.cu_queries.shape[0] - 1, heads)](
        q,
        k,
        v,
        q if bias is None else bias.contiguous(),
        out,
        layout.cu_queries,
        layout.cu_keys,
        scale * _LOG2_E.value,
        0.0 if softcap is None else softcap * _LOG2_E.value,
        window or 0,
        0 if bias is None else bias.shape[1] // 2,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        size,
        GROUP=heads // k.shape[1],
        CAUSAL=causal,
        WINDOWED=window is not None,
        BIASED=bias is not None,
        CAPPED=softcap is not None,
        ROWS=tile,
        KEYS=tile,
        SIZE=padded,
        # Four warps would spill the numbers of a tile of 64 times 128.
        num_warps=8 if tile * padded > 4096 else 4,
    )
    return out


def tiles(dtype: torch.dtype, size: int) -> tuple[int, int]:
    """Return queries and keys of a block, and the head size of the computation, for heads of
    `size`.
    """
    padded = max(16, triton.next_power_of_2(size))
    # float32 and wide heads take twice the memory.
    return (
        64 if dtype is not torch.float32 and padded <= 128 else 32 if padded <= 128 else 16,
        padded,
    )


@triton.jit
def _attend(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cu_queries_ptr: tl.tensor,
    cu_keys_ptr: tl.tensor,
    scale: float,
    softcap: float,
    window: int,
    reach: int,
    q_row: int,
    q_head: int,
    k_row: int,
    k_head: int,
    v_row: int,
    v_head: int,
    out_row: int,
    size: int,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    sequence = tl.program_id(1)
    head = tl.program_id(2)
    begin = tl.load(cu_queries_ptr + sequence)
    queries = tl.load(cu_queries_ptr + sequence + 1) - begin
    keys_begin = tl.load(cu_keys_ptr + sequence)
    keys = tl.load(cu_keys_ptr + sequence + 1) - keys_begin
    top = tl.program_id(0) * ROWS
    if top >= queries:
        return
    offset = tl.maximum(keys - queries, 0)

    row = top + tl.arange(0, ROWS)
    dim = tl.arange(0, SIZE)
    q_rows = (begin + row).to(tl.int64)
    is_query = (row < queries)[:, None] & (dim < size)[None, :]
    q = tl.load(
        q_ptr + q_rows[:, None] * q_row + head * q_head + dim[None, :], mask=is_query, other=0.0
    )
    place = offset + row

    low = 0
    high = keys
    if WINDOWED:
        low = tl.maximum(offset + top - window, 0)
        high = tl.minimum(high, offset + tl.minimum(top + ROWS, queries) + window)
    if CAUSAL:
        high = tl.minimum(high, offset + tl.minimum(top + ROWS, queries))

    largest = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, SIZE), tl.float32)
    for start in range(low, high, KEYS):
        key = start + tl.arange(0, KEYS)
        rows = (keys_begin + key).to(tl.int64)
        is_key = (key < high)[:, None] & (dim < size)[None, :]
        k = tl.load(
            k_ptr + rows[:, None] * k_row + (head // GROUP) * k_head + dim[None, :],
            mask=is_key,
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            # softcap * tanh(scores / softcap); both carry the factor log2(e).
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        distance = key[None, :] - place[:, None]
        seen = (key < high)[None, :] & (row < queries)[:, None]
        if CAUSAL:
            seen = seen & (distance <= 0)
        if WINDOWED:
            seen = seen & (distance <= window) & (distance >= -window)
        if BIASED:
            column = head * (2 * reach + 1) + reach + distance
            scores += tl.load(bias_ptr + column, mask=seen, other=0.0).to(tl.float32) * _LOG2_E
        # A finite stand-in for -inf: a row that has seen no key yet must not compute inf - inf.
        scores = tl.where(seen, scores, -1e30)
        peak = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp2(scores - peak[:, None]), 0.0)
        shrink = tl.exp2(largest - peak)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            v_ptr + rows[:, None] * v_row + (head // GROUP) * v_head + dim[None, :],
            mask=is_key,
            other=0.0,
        )
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = peak

    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    out = out_ptr + q_rows[:, None] * out_row + head * size + dim[None, :]
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=is_query)
