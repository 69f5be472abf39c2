"""Rotary position embedding (RoPE, arXiv 2104.09864) of packed queries and keys.

`angles` is computed once a forward for each distinct frequency list, `rotate` once a layer for queries and keys together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libs.kernels import native
from libs.kernels.triton_here import has_triton


def angles(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, pairs], float32, times `factor` (YaRN's attention factor).

    positions: [tokens], or [tokens, pairs] where they differ by pair; frequencies: [pairs].
    """
    turned = (positions.float() if positions.dim() == 2 else positions.float()[:, None]) * frequencies
    return turned.cos() * factor, turned.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first 2 x pairs dimensions of every head, not the rest. x: [tokens, heads, dim] -> the same shape and type.

    Dimension i is paired with i + pairs (GPT-NeoX's layout, as in transformers), computed in float32. `x` may be rotated in place:
    use only the result.
    """
    if has_triton(x):
        from libs.kernels.rows import fused_triton

        return fused_triton.rotate_(x, cos, sin)
    done = native.rotate(x, cos, sin)
    if done is not None:
        return done
    pairs = cos.shape[1]
    sin = sin[:, None]
    # One product multiplies both halves by cos, and promotes them to float32 without a copy.
    turned = x[..., : 2 * pairs] * torch.cat((cos, cos), dim=1)[:, None]
    turned[..., :pairs].addcmul_(x[..., pairs : 2 * pairs], sin, value=-1)
    turned[..., pairs:].addcmul_(x[..., :pairs], sin)
    turned = turned.to(x.dtype)
    return turned if 2 * pairs == x.shape[-1] else torch.cat((turned, x[..., 2 * pairs :]), dim=-1)
