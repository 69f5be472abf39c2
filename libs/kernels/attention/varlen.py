"""Variable-length attention over packed sequences: one interface that dispatches to every device's kernel.

Called once a layer. On CUDA: flash-attn where it is installed, else torch's own varlen kernel, and Triton (`varlen_triton.py`)
for inputs that these do not support. On x86-64 CPUs: a kernel in C++ (`native/`), where it was built. Elsewhere: runs of equally
long sequences as dense batches (`dense.py`). Nothing here reads a tensor's value on the host: what the host must know
comes as plain numbers (`libs/kernels/layout.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from libs.kernels import native
from libs.kernels.attention import dense
from libs.kernels.layout import Layout
from libs.kernels.triton_here import has_triton

_FlashKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, tuple[int, int]], Tensor]


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(q k' * scale + bias) v within each sequence of `layout`.

    q: [queries, heads, dim]; k, v: [keys, kv_heads, dim], where kv_heads divides heads. A query's position among the keys is its
    row plus the run's `offset`. `window`: keys visible on each side of the query. `bias` [heads, 2 * reach + 1]: added to the
    scores by distance, column `reach + key - query`; `reach` is at least the largest distance. `softcap`:
    scores s become softcap * tanh(s / softcap) before the bias is added (Gemma 2). Returns [queries, heads, dim]; a
    query that attends to no key gets zeros.
    """
    flash = _flash_kernel() if q.is_cuda and softcap is None and _flash_takes(q, layout, causal, window, bias) else None
    if flash is not None:
        sides = (-1 if window is None else window, 0 if causal else -1 if window is None else window)
        ends = layout.cu_queries, layout.cu_keys, layout.max_queries, layout.max_keys
        return flash(q, k, v, *ends, scale, sides)
    if has_triton(q):
        from libs.kernels.attention import varlen_triton

        return varlen_triton.attend(q, k, v, layout, scale, causal, window, bias, softcap)
    mixed = native.attend(q, k, v, layout, scale, causal, window, bias) if softcap is None else None
    return dense.attend(q, k, v, layout, scale, causal, window, bias, softcap) if mixed is None else mixed


def _flash_takes(q: Tensor, layout: Layout, causal: bool, window: int | None, bias: Tensor | None) -> bool:
    """Whether the flash kernels support this: half precision, head sizes in multiples of 8 up to 256, no bias, and causal or window
    masks only where all queries end with their keys."""
    size = q.shape[2]
    aligned = layout.ends_align or not (causal or window is not None)
    return q.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= 256 and bias is None and aligned


@cache
def _flash_kernel() -> _FlashKernel | None:
    """flash-attn's, or torch's; None where the GPU is older than both need (compute capability 8.0)."""
    if torch.cuda.get_device_capability() < (8, 0):
        return None
    return _flash_attn() if importlib.util.find_spec("flash_attn") is not None else _torch_varlen()


def _flash_attn() -> _FlashKernel:
    kernel = importlib.import_module("flash_attn").flash_attn_varlen_func

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, sides: tuple[int, int]
    ) -> Tensor:
        # causal is set beside the window: a right side of 0 alone would select the slower kernel for windows.
        out: Tensor = kernel(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, window_size=sides, causal=sides[1] == 0)
        return out

    return attend


def _torch_varlen() -> _FlashKernel:
    kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    # Until torch 2.11 shared heads need not be said, and there is no such argument.
    is_told = "enable_gqa" in inspect.signature(kernel).parameters

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, sides: tuple[int, int]
    ) -> Tensor:
        grouped = {"enable_gqa": True} if is_told and k.shape[1] != q.shape[1] else {}
        out: Tensor = kernel(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=sides, **grouped)
        return out

    return attend
