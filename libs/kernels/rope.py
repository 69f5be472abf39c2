"""Rotary position embedding (RoPE, arXiv 2104.09864) of packed queries and keys.

`angles` is computed once a forward for each distinct frequency list, `rotate` once a layer for queries and keys together.
"""

from __future__ import annotations

import torch
from torch import Tensor


def angles(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, pairs], float32, times `factor` (YaRN's attention factor). positions: [tokens]; frequencies: [pairs]."""
    turned = positions.float()[:, None] * frequencies
    return turned.cos() * factor, turned.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first 2 x pairs numbers of every head, and leave the rest. x: [tokens, heads, dim] -> the same shape and type.

    Number i turns with number i + pairs (GPT-NeoX's layout, as in transformers).
    """
    pairs = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    a, b = x[..., :pairs].float(), x[..., pairs : 2 * pairs].float()
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)
    return turned if 2 * pairs == x.shape[-1] else torch.cat((turned, x[..., 2 * pairs :]), dim=-1)
