"""The first layer of an encoder: it maps token ids, or given rows, to hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.kernels import native
from libs.kernels.linear.int8 import quantise_rows
from libs.kernels.linear.lora import LoraUpdates
from libs.kernels.linear.packed import PackedLinear
from libs.kernels.rows.norms import layer_norm
from libs.models.interface.packed import Packed
from libs.models.layers.spec import EmbeddingSpec


class EmbeddingTable(nn.Module):
    """A lookup table.

    It holds `weight` [rows, size], or in int8 `codes` and `scales` [rows] float32. `delta` is the
    low-rank update by the current batch's LoRA adapters; None without an adapter.
    """

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(rows, size), requires_grad=False)
        self.codes: Tensor | None
        self.scales: Tensor | None
        self.delta: LoraUpdates | None = None
        self.register_buffer("codes", None, persistent=False)
        self.register_buffer("scales", None, persistent=False)

    def quantise(self) -> None:
        """Replace the weight by int8 codes and a scale for each row. Call it after loading."""
        if self.codes is None:
            self.codes, self.scales = quantise_rows(self.weight)
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """[tokens] -> [tokens, size]"""
        rows = self._rows(numbers)
        return rows if self.delta is None else self.delta.add_rows_to(rows, numbers)

    def _rows(self, numbers: Tensor) -> Tensor:
        if self.codes is None or self.scales is None:
            return F.embedding(numbers, self.weight)
        rows = self.codes.index_select(0, numbers) * self.scales.index_select(0, numbers)[:, None]
        return rows.to(self.weight.dtype)


class EmbeddingNorm(nn.LayerNorm):
    """LayerNorm that runs the same kernels as the layers."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [tokens, size]."""
        return layer_norm(x, self.weight, self.bias, self.eps)


class InputLayer(nn.Module):
    """The first layer of an encoder: it maps the batch's input to the first hidden states."""

    max_positions: int
    """Number of tokens of the longest sequence."""
    vocabulary: int = 0
    """Number of token ids; 0 for a layer that accepts only given rows."""
    segments: int = 0
    """Number of segments (token types); 0 or 1 for none."""
    row_size: int
    """Elements in a row of `Packed.given`."""

    def forward(self, batch: Packed) -> Tensor:
        """Return the first hidden states, [tokens, hidden]."""
        raise NotImplementedError


class TokenEmbedding(InputLayer):
    """Map token ids to hidden states, as an EmbeddingSpec describes. Rows given with the batch
    replace the vectors of their tokens.
    """

    def __init__(self, spec: EmbeddingSpec) -> None:
        super().__init__()
        size = spec.size
        self.token = EmbeddingTable(spec.vocabulary, size)
        self.position = EmbeddingTable(spec.positions, size) if spec.table else None
        self.segment = EmbeddingTable(spec.segments, size) if spec.segments else None
        hidden = size if spec.hidden is None else spec.hidden
        width = hidden if spec.norm_last else size
        self.norm = (
            None
            if spec.norm_eps is None
            else EmbeddingNorm(width, eps=spec.norm_eps, bias=spec.norm_bias)
        )
        self.project = (
            PackedLinear(size, hidden, bias=not spec.norm_last)
            if hidden != size or spec.projected
            else None
        )
        self.max_positions, self.vocabulary, self.segments = (
            spec.positions - spec.offset,
            spec.vocabulary,
            spec.segments,
        )
        self.row_size = hidden
        self._offset, self._scale, self._norm_last = spec.offset, spec.scale, spec.norm_last
        self.places: Tensor | None
        self.register_buffer("places", None, persistent=False)

    def add_segments(self, weight: Tensor) -> None:
        """Give an encoder without segments a segment table, [segments, size]."""
        self.segments = len(weight)
        self.segment = EmbeddingTable(self.segments, weight.shape[1])
        self.segment.weight = nn.Parameter(weight.to(self.token.weight.dtype), requires_grad=False)

    def prepare(self) -> None:
        """Fold the offset, and the vector of segment 0 that nearly every token has, into the
        position table. Call it after loading.
        """
        if self.position is not None:
            places = self.position.weight[self._offset :]
            self.places = places if self.segment is None else places + self.segment.weight[0]

    def forward(self, batch: Packed) -> Tensor:
        """Return the first hidden states, [tokens, hidden]."""
        x = self._sum(batch)
        if self.project is not None and self._norm_last:
            x = self.project.forward(x)
        if self.norm is not None:
            x = self.norm.forward(x)
        if self.project is not None and not self._norm_last:
            x = self.project.forward(x)
        return (
            x
            if batch.given is None
            else x.index_copy(0, batch.given.places, batch.given.values.to(x.dtype))
        )

    def _sum(self, batch: Packed) -> Tensor:
        x = self._plain_sum(batch)
        if self.segment is not None and self.segment.delta is not None and batch.type_ids is None:
            x = self.segment.delta.add_rows_to(x, torch.zeros_like(batch.ids))
        return x

    def _plain_sum(self, batch: Packed) -> Tensor:
        """Return the sum without the adapters' update to segment 0, for a batch without
        segments."""
        is_plain = self.token.codes is None and self.token.delta is None and self._scale == 1.0
        if (
            is_plain
            and self.places is not None
            and (self.segment is None or batch.type_ids is None)
        ):
            done = native.embed(self.token.weight, batch.ids, self.places, batch.positions)
            if done is not None:
                return done
        x = self.token.forward(batch.ids)
        if self.places is not None and (self.segment is None or batch.type_ids is None):
            x = x + F.embedding(batch.positions, self.places)
        else:
            if self.segment is not None:
                x = x + (
                    self.segment.weight[0]
                    if batch.type_ids is None
                    else self.segment.forward(batch.type_ids)
                )
            if self.position is not None:
                x = x + self.position.forward(batch.positions + self._offset)
        return x if self._scale == 1.0 else x * self._scale
