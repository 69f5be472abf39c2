"""Rotary position embedding (RoPE, arXiv 2104.09864) of packed queries and keys, and the norm of
their heads before it.

`angles` is computed once a forward for each distinct frequency list, `rotate` or `norm_rotate` once
a layer for queries and keys together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from libs.kernels import native
from libs.kernels.rows.norms import rms_norm
from libs.kernels.triton_here import has_triton


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each head of queries and keys; the first `queries` heads are queries.

    Attributes:
        query_weight, key_weight: [head size], to which `shift` is added.
    """

    query_weight: Tensor
    key_weight: Tensor
    queries: int
    eps: float
    shift: float


def angles(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin [tokens, pairs], float32, times `factor` (YaRN's attention factor).

    positions: [tokens], or [tokens, pairs] if they differ by pair; frequencies: [pairs], or
    [tokens, pairs] if they differ by token.
    """
    if has_triton(positions):
        from libs.kernels.rows import rope_triton

        return rope_triton.angles(positions, frequencies, factor)
    turned = (
        positions.float() if positions.dim() == 2 else positions.float()[:, None]
    ) * frequencies
    return turned.cos() * factor, turned.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 x pairs dimensions of every head. x: [tokens, heads, dim] -> the same
    shape and type.

    Dimension i is paired with i + pairs (GPT-NeoX's layout, as in transformers), computed in
    float32. `x` may be rotated in place: use only the result.
    """
    if has_triton(x):
        from libs.kernels.rows import rope_triton

        return rope_triton.norm_rotate_(x if x.stride(2) == 1 else x.contiguous(), (cos, sin), None)
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


def norm_rotate(
    x: Tensor, norms: HeadNorms, rotation: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Normalise every head, then `rotate` it by `rotation` (cos and sin; None for no rotation).

    x: [tokens, query and key heads, dim], which may be overwritten -> queries and keys, [tokens,
    heads, dim] each.
    """
    parts = (norms.queries, x.shape[1] - norms.queries)
    if has_triton(x):
        from libs.kernels.rows import rope_triton

        x = rope_triton.norm_rotate_(x if x.stride(2) == 1 else x.contiguous(), rotation, norms)
        q, k = x.split_with_sizes(parts, dim=1)
        return q, k
    q, k = x.split_with_sizes(parts, dim=1)
    q = rms_norm(q, norms.query_weight, norms.eps, shift=norms.shift)
    k = rms_norm(k, norms.key_weight, norms.eps, shift=norms.shift)
    return (q, k) if rotation is None else (rotate(q, *rotation), rotate(k, *rotation))
