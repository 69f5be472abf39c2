"""LayerNorm and RMSNorm over the last axis, alone and after a residual add.

Called twice a layer. Statistics are float32 whatever the type of `x`; the result has the type of `x`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias; x: [..., size]."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, shift: float = 0.0) -> Tensor:
    """x / sqrt(mean(x²) + eps) * (weight + shift); `shift` 1 for Gemma, whose weights are stored around zero. x: [..., size]."""
    if not shift:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float() + shift, eps).type_as(x)
