"""Windowed attention with sinks: each head has a learnt score that takes part in the softmax and
belongs to no token (gpt-oss).

No kernel of `libs/kernels` supports sinks. The window makes them cheap without one: tokens are
divided into blocks as long as the window, and each block attends to itself and its two neighbours.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.kernels.layout import BatchLayout
from libs.kernels.rows.rope import rotate
from libs.models.interface.packed import Packed
from libs.models.layers.encoder import Attention, Shared
from libs.models.layers.spec import EncoderSpec, LayerSpec

_MIN_BLOCK: Final = 32
_BLOCKS: Final = 32
"""Maximum number of blocks with scores in memory at a time."""


class SinkAttention(Attention):
    """Bidirectional windowed attention with sinks. Rotary positions rotate dimensions 2i and 2i + 1
    of a head.
    """

    def __init__(self, spec: EncoderSpec, layer: LayerSpec) -> None:
        super().__init__(spec, layer)
        # Int8 projections would send tokens to other experts, which hold nearly all weights and
        # stay unquantised.
        self.qkv.exact = self.out.exact = True
        self.sinks: Tensor = nn.Parameter(torch.empty(spec.heads), requires_grad=False)

    def project(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        fused = self.qkv.forward(x).view(-1, sum(self.parts), self.head_size)
        turned, v = fused.split_with_sizes((sum(self.parts[:2]), self.parts[2]), dim=1)
        if self.rope is not None:
            # Reorder queries and keys alike into halves, which leaves their products unchanged.
            halves = turned.view(*turned.shape[:2], -1, 2).transpose(2, 3).flatten(2)
            turned = rotate(halves, *shared.rotations[self.rope])
        q, k = turned.split_with_sizes(self.parts[:2], dim=1)
        return q, k, v

    def forward_rows(
        self, x: Tensor, batch: Packed, shared: Shared, rows: Tensor, layout: BatchLayout
    ) -> Tensor:
        return self.forward(x, batch, shared).index_select(0, rows)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Packed, layout: BatchLayout, shared: Shared
    ) -> Tensor:
        if self.window is None:
            raise ValueError("attention with sinks needs a window")
        return attend(
            q, k, v, batch.positions, self.sinks, scale=self.scale, window=self.window
        ).flatten(1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, sinks: Tensor, *, scale: float, window: int
) -> Tensor:
    """Attend to a sequence's keys within `window` on each side, with the head's sink in the
    softmax.

    It computes in float32 and returns [tokens, heads, dim] in the type of q.

    Args:
        q: [tokens, heads, dim]
        k: [tokens, kv_heads, dim]
        v: [tokens, kv_heads, dim]
        positions: [tokens], 0 where a sequence begins.
        sinks: [heads]
    """
    tokens, block = len(q), max(window, _MIN_BLOCK)
    blocks = -(-tokens // block)
    after = blocks * block - tokens
    # The sequence number of each token. Padding gets a number that no sequence has.
    number = (positions == 0).cumsum(0)
    own = F.pad(number, (0, after), value=-1).view(blocks, block)
    other = F.pad(number, (block, after + block), value=-2).view(blocks + 2, block)
    queries = F.pad(q, (0, 0, 0, 0, 0, after)).view(blocks, block, *q.shape[1:])
    keys, values = (
        F.pad(x, (0, 0, 0, 0, block, after + block)).view(blocks + 2, block, *x.shape[1:])
        for x in (k, v)
    )
    places = torch.arange(3 * block, device=q.device)
    near = (places[block : 2 * block, None] - places).abs() <= window
    found = []
    for first in range(0, blocks, _BLOCKS):
        last = min(first + _BLOCKS, blocks)
        seen = near & (own[first:last, :, None] == _three(other, first, last)[:, None])
        found.append(
            _mixed(
                queries[first:last],
                _three(keys, first, last),
                _three(values, first, last),
                seen,
                sinks,
                scale,
            )
        )
    return torch.cat(found).flatten(0, 1)[:tokens].to(q.dtype)


def _three(x: Tensor, first: int, last: int) -> Tensor:
    """Concatenate each block with its neighbours: [blocks + 2, block, ...] to [last - first, 3 *
    block, ...].
    """
    return torch.cat([x[first + shift : last + shift] for shift in range(3)], dim=1)


def _mixed(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Attend from [blocks, queries, heads, dim] to keys and values [blocks, keys, kv_heads, dim]
    through the mask [blocks, queries, keys]. Returns the shape of q in float32.
    """
    grouped = q.float().view(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = torch.einsum("nqhgd,nkhd->nhgqk", grouped * scale, k.float())
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    sink = sinks.float().view(1, k.shape[2], -1, 1, 1)
    highest = torch.maximum(scores.amax(-1, keepdim=True), sink)
    shares = (scores - highest).exp()
    total = shares.sum(-1, keepdim=True) + (sink - highest).exp()
    return torch.einsum("nhgqk,nkhd->nqhgd", shares / total, v.float()).flatten(2, 3)
