"""Norms, gated activations, rotations, pooling and embeddings by the native library.

Every function returns None if the library does not support its arguments: it is missing, another
device or type, non-adjacent elements of a row, gradients. `library`: None for this process's
choice.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from libs.kernels.native.library import TYPES, Native, RowKernels, native

ACTIVATIONS: Final = {"none": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4, "quick_gelu": 5}
"""Numbers of the activations in the library (source/rows/rows.h)."""
_POOLINGS: Final = {"sum": 0, "mean": 1, "max": 2}


def _entries(library: Native | None) -> RowKernels | None:
    library = native() if library is None else library
    return None if library is None else library.rows


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool = False,
    shift: float = 0.0,
    library: Native | None = None,
) -> Tensor | None:
    """Compute LayerNorm, or with `rms` RMSNorm with weights of `weight + shift`. x: [rows, size] or
    [rows, heads, size].
    """
    kind = TYPES.get(x.dtype)
    if kind is None or not x.is_cpu or (rows := _entries(library)) is None:
        return None
    size = x.shape[-1]
    if x.dim() == 2:
        (count, _), (row, step) = x.shape, x.stride()
        heads = 1
    elif x.dim() == 3 and x.stride(1) == size:
        (count, heads, _), (row, _, step) = x.shape, x.stride()
    else:
        return None
    if step != 1 or weight.dtype is not x.dtype or x.requires_grad:
        return None
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    added = None if bias is None else bias.data_ptr()
    at, to, threads = x.data_ptr(), out.data_ptr(), torch.get_num_threads()
    rows.norm(
        kind, threads, at, row, to, count, heads, size, weight.data_ptr(), added, eps, shift, rms
    )
    return out


def gate_up(
    x: Tensor, activation: str, *, gate_last: bool, library: Native | None = None
) -> Tensor | None:
    """Compute activation(gate) * up. x: [rows, 2 * size], the gate first or, with `gate_last`,
    after up -> [rows, size].
    """
    kind = TYPES.get(x.dtype)
    if kind is None or not x.is_cpu or (rows := _entries(library)) is None:
        return None
    (count, width), (row, step) = x.shape, x.stride()
    if step != 1 or x.requires_grad:
        return None
    size = width // 2
    out = x.new_empty((count, size))
    number = ACTIVATIONS[activation]
    rows.gate(
        kind,
        torch.get_num_threads(),
        x.data_ptr(),
        row,
        out.data_ptr(),
        count,
        size,
        number,
        gate_last,
    )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, library: Native | None = None) -> Tensor | None:
    """Rotate the first 2 x pairs dimensions of `x` [tokens, heads, dim] in place, and return it.
    cos, sin: [tokens, pairs] float32.
    """
    kind = TYPES.get(x.dtype)
    if kind is None or not x.is_cpu or (rows := _entries(library)) is None:
        return None
    (count, heads, dim), (row, head, step) = x.shape, x.stride()
    if (
        step != 1
        or head != dim
        or x.requires_grad
        or not (cos.is_contiguous() and sin.is_contiguous())
    ):
        return None
    rows.rotate(
        kind, torch.get_num_threads(), x.data_ptr(), row, count, heads, dim,
        cos.data_ptr(), sin.data_ptr(), cos.shape[1],
    )  # fmt: skip
    return x


def reduce(
    values: Tensor, how: str, cu_seqlens: Tensor, library: Native | None = None
) -> Tensor | None:
    """Reduce [tokens, size] with [sequences + 1] int32 to [sequences, size] float32 by "sum",
    "mean" or "max". No sequence is empty.
    """
    kind = TYPES.get(values.dtype)
    if kind is None or not values.is_cpu or (rows := _entries(library)) is None:
        return None
    row, step = values.stride()
    if (
        step != 1
        or values.requires_grad
        or cu_seqlens.dtype is not torch.int32
        or not cu_seqlens.is_contiguous()
    ):
        return None
    sequences, size = cu_seqlens.shape[0] - 1, values.shape[1]
    out = values.new_empty((sequences, size), dtype=torch.float32)
    ends = cu_seqlens.data_ptr()
    rows.pool(
        kind,
        torch.get_num_threads(),
        values.data_ptr(),
        row,
        ends,
        out.data_ptr(),
        sequences,
        size,
        _POOLINGS[how],
    )
    return out


def embed(
    table: Tensor, numbers: Tensor, places: Tensor, positions: Tensor, library: Native | None = None
) -> Tensor | None:
    """Compute table[numbers] + places[positions]. Tables [n, size]; numbers and positions [rows]
    int32 -> [rows, size].

    None also for a number outside its table.
    """
    kind = TYPES.get(table.dtype)
    if kind is None or not table.is_cpu or (rows := _entries(library)) is None:
        return None
    if (
        places.dtype is not table.dtype
        or not (table.is_contiguous() and places.is_contiguous())
        or table.requires_grad
    ):
        return None
    if not numbers.dtype is positions.dtype is torch.int32:
        return None
    count, size = numbers.shape[0], table.shape[1]
    out = table.new_empty((count, size))
    failed = rows.embed(
        kind, torch.get_num_threads(), table.data_ptr(), table.shape[0], numbers.data_ptr(),
        places.data_ptr(), places.shape[0],
        positions.data_ptr(), out.data_ptr(), count, size,
    )  # fmt: skip
    return None if failed else out
