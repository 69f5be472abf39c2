"""The first stop of a forward: token ids to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.kernels.linear import PackedLinear
from services.worker.models.packed import Packed


class Table(nn.Module):
    """A lookup table: `weight` [rows, size]."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(rows, size), requires_grad=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """[tokens] -> [tokens, size]"""
        return F.embedding(numbers, self.weight)


class TokenEmbedding(nn.Module):
    """The sum of token, position and, where the family has them, segment vectors; normalised, and widened to the encoder's size.

    `offset`: rows at the start of the position table that stand for padding (RoBERTa's kin).
    """

    def __init__(
        self,
        vocabulary: int,
        size: int,
        *,
        positions: int,
        norm_eps: float,
        offset: int = 0,
        segments: int = 0,
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        self.token = Table(vocabulary, size)
        self.position = Table(positions, size)
        self.segment = Table(segments, size) if segments else None
        self.norm = nn.LayerNorm(size, eps=norm_eps)
        self.project = PackedLinear(size, hidden) if hidden is not None and hidden != size else None
        self.max_positions = positions - offset
        self._offset = offset
        self.places: Tensor
        self.register_buffer("places", torch.empty(0, size), persistent=False)

    def prepare(self) -> None:
        """Once loaded: add the offset and segment 0, which is nearly every token's, to the position table for good."""
        places = self.position.weight[self._offset :]
        self.places = places if self.segment is None else places + self.segment.weight[0]

    def forward(self, batch: Packed) -> Tensor:
        """[tokens, hidden]"""
        x = self.token(batch.ids)
        if self.segment is None or batch.type_ids is None:
            x = x + F.embedding(batch.positions, self.places)
        else:
            x = x + self.segment(batch.type_ids) + self.position(batch.positions + self._offset)
        x = self.norm(x)
        return x if self.project is None else self.project.forward(x)
