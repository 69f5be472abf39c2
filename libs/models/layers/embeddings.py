"""The embedding layer of an encoder: token ids to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.kernels.linear import PackedLinear
from libs.models.packed import Packed


class Table(nn.Module):
    """A lookup table: `weight` [rows, size]."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(rows, size), requires_grad=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """[tokens] -> [tokens, size]"""
        return F.embedding(numbers, self.weight)


class TokenEmbedding(nn.Module):
    """The sum of token and, where the family has them, position and segment embeddings; normalised, and projected to `hidden`.

    `positions`: the rows of the position table, of which the first `offset` are for padding (RoBERTa); the rest are the longest
    sequence. `table` False: no position embeddings (RoPE, ALiBi). `norm_eps` None: no norm. `scale`: the factor on the sum.
    `norm_last`: projected first, without a bias, then normalised.
    """

    def __init__(
        self,
        vocabulary: int,
        size: int,
        *,
        positions: int,
        norm_eps: float | None,
        norm_bias: bool = True,
        table: bool = True,
        offset: int = 0,
        segments: int = 0,
        scale: float = 1.0,
        hidden: int | None = None,
        norm_last: bool = False,
    ) -> None:
        super().__init__()
        self.token = Table(vocabulary, size)
        self.position = Table(positions, size) if table else None
        self.segment = Table(segments, size) if segments else None
        hidden = size if hidden is None else hidden
        width = hidden if norm_last else size
        self.norm = None if norm_eps is None else nn.LayerNorm(width, eps=norm_eps, bias=norm_bias)
        self.project = PackedLinear(size, hidden, bias=not norm_last) if hidden != size else None
        self.max_positions = positions - offset
        self._offset, self._scale, self._norm_last = offset, scale, norm_last
        self.places: Tensor | None
        self.register_buffer("places", None, persistent=False)

    def prepare(self) -> None:
        """Once loaded: folds the offset and the vector of segment 0, which nearly every token has, into the position table."""
        if self.position is not None:
            places = self.position.weight[self._offset :]
            self.places = places if self.segment is None else places + self.segment.weight[0]

    def forward(self, batch: Packed) -> Tensor:
        """[tokens, hidden]"""
        x = self._sum(batch)
        if self.project is not None and self._norm_last:
            x = self.project.forward(x)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.project is None or self._norm_last else self.project.forward(x)

    def _sum(self, batch: Packed) -> Tensor:
        x = self.token.forward(batch.ids)
        if self.places is not None and (self.segment is None or batch.type_ids is None):
            x = x + F.embedding(batch.positions, self.places)
        else:
            if self.segment is not None:
                x = x + (self.segment.weight[0] if batch.type_ids is None else self.segment.forward(batch.type_ids))
            if self.position is not None:
                x = x + self.position.forward(batch.positions + self._offset)
        return x if self._scale == 1.0 else x * self._scale
