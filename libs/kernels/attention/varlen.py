"""Variable-length attention over packed sequences: one interface that dispatches to every device's
kernel.

Called once a layer. On CUDA: flash-attn if it is installed, else torch's flash kernel, and Triton
(`varlen_triton.py`) for inputs that these do not support. On x86-64 CPUs: a C++ kernel (`native/`),
if it was built. Elsewhere: runs of equally long sequences as dense batches (`dense.py`). Nothing
here reads a tensor's value on the host, which receives plain numbers (`libs/kernels/layout.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from libs.kernels import native
from libs.kernels.attention import dense
from libs.kernels.layout import BatchLayout
from libs.kernels.triton_here import has_triton

_FlashKernel = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, tuple[int, int]], Tensor
]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BatchLayout,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute softmax(q k' * scale + bias) v within each sequence of `layout`: [queries, heads,
    dim].

    A query that attends to no key gets zeros. A query's position among the keys is its row plus the
    run's `offset`.

    Args:
        q: [queries, heads, dim]
        k: [keys, kv_heads, dim]; kv_heads divides heads.
        v: As `k`.
        window: Keys visible on each side of the query.
        bias: [heads, 2 * reach + 1], added to the scores by distance, column `reach + key - query`;
            `reach` is at least the largest distance.
        softcap: Scores s become softcap * tanh(s / softcap) before the bias is added (Gemma 2).
    """
    flash = (
        _flash_kernel()
        if _has_flash(q) and softcap is None and _flash_supports(q, layout, causal, window, bias)
        else None
    )
    if flash is not None:
        sides = (
            -1 if window is None else window,
            0 if causal else -1 if window is None else window,
        )
        ends = layout.cu_queries, layout.cu_keys, layout.max_queries, layout.max_keys
        return flash(q, k, v, *ends, scale, sides)
    if has_triton(q):
        from libs.kernels.attention import varlen_triton

        return varlen_triton.attend(q, k, v, layout, scale, causal, window, bias, softcap)
    mixed = native.attend(q, k, v, layout, scale, causal, window, bias) if softcap is None else None
    return (
        dense.attend(q, k, v, layout, scale, causal, window, bias, softcap)
        if mixed is None
        else mixed
    )


def _has_flash(q: Tensor) -> bool:
    return q.is_cuda


def _flash_supports(
    q: Tensor, layout: BatchLayout, causal: bool, window: int | None, bias: Tensor | None
) -> bool:
    """Return whether the flash kernels support this attention.

    They need half precision, head sizes in multiples of 8 up to 256, no bias, and causal or window
    masks only if all queries end with their keys.
    """
    size = q.shape[2]
    aligned = layout.ends_align or not (causal or window is not None)
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and size % 8 == 0
        and size <= 256
        and bias is None
        and aligned
    )


@cache
def _flash_kernel() -> _FlashKernel | None:
    """Return flash-attn's kernel, or torch's; None if the GPU is older than compute capability
    8.0.
    """
    if torch.cuda.get_device_capability() < (8, 0):
        return None
    return _flash_attn() if _has_flash_attn() else _torch_flash


def _has_flash_attn() -> bool:
    """Return whether flash-attn 2 is installed. flash-attn 4 has the same name, but not this module
    and function.
    """
    return (
        importlib.util.find_spec("flash_attn") is not None
        and importlib.util.find_spec("flash_attn.flash_attn_interface") is not None
    )


def _flash_attn() -> _FlashKernel:
    kernel = importlib.import_module("flash_attn").flash_attn_varlen_func

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        scale: float,
        sides: tuple[int, int],
    ) -> Tensor:
        # causal is set with the window: a right side of 0 alone would select the slower window
        # kernel
        out: Tensor = kernel(
            q,
            k,
            v,
            cu_q,
            cu_k,
            max_q,
            max_k,
            softmax_scale=scale,
            window_size=sides,
            causal=sides[1] == 0,
        )
        return out

    return attend


def _torch_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    sides: tuple[int, int],
) -> Tensor:
    """Call the operator behind torch's `varlen_attn` with its arguments in torch 2.11 and 2.13.

    `varlen_attn` is a custom Python operator, which takes longer on the host than a small layer's
    kernels, and it launches one more kernel, to fill an unused random state.
    """
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, sides == (-1, 0), False,
        scale=scale, window_size_left=sides[0], window_size_right=sides[1],
    )[0]  # fmt: skip
    return out
