"""The forward of sequences whose last tokens look at the others without being seen: ColBERT's query expansion.

The added mask tokens take up the query's context (arXiv 2004.12832, section 3.2) but no token, not even they themselves, attends to
them; the packed kernels have no such mask. Only queries come here, some dozen tokens each; documents take the encoder's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.models.encoder import Attention, TextEncoder
from services.worker.models.packed import Packed

Group = tuple[int, int, int, int]
"""A run of like neighbours: row of its first token, number of sequences, length of each, how many of its first tokens are seen."""


def forward_looking(encoder: TextEncoder, batch: Packed, seen: Sequence[int]) -> Tensor:
    """As `encoder.forward(batch)`, but the tokens of sequence i attend to its first `seen[i]` tokens only. [tokens, hidden]"""
    groups = _groups(batch.lengths, seen)
    bias = None if encoder.relative is None else encoder.relative.table
    x = encoder.embed.forward(batch)
    for layer in encoder.stack:
        x = layer.after_attention(x, _attend(layer.attn, layer.before_attention(x), groups, bias))
    norm = encoder.norm
    return x if norm is None else F.layer_norm(x, (encoder.hidden_size,), norm.weight, norm.bias, norm.eps)


def _groups(lengths: Sequence[int], seen: Sequence[int]) -> list[Group]:
    groups: list[Group] = []
    start = 0
    for (length, visible), run in groupby(zip(lengths, seen, strict=True)):
        count = sum(1 for _ in run)
        groups.append((start, count, length, visible))
        start += count * length
    return groups


def _attend(attention: Attention, x: Tensor, groups: Sequence[Group], bias: Tensor | None) -> Tensor:
    """[tokens, hidden] -> [tokens, hidden], up to the output projection."""
    q, k, v = attention.qkv.forward(x).view(attention.shape).unbind(1)  # [tokens, heads, dim] each
    out = torch.empty_like(q)
    for start, count, length, visible in groups:
        rows = slice(start, start + count * length)
        query, key, value = (part[rows].view(count, length, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
        added = None if bias is None else _by_distance(bias, length, visible)
        mixed = F.scaled_dot_product_attention(
            query, key[:, :, :visible], value[:, :, :visible], attn_mask=added, scale=attention.scale
        )
        out[rows] = mixed.transpose(1, 2).flatten(0, 1)
    return out.flatten(1)


def _by_distance(bias: Tensor, length: int, visible: int) -> Tensor:
    """bias [heads, 2 * reach + 1] -> [heads, length, visible]: column `reach + key - query`, as in `varlen_attention`."""
    keys = torch.arange(visible, device=bias.device)
    queries = torch.arange(length, device=bias.device)
    return bias[:, bias.shape[1] // 2 + keys - queries[:, None]]
