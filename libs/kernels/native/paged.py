"""Attention over paged keys and values by the native library, which stores and reads them in one
call.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import torch
from torch import Tensor

from libs.kernels.layout import BatchLayout
from libs.kernels.native.attention import ALL, table
from libs.kernels.native.library import TYPES, Native, native

_CALL: Final = Struct("11P9q7if")
"""`struct Paged` of source/paged/paged.h."""
_TABLE: Final = Struct("2P2q")
"""`struct PageTable` of source/layer/layer.h."""


def attend(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    pages: tuple[Tensor, Tensor],
    layout: BatchLayout,
    cu_rows: Tensor,
    numbers: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    bias: Tensor | None,
    library: Native | None = None,
) -> Tensor | None:
    """Compute `paged.attend`, or with `q` None `paged.store`, which returns the keys; None if the
    library does not support it.

    Arguments that are not listed are those of `attention/paged.py`.

    Args:
        library: The library to use; None for that of the process.
    """
    of_keys, of_values = pages
    library = native() if library is None else library
    if library is None or not of_keys.is_cpu or (kind := TYPES.get(of_keys.dtype)) is None:
        return None
    given = [tensor for tensor in (q, k, v) if tensor is not None]
    if any(
        tensor.dtype is not of_keys.dtype or tensor.stride(2) != 1 or tensor.requires_grad
        for tensor in given
    ):
        return None
    biases, middle = (None, 0) if bias is None else table(bias, layout)
    kv_heads, dim = of_keys.shape[1], of_keys.shape[2]
    left = ALL if window is None else min(window, ALL)
    out = None if q is None else q.new_empty(q.shape)
    packed = _CALL.pack(
        *(0 if tensor is None else tensor.data_ptr() for tensor in (q, k, v, out)),
        of_keys.data_ptr(),
        of_values.data_ptr(),
        layout.cu_queries.data_ptr(),
        layout.cu_keys.data_ptr(),
        cu_rows.data_ptr(),
        numbers.data_ptr(),
        0 if biases is None else biases.data_ptr(),
        *(
            number
            for tensor in (q, k, v)
            for number in ((0, 0) if tensor is None else tensor.stride()[:2])
        ),
        numbers.stride(0),
        0 if biases is None else biases.shape[1],
        middle,
        layout.cu_queries.shape[0] - 1,
        kv_heads if q is None else q.shape[1],
        kv_heads,
        dim,
        left,
        0 if causal else left,
        torch.get_num_threads(),
        scale,
    )
    if library.paged(packed, kind):
        return None
    return k if out is None else out


def page_table(cu_rows: Tensor, numbers: Tensor, *, attends: bool) -> bytes:
    """Return the `struct PageTable` of these tensors, which must outlive it."""
    return _TABLE.pack(cu_rows.data_ptr(), numbers.data_ptr(), numbers.stride(0), attends)
