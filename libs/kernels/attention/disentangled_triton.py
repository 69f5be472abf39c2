"""Disentangled attention (DeBERTa, arXiv 2006.03654) over packed sequences of any lengths, in
Triton: one launch for all.

Called by `libs/models/text/families/bert/deberta.py` on CUDA. The caller computes the scores by
distance as two plain matrix products over all tokens: each query with every row of the distance
keys (c2p), and each key with every row of the distance queries (p2c). This kernel reads the score
of each pair of a query and a key from them, through a table of the row of each distance, and
continues like FlashAttention (arXiv 2205.14135). Nothing is padded, and the host needs only the
longest length.
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
    c2p: Tensor | None,
    p2c: Tensor | None,
    table: Tensor,
    first: int,
    layout: BatchLayout,
    scale: float,
    out: Tensor,
) -> None:
    """Write softmax(q k' scale + c2p[query, row] + p2c[key, row]) v within each sequence of
    `layout` to `out`.

    The row is `table[reach + distance] - first`; the distance is a query's position minus a key's,
    limited to +-reach.

    Args:
        q: [queries, heads, dim]
        k: [keys, heads, dim]
        v: [keys, heads, dim]
        c2p: [heads, queries, rows], contiguous, already scaled; None to omit this score.
        p2c: [heads, keys, rows], contiguous, already scaled; None to omit this score.
        table: [2 * reach + 1] int32, the row of each distance, non-negative.
        first: The row of the distance embeddings that is row 0 of `c2p` and `p2c`, which must cover
            all distances in the layout's sequences.
        layout: Queries of a sequence end with its keys if it has more keys than queries.
        scale: Factor on the content's scores.
        out: [queries, heads, dim], in the type of `q`.
    """
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    if out.stride(2) != 1:
        raise ValueError("the last dimension of `out` must be contiguous")
    heads, size = q.shape[1:]
    rows = next((scores.shape[2] for scores in (c2p, p2c) if scores is not None), 0)
    tile, padded, warps = tiles(q.dtype, size)
    _disentangled[(triton.cdiv(layout.max_queries, tile), layout.cu_queries.shape[0] - 1, heads)](
        q,
        k,
        v,
        q if c2p is None else c2p,
        q if p2c is None else p2c,
        table,
        out,
        layout.cu_queries,
        layout.cu_keys,
        scale * _LOG2_E.value,
        table.shape[0] // 2,
        first,
        rows,
        q.shape[0],
        k.shape[0],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        DIM=size,
        C2P=c2p is not None,
        P2C=p2c is not None,
        ROWS=tile,
        KEYS=tile,
        SIZE=padded,
        num_warps=warps,
        # No prefetching, which would keep every gathered score longer in registers or shared
        # memory.
        num_stages=1,
    )


def tiles(dtype: torch.dtype, size: int) -> tuple[int, int, int]:
    """Return queries and keys of a block, the head size of the computation and the warps, for heads
    of `size`.

    Each score that is read by distance takes an address in registers, so a thread must read few of
    them: with these tiles ptxas uses 145 registers for bfloat16 and 78 for float32 on compute
    capability 9.0, without spills.
    """
    padded = max(16, triton.next_power_of_2(size))
    is_wide = padded > 128
    if dtype is torch.float32:
        return 16 if is_wide else 32, padded, 8
    return 32, padded, 8 if is_wide else 4


# Otherwise a kernel is compiled for each combination of these numbers' divisibility by 16, which
# differs between batches.
@triton.jit(do_not_specialize=["all_queries", "all_keys"])
def _disentangled(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    c2p_ptr: tl.tensor,
    p2c_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cu_queries_ptr: tl.tensor,
    cu_keys_ptr: tl.tensor,
    scale: float,
    reach: int,
    first: int,
    rows: int,
    all_queries: int,
    all_keys: int,
    q_row: int,
    q_head: int,
    k_row: int,
    k_head: int,
    v_row: int,
    v_head: int,
    out_row: int,
    out_head: int,
    DIM: tl.constexpr,
    C2P: tl.constexpr,
    P2C: tl.constexpr,
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

    own = tl.arange(0, ROWS)
    other = tl.arange(0, KEYS)
    dim = tl.arange(0, SIZE)
    is_query = top + own < queries
    q_rows = (begin + top + own).to(tl.int64)
    q_mask = is_query[:, None]
    if SIZE > DIM:
        q_mask = q_mask & (dim < DIM)[None, :]
    q = tl.load(
        q_ptr + q_rows[:, None] * q_row + head * q_head + dim[None, :], mask=q_mask, other=0.0
    )
    place = tl.maximum(keys - queries, 0) + top + own
    # Tiles are addressed from their first row in 64 bits; 32 bits suffice within a tile.
    c2p = c2p_ptr + (head.to(tl.int64) * all_queries + begin + top) * rows - first
    key_scores = head.to(tl.int64) * all_keys + keys_begin

    largest = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, SIZE), tl.float32)
    for start in range(0, keys, KEYS):
        key = start + other
        is_key = key < keys
        k_rows = (keys_begin + key).to(tl.int64)
        k_mask = is_key[:, None]
        if SIZE > DIM:
            k_mask = k_mask & (dim < DIM)[None, :]
        k = tl.load(
            k_ptr + k_rows[:, None] * k_row + head * k_head + dim[None, :], mask=k_mask, other=0.0
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = is_query[:, None] & is_key[None, :]
        if C2P or P2C:
            distance = tl.maximum(tl.minimum(place[:, None] - key[None, :], reach), -reach)
            column = tl.load(table_ptr + (reach + distance))
            if C2P:
                of_query = tl.load(c2p + (own[:, None] * rows + column), mask=seen, other=0.0)
                scores += of_query.to(tl.float32) * _LOG2_E
            if P2C:
                p2c = p2c_ptr + (key_scores + start) * rows - first
                of_key = tl.load(p2c + (other[None, :] * rows + column), mask=seen, other=0.0)
                scores += of_key.to(tl.float32) * _LOG2_E
        # A finite stand-in for -inf, since exp2(-inf + inf) is not a number.
        scores = tl.where(seen, scores, -1e30)
        peak = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp2(scores - peak[:, None]), 0.0)
        shrink = tl.exp2(largest - peak)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            v_ptr + k_rows[:, None] * v_row + head * v_head + dim[None, :], mask=k_mask, other=0.0
        )
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = peak

    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    out = out_ptr + q_rows[:, None] * out_row + head * out_head + dim[None, :]
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=q_mask)
