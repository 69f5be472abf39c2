"""LayerNorm and RMSNorm over the last axis, alone and after a residual add.

Called twice a layer. Statistics are float32 whatever the type of `x`; the result has the type of
`x`. On CUDA the residual add and the norm are one launch; on a CPU the linear layer before them
adds the residual (`libs/kernels/linear/packed.py`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from libs.kernels import native
from libs.kernels.triton_here import has_triton


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias; x: [..., size]."""
    done = native.norm(x, weight, bias, eps)
    return done if done is not None else F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, shift: float = 0.0) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * (weight + shift); x: [..., size]. `shift` is 1 for Gemma,
    which stores weights around zero.
    """
    if has_triton(x):
        from libs.kernels.rows import fused_triton

        return fused_triton.norm(x, weight, None, eps, rms=True, shift=shift)
    done = native.norm(x, weight, None, eps, rms=True, shift=shift)
    if done is not None:
        return done
    if not shift:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float() + shift, eps).type_as(x)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + residual, and its LayerNorm; x, residual: [..., size]."""
    if has_triton(x):
        from libs.kernels.rows import fused_triton

        return fused_triton.add_norm(x, residual, weight, bias, eps, rms=False)
    total = x + residual
    return total, layer_norm(total, weight, bias, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return x + residual, and its RMSNorm; x, residual: [..., size]."""
    if has_triton(x):
        from libs.kernels.rows import fused_triton

        return fused_triton.add_norm(x, residual, weight, None, eps, rms=True, shift=shift)
    total = x + residual
    return total, rms_norm(total, weight, eps, shift=shift)


def layer_norm_of_sum(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Return the LayerNorm of x + residual; on CUDA the sum is not stored."""
    if has_triton(x):
        from libs.kernels.rows import fused_triton

        return fused_triton.norm_of_sum(x, residual, weight, bias, eps, rms=False)
    return layer_norm(x + residual, weight, bias, eps)


def rms_norm_of_sum(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, shift: float = 0.0
) -> Tensor:
    """Return the RMSNorm of x + residual; on CUDA the sum is not stored."""
    if has_triton(x):
        from libs.kernels.rows import fused_triton

        return fused_triton.norm_of_sum(x, residual, weight, None, eps, rms=True, shift=shift)
    return rms_norm(x + residual, weight, eps, shift=shift)


def layer_norm_plus(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Return residual + the LayerNorm of x; x, residual: [..., size]."""
    if has_triton(x):
        from libs.kernels.rows import fused_triton

        return fused_triton.norm_plus(x, residual, weight, bias, eps, rms=False)
    return residual + layer_norm(x, weight, bias, eps)


def rms_norm_plus(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, shift: float = 0.0
) -> Tensor:
    """Return residual + the RMSNorm of x; x, residual: [..., size]."""
    if has_triton(x):
        from libs.kernels.rows import fused_triton

        return fused_triton.norm_plus(x, residual, weight, None, eps, rms=True, shift=shift)
    return residual + rms_norm(x, weight, eps, shift=shift)
