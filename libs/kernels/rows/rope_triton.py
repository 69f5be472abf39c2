"""Rotary positions in Triton: cosines and sines in one launch a forward, and norm and rotation of
queries and keys in one per layer.

Called by `rope.py`, which defines them, for CUDA tensors. All arithmetic is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from libs.kernels.rows.rope import HeadNorms

MAX_ELEMENTS = 4096
"""Maximum numbers in a program: at 32 per thread and 128 threads, registers do not spill."""


def angles(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions times frequencies, times `factor`: [tokens, pairs] float32
    twice, contiguous.

    positions: [tokens] or [tokens, pairs]; frequencies: [pairs] or [tokens, pairs].
    """
    frequencies = frequencies.contiguous()
    by_pair, by_token = positions.dim() == 2, frequencies.dim() == 2
    tokens, pairs = positions.shape[0], frequencies.shape[-1]
    positions = positions.contiguous()
    cos, sin = torch.empty((2, tokens, pairs), dtype=torch.float32, device=positions.device)
    columns = triton.next_power_of_2(pairs)
    _angles[(tokens,)](
        positions,
        frequencies,
        cos,
        sin,
        pairs,
        factor,
        BY_PAIR=by_pair,
        BY_TOKEN=by_token,
        PAIRS=columns,
        num_warps=min(4, max(1, columns // 32)),
    )
    return cos, sin


@triton.jit
def _angles(
    positions_ptr: tl.tensor,
    frequencies_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    pairs: int,
    factor: float,
    BY_PAIR: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    inside = pair < pairs
    if BY_PAIR:
        position = tl.load(positions_ptr + row * pairs + pair, mask=inside, other=0).to(tl.float32)
    else:
        position = tl.load(positions_ptr + row).to(tl.float32)
    frequencies = frequencies_ptr + row * pairs if BY_TOKEN else frequencies_ptr
    turned = position * tl.load(frequencies + pair, mask=inside, other=0.0)
    tl.store(cos_ptr + row * pairs + pair, tl.cos(turned) * factor, mask=inside)
    tl.store(sin_ptr + row * pairs + pair, tl.sin(turned) * factor, mask=inside)


def norm_rotate_(
    x: Tensor, rotation: tuple[Tensor, Tensor] | None, norms: HeadNorms | None
) -> Tensor:
    """Normalise each head and rotate its first 2 x pairs dimensions, in place.

    x: [tokens, heads, dim] with stride 1 for the last dimension; `rotation`: cos and sin [tokens,
    pairs] float32, both with the same stride of rows and 1 for the last. Without `norms`, further
    dimensions are unchanged.
    """
    tokens, heads, size = x.shape
    pairs = size // 2 if rotation is None else rotation[0].shape[1]
    rest = size - 2 * pairs if norms is not None else 0
    padded, padded_rest = triton.next_power_of_2(pairs), triton.next_power_of_2(rest) if rest else 0
    width = 2 * padded + padded_rest
    # A power of two, like all block sizes in Triton.
    block = min(
        triton.next_power_of_2(heads), max(1, MAX_ELEMENTS // triton.next_power_of_2(width))
    )
    cos, sin = (x, x) if rotation is None else rotation
    if x.stride(2) != 1 or cos.stride(-1) != 1 or sin.stride() != cos.stride():
        raise ValueError(
            f"rotation needs rows without gaps: strides are {x.stride()}, {cos.stride()} and "
            f"{sin.stride()}"
        )
    _norm_rotate[(tokens, triton.cdiv(heads, block))](
        x,
        cos,
        sin,
        x if norms is None else norms.query_weight,
        x if norms is None else norms.key_weight,
        x.stride(0),
        x.stride(1),
        cos.stride(0),
        heads,
        0 if norms is None else norms.queries,
        size,
        pairs,
        0.0 if norms is None else norms.eps,
        0.0 if norms is None else norms.shift,
        NORM=norms is not None,
        ROTATE=rotation is not None,
        HEADS=block,
        PAIRS=padded,
        REST=padded_rest,
        num_warps=min(4, max(1, block * width // 1024)),
    )
    return x


@triton.jit
def _norm_rotate(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    query_weight_ptr: tl.tensor,
    key_weight_ptr: tl.tensor,
    x_row: int,
    x_head: int,
    angle_row: int,
    heads: int,
    queries: int,
    size: int,
    pairs: int,
    eps: float,
    shift: float,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    inside = pair < pairs
    is_head = (head < heads)[:, None]
    mask = is_head & inside[None, :]
    # The stride of the last dimension is 1 and not a parameter, so a thread reads 16 bytes at a
    # time.
    heads_at = x_ptr + row * x_row + head[:, None] * x_head
    low = heads_at + pair[None, :]
    high = low + pairs
    a = tl.load(low, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(high, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        is_query = (head < queries)[:, None]
        squares = tl.sum(a * a + b * b, 1)
        if REST > 0:
            last = 2 * pairs + tl.arange(0, REST)
            is_rest = is_head & (last < size)[None, :]
            c = tl.load(heads_at + last[None, :], mask=is_rest, other=0.0).to(tl.float32)
            squares += tl.sum(c * c, 1)
        inverse = tl.rsqrt(squares / size + eps)[:, None]
        a *= inverse * _weights(query_weight_ptr, key_weight_ptr, pair, inside, is_query, shift)
        b *= inverse * _weights(
            query_weight_ptr, key_weight_ptr, pairs + pair, inside, is_query, shift
        )
        if REST > 0:
            c *= inverse * _weights(
                query_weight_ptr, key_weight_ptr, last, last < size, is_query, shift
            )
            tl.store(heads_at + last[None, :], c.to(x_ptr.dtype.element_ty), mask=is_rest)
    if ROTATE:
        cos = tl.load(cos_ptr + row * angle_row + pair, mask=inside, other=0.0)[None, :]
        sin = tl.load(sin_ptr + row * angle_row + pair, mask=inside, other=0.0)[None, :]
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    tl.store(low, a.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(high, b.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weights(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    is_query: tl.tensor,
    shift: float,
) -> tl.tensor:
    """Load the weights of these columns for each head: [heads, columns]."""
    query = tl.load(query_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    key = tl.load(key_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_query, query, key) + shift
