"""Attention of a decode step in Triton: one query a sequence over paged keys and values, read in
place.

Called by `paged.py` on CUDA for one new token of each sequence. A page holds the keys of one head
as [dim][32], which is the right operand of a matrix product, and its values as [32][dim], so
nothing is gathered or transposed. The heads that share keys are the rows of that product.

One program computes all heads of one key head of one sequence over a part of its pages (a split, as
in FlashDecoding), and `_merge` adds the splits. The number of programs depends only on the number
of sequences, and lengths and page tables are read from the device, so a CUDA graph of a step serves
sequences of any length.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

# The device has an instruction for exp2, not for exp.
_LOG2_E = tl.constexpr(1.4426950408889634)

MAX_GROUP: Final = 64
"""Maximum heads that share the keys of one head."""

MAX_DIM: Final = 256

MIN_SPLIT_PAGES: Final = 2
"""Minimum pages of a split: a shorter one takes less time than merging it."""

_PROGRAMS: Final = 512
"""Programs that keep a large GPU busy: about four for each of its multiprocessors."""

_MIN_SPLITS: Final = 4
_MAX_SPLITS: Final = 32


def takes(heads: int, kv_heads: int, dim: int) -> bool:
    """Return whether the kernel supports these numbers of heads and this head size."""
    return heads // kv_heads <= MAX_GROUP and dim <= MAX_DIM


def splits(sequences: int, kv_heads: int) -> int:
    """Return the number of splits of each sequence's pages: a power of two."""
    wanted = max(1, _PROGRAMS // (sequences * kv_heads))
    return min(_MAX_SPLITS, max(_MIN_SPLITS, 1 << (wanted.bit_length() - 1)))


def shape(heads: int, kv_heads: int, dim: int) -> dict[str, int]:
    """Return the size constants of both kernels."""
    return {
        "GROUP": heads // kv_heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "SIZE": max(16, triton.next_power_of_2(dim)),
    }


def rows(heads: int, kv_heads: int) -> int:
    """Return the rows of the product of queries and keys: at least the 16 that tensor cores
    need.
    """
    return max(16, int(triton.next_power_of_2(heads // kv_heads)))


def stages(dtype: torch.dtype, dim: int) -> int:
    """Return the loop's pipeline stages, limited by shared memory of 99 KiB."""
    return 3 if dim * dtype.itemsize <= 256 else 2


def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    pages: tuple[Tensor, Tensor],
    cu_keys: Tensor,
    numbers: Tensor,
    scale: float,
    window: int | None,
    bias: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Compute `paged.attend` of one query a sequence, at the last of its keys, storing at most one
    key.

    Args:
        q: [sequences, heads, dim].
        k: The last key of each sequence, to be stored, [sequences, kv_heads, dim]; None if all keys
            are in pages.
        v: The same for values.
        pages: Keys [pages, kv_heads, dim, PAGE] and values [pages, kv_heads, PAGE, dim],
            contiguous.
        cu_keys: Cumulative numbers of keys, [sequences + 1] int32. A sequence without keys has
            zeros as its result, and nothing is stored for it.
        numbers: Pages of each sequence, [sequences, width] int32, contiguous.
    """
    of_keys, of_values = pages
    sequences, heads, dim = q.shape
    kv_heads, page = of_keys.shape[1], of_keys.shape[3]
    q = q if q.stride(2) == 1 else q.contiguous()
    new_k, new_v = (
        q if new is None else new if new.stride(2) == 1 else new.contiguous() for new in (k, v)
    )
    count = splits(sequences, kv_heads)
    mixed = torch.empty((sequences, heads, count, dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((sequences, heads, count, 2), dtype=torch.float32, device=q.device)
    out = torch.empty((sequences, heads, dim), dtype=q.dtype, device=q.device)
    sizes = shape(heads, kv_heads, dim)
    _decode[(count, sequences, kv_heads)](
        q,
        new_k,
        new_v,
        of_keys,
        of_values,
        q if bias is None else bias.contiguous(),
        mixed,
        stats,
        cu_keys,
        numbers,
        scale * _LOG2_E.value,
        0.0 if softcap is None else softcap * _LOG2_E.value,
        window or 0,
        0 if bias is None else bias.shape[1] // 2,
        numbers.stride(0),
        q.stride(0),
        q.stride(1),
        new_k.stride(0),
        new_k.stride(1),
        new_v.stride(0),
        new_v.stride(1),
        STORES=k is not None,
        WINDOWED=window is not None,
        BIASED=bias is not None,
        CAPPED=softcap is not None,
        SPLITS=count,
        LEAST=MIN_SPLIT_PAGES,
        PAGE=page,
        ROWS=rows(heads, kv_heads),
        **sizes,
        num_warps=4,
        num_stages=stages(of_keys.dtype, dim),
    )
    _merge[(sequences, heads)](
        mixed,
        stats,
        out,
        cu_keys,
        window or 0,
        WINDOWED=window is not None,
        SPLITS=count,
        LEAST=MIN_SPLIT_PAGES,
        PAGE=page,
        **sizes,
        num_warps=4,
    )
    return out


@triton.jit
def _visible(
    keys: tl.tensor,
    window: tl.tensor,
    WINDOWED: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    PAGE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the first key that the last one sees, its page, the number of pages from it on, and
    pages per split.
    """
    low = 0
    if WINDOWED:
        low = tl.maximum(keys - 1 - window, 0)
    first = low // PAGE
    count = tl.cdiv(keys, PAGE) - first
    return low, first, count, tl.maximum(tl.cdiv(count, SPLITS), LEAST)


# Otherwise a kernel is compiled for tables of one page, of a multiple of 16 pages, and of others.
@triton.jit(do_not_specialize=["width"])
def _decode(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    cu_keys_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    scale: float,
    softcap: float,
    window: int,
    reach: int,
    width: int,
    q_row: int,
    q_head: int,
    k_row: int,
    k_head: int,
    v_row: int,
    v_head: int,
    STORES: tl.constexpr,
    WINDOWED: tl.constexpr,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    split = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    kv_head = tl.program_id(2)
    keys = tl.load(cu_keys_ptr + sequence + 1) - tl.load(cu_keys_ptr + sequence)
    low, first, count, share = _visible(keys, window, WINDOWED, SPLITS, LEAST, PAGE)
    begin = first + split * share
    end = tl.minimum(begin + share, first + count)
    if begin >= end:
        return

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, SIZE)
    place = tl.arange(0, PAGE)
    head = kv_head * GROUP + row
    is_row = row < GROUP
    is_dim = dim < DIM
    q_at = q_ptr + sequence * q_row + head[:, None] * q_head + dim[None, :]
    q = tl.load(q_at, mask=is_row[:, None] & is_dim[None, :], other=0.0)

    largest = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, SIZE), tl.float32)
    stored = keys
    if STORES:
        stored = keys - 1
        # The new key starts the online softmax in the split of the last page. It is not read back
        # from the page.
        if begin + share >= first + count:
            k = tl.load(k_ptr + sequence * k_row + kv_head * k_head + dim, mask=is_dim, other=0.0)
            v = tl.load(v_ptr + sequence * v_row + kv_head * v_head + dim, mask=is_dim, other=0.0)
            number = tl.load(numbers_ptr + sequence * width + stored // PAGE).to(tl.int64)
            block = (number * KV_HEADS + kv_head) * (DIM * PAGE)
            tl.store(
                keys_ptr + block + dim * PAGE + stored % PAGE,
                k.to(keys_ptr.dtype.element_ty),
                mask=is_dim,
            )
            tl.store(
                values_ptr + block + (stored % PAGE) * DIM + dim,
                v.to(values_ptr.dtype.element_ty),
                mask=is_dim,
            )
            largest = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
            if CAPPED:
                largest = softcap * (2 * tl.sigmoid(2 * largest / softcap) - 1)
            if BIASED:
                largest += (
                    tl.load(bias_ptr + head * (2 * reach + 1) + reach, mask=is_row, other=0.0).to(
                        tl.float32
                    )
                    * _LOG2_E
                )
            total += 1.0
            mixed += v.to(tl.float32)[None, :]

    for page in range(begin, end):
        number = tl.load(numbers_ptr + sequence * width + page).to(tl.int64)
        block = (number * KV_HEADS + kv_head) * (DIM * PAGE)
        key = page * PAGE + place
        seen = (key < stored) & (key >= low)
        # Keys are not masked by position, since a mask with an arbitrary end would make each load
        # one number wide. Data beyond the last key affects only its column, which is never seen;
        # values, which are all summed, are masked.
        k = tl.load(
            keys_ptr + block + dim[:, None] * PAGE + place[None, :], mask=is_dim[:, None], other=0.0
        )
        v = tl.load(
            values_ptr + block + place[:, None] * DIM + dim[None, :],
            mask=seen[:, None] & is_dim[None, :],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            # softcap * tanh(scores / softcap); both carry the factor log2(e).
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        if BIASED:
            column = head[:, None] * (2 * reach + 1) + (reach + key - (keys - 1))[None, :]
            near = tl.load(bias_ptr + column, mask=is_row[:, None] & seen[None, :], other=0.0)
            scores += near.to(tl.float32) * _LOG2_E
        # A finite stand-in for -inf: a row that has seen no key yet must not compute inf - inf.
        scores = tl.where(seen[None, :], scores, -1e30)
        peak = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.where(seen[None, :], tl.exp2(scores - peak[:, None]), 0.0)
        shrink = tl.exp2(largest - peak)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = peak

    slot = (sequence * (KV_HEADS * GROUP) + head) * SPLITS + split
    tl.store(
        mixed_ptr + slot[:, None] * DIM + dim[None, :],
        mixed,
        mask=is_row[:, None] & is_dim[None, :],
    )
    tl.store(stats_ptr + slot * 2, largest, mask=is_row)
    tl.store(stats_ptr + slot * 2 + 1, total, mask=is_row)


@triton.jit
def _merge(
    mixed_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cu_keys_ptr: tl.tensor,
    window: int,
    WINDOWED: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    keys = tl.load(cu_keys_ptr + sequence + 1) - tl.load(cu_keys_ptr + sequence)
    _low, _first, count, share = _visible(keys, window, WINDOWED, SPLITS, LEAST, PAGE)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, SIZE)
    # A split without pages has written nothing.
    is_used = split * share < count
    slot = (sequence * (KV_HEADS * GROUP) + head) * SPLITS + split
    largest = tl.load(stats_ptr + slot * 2, mask=is_used, other=-1e30)
    total = tl.load(stats_ptr + slot * 2 + 1, mask=is_used, other=0.0)
    mixed = tl.load(
        mixed_ptr + slot[:, None] * DIM + dim[None, :],
        mask=is_used[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    shrink = tl.exp2(largest - tl.max(largest, 0))
    total = tl.sum(total * shrink, 0)
    out = tl.sum(mixed * shrink[:, None], 0) / tl.where(total > 0, total, 1.0)
    at = out_ptr + (sequence * (KV_HEADS * GROUP) + head) * DIM + dim
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=dim < DIM)
