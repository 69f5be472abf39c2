"""The operations between the matrix products of a layer, each fused into one launch, in Triton.

Called by `norms.py`, `gated.py` and `segments.py`, which define them, for CUDA tensors. All
arithmetic is float32.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

_ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "relu": 2, "silu": 3}
_REDUCTIONS = {"mean": 0, "sum": 1, "max": 2}

MIN_ELEMENTS = 512
"""Minimum numbers that a program normalises: rows of heads are too short for one program each."""


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, rms: bool, shift: float = 0.0
) -> Tensor:
    """Return the norm of x over the last axis."""
    return _launch_norm(x, None, weight, bias, eps, rms, shift, "none")[1]


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool,
    shift: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return x + residual, and its norm over the last axis."""
    return _launch_norm(x, residual, weight, bias, eps, rms, shift, "stored")


def norm_of_sum(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool,
    shift: float = 0.0,
) -> Tensor:
    """Return the norm of x + residual, without storing the sum."""
    return _launch_norm(x, residual, weight, bias, eps, rms, shift, "summed")[1]


def norm_plus(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool,
    shift: float = 0.0,
) -> Tensor:
    """Return residual + the norm of x."""
    return _launch_norm(x, residual, weight, bias, eps, rms, shift, "after")[1]


def _launch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    shift: float,
    residual_is: Literal["none", "stored", "summed", "after"],
) -> tuple[Tensor, Tensor]:
    """Launch the norm and return (sum, result).

    `residual_is`: added before the norm, with the sum stored or not; or added after the norm.
    """
    rows = x.reshape(-1, x.shape[-1])
    size = rows.shape[1]
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(normed) if residual_is == "stored" else normed
    added = rows if residual is None else residual.reshape(-1, size)
    rows, added = (t if t.stride(1) == 1 else t.contiguous() for t in (rows, added))
    columns = triton.next_power_of_2(size)
    block = max(1, MIN_ELEMENTS // columns)
    _norm[(triton.cdiv(rows.shape[0], block),)](
        rows,
        added,
        weight,
        weight if bias is None else bias,
        total,
        normed,
        rows.stride(0),
        added.stride(0),
        rows.shape[0],
        size,
        eps,
        shift,
        ADD=residual_is in ("stored", "summed"),
        STORE=residual_is == "stored",
        PLUS=residual_is == "after",
        RMS=rms,
        BIASED=bias is not None,
        ROWS=block,
        COLUMNS=columns,
        num_warps=min(8, max(1, block * columns // 256)),
    )
    return total, normed


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    total_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    x_row: int,
    residual_row: int,
    rows: int,
    size: int,
    eps: float,
    shift: float,
    ADD: tl.constexpr,
    STORE: tl.constexpr,
    PLUS: tl.constexpr,
    RMS: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    is_column = column < size
    inside = is_column & (row < rows)
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * residual_row + column, mask=inside, other=0.0).to(
            tl.float32
        )
    if STORE:
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * size + column, total, mask=inside)
        # The norm is computed from the sum as stored, rounded to its type.
        x = total.to(tl.float32)
    if not RMS:
        x = tl.where(inside, x - (tl.sum(x, 1) / size)[:, None], 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / size + eps)[:, None]
    y *= tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32) + shift
    if BIASED:
        y += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    if PLUS:
        y += tl.load(residual_ptr + row * residual_row + column, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(normed_ptr + row * size + column, y.to(normed_ptr.dtype.element_ty), mask=inside)


def gate_up(x: Tensor, activation: str, *, gate_last: bool) -> Tensor:
    """Compute activation(gate) * up. x: [rows, 2 * size], the gate first or last -> [rows,
    size].
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, size)
    columns = min(1024, triton.next_power_of_2(size))
    grid = (rows, triton.cdiv(size, columns))
    gate, up = (x[:, size:], x) if gate_last else (x, x[:, size:])
    _gate_up[grid](
        gate,
        up,
        out,
        x.stride(0),
        size,
        ACTIVATION=_ACTIVATIONS[activation],
        COLUMNS=columns,
        num_warps=4,
    )
    return out


@triton.jit
def _gate_up(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: int,
    size: int,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    gate = tl.load(gate_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == 1:
        # 0.5 (1 + tanh(z)) is sigmoid(2 z)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif ACTIVATION == 2:
        gate = tl.maximum(gate, 0.0)
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * size + column, (gate * up).to(out_ptr.dtype.element_ty), mask=inside)


def reduce(values: Tensor, cu_seqlens: Tensor, how: str) -> Tensor:
    """Return the sum, mean or max over each sequence's rows: [sequences, size] float32."""
    values = values if values.stride(1) == 1 else values.contiguous()
    size = values.shape[1]
    out = values.new_empty(cu_seqlens.shape[0] - 1, size, dtype=torch.float32)
    columns = min(64, triton.next_power_of_2(size))
    grid = (out.shape[0], triton.cdiv(size, columns))
    _reduce[grid](
        values,
        cu_seqlens,
        out,
        values.stride(0),
        size,
        HOW=_REDUCTIONS[how],
        ROWS=32,
        COLUMNS=columns,
        num_warps=4,
    )
    return out


@triton.jit
def _reduce(
    values_ptr: tl.tensor,
    cu_seqlens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    values_row: int,
    size: int,
    HOW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    begin = tl.load(cu_seqlens_ptr + sequence)
    tokens = tl.load(cu_seqlens_ptr + sequence + 1) - begin
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    best = tl.full((COLUMNS,), float("-inf") if HOW == 2 else 0.0, tl.float32)
    for start in range(0, tokens, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < tokens)[:, None] & (column < size)[None, :]
        place = (begin + row).to(tl.int64)[:, None] * values_row + column[None, :]
        if HOW == 2:
            x = tl.load(values_ptr + place, mask=inside, other=float("-inf")).to(tl.float32)
            best = tl.maximum(best, tl.max(x, 0))
        else:
            x = tl.load(values_ptr + place, mask=inside, other=0.0).to(tl.float32)
            best += tl.sum(x, 0)
    if HOW == 0:
        best = best / tokens
    tl.store(out_ptr + sequence.to(tl.int64) * size + column, best, mask=column < size)
