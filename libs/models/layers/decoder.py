"""The decoder of an encoder-decoder model (arXiv 1706.03762): each layer also attends to the
encoder's states of its sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from libs.kernels.attention.varlen import varlen_attention
from libs.kernels.layout import BatchLayout
from libs.kernels.linear.packed import PackedLinear
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import YieldPoint, never_yield
from libs.models.layers.embeddings import EmbeddingTable, InputLayer
from libs.models.layers.encoder import (
    Attention,
    AttentionType,
    Layer,
    Norm,
    PackedEncoder,
    PositionBias,
    Shared,
    add_and_norm,
    norm_of_sum,
)
from libs.models.layers.spec import EncoderSpec, LayerSpec


class CrossAttention(nn.Module):
    """The projections of attention to an encoder's states. It has the decoder's heads.

    Args:
        source: Width of the encoder's states.
    """

    def __init__(self, spec: EncoderSpec, source: int) -> None:
        super().__init__()
        width = spec.heads * spec.head_size
        self.q = PackedLinear(spec.hidden, width, bias=spec.qkv_bias)
        self.kv = PackedLinear(source, 2 * width, bias=spec.qkv_bias, slots=[width, width])
        self.out = PackedLinear(width, spec.hidden, bias=spec.out_bias)
        self.heads, self.head_size = spec.heads, spec.head_size
        self.scale = spec.head_size**-0.5 if spec.scale is None else spec.scale


class CrossLayer(Layer):
    """A decoder layer with cross attention.

    Generation computes the keys and values of the encoder's states (`keys`) once and stores them in
    pages.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        layer: LayerSpec,
        attention: AttentionType = Attention,
        *,
        source: int,
    ) -> None:
        """`source` is the width of the encoder's states."""
        super().__init__(spec, layer, attention)
        self.cross = CrossAttention(spec, source)
        self.cross_norm = Norm(spec)

    def keys(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project states [tokens, source] to keys and values, [tokens, heads, head_size] each."""
        cross = self.cross
        k, v = cross.kv.forward(states).view(-1, 2 * cross.heads, cross.head_size).chunk(2, dim=1)
        return k, v

    def after_self(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Add the output of self-attention to the layer's input.

        Returns the residual stream and the queries [rows, heads, head_size] of cross attention.
        """
        raise NotImplementedError

    def after_cross(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Finish the layer from the residual stream and the output of cross attention, [rows, heads
        * head_size]."""
        raise NotImplementedError

    def queries(self, x: Tensor) -> Tensor:
        return self.cross.q.forward(x).view(-1, self.cross.heads, self.cross.head_size)

    def decode(self, x: Tensor, states: Tensor, batch: Packed, shared: Shared) -> Tensor:
        """Map [tokens, hidden] and the encoder's states of the same tokens to [tokens, hidden]."""
        return self._attend_states(
            x, self.attn.forward(self.before_attention(x), batch, shared), states, batch.layout
        )

    def decode_rows(
        self,
        x: Tensor,
        states: Tensor,
        batch: Packed,
        shared: Shared,
        rows: Tensor,
        layout: BatchLayout,
    ) -> Tensor:
        """Run `decode` for one row of each sequence and return [sequences, hidden]."""
        mixed = self.attn.forward_rows(self.before_attention(x), batch, shared, rows, layout)
        return self._attend_states(x.index_select(0, rows), mixed, states, layout)

    def _attend_states(
        self, x: Tensor, mixed: Tensor, states: Tensor, layout: BatchLayout
    ) -> Tensor:
        x, queries = self.after_self(x, mixed)
        seen = varlen_attention(queries, *self.keys(states), layout, scale=self.cross.scale)
        return self.after_cross(x, seen.flatten(1))


class PostNormCrossLayer(CrossLayer):
    """Apply the norm after each residual add, as BART does."""

    def before_attention(self, x: Tensor) -> Tensor:
        return x

    def after_self(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        x = (
            self.attn.out.add(mixed, x)
            if self.attn_norm is None
            else norm_of_sum(self.attn.out, self.attn_norm, mixed, x)
        )
        return x, self.queries(x)

    def after_cross(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = norm_of_sum(self.cross.out, self.cross_norm, mixed, x)
        return norm_of_sum(self.ffn, self.ffn_norm, x, x)


class PreNormCrossLayer(CrossLayer):
    """Apply the norm before each block, as mBART and T5 do; the residual stream is not
    normalised."""

    def after_self(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        x, normed = add_and_norm(self.attn.out, self.cross_norm, mixed, x)
        return x, self.queries(normed)

    def after_cross(self, x: Tensor, mixed: Tensor) -> Tensor:
        x, normed = add_and_norm(self.cross.out, self.ffn_norm, mixed, x)
        # This method created the sum, and nothing else reads it.
        return self.ffn.add(normed, x, overwrite=True)


def cross_layer(spec: EncoderSpec, source: int) -> Callable[..., CrossLayer]:
    """Return the constructor of the layer that `spec.norm` names, for `PackedEncoder`.

    `source` is the width of the encoder's states.
    """
    return partial(PreNormCrossLayer if spec.norm == "pre" else PostNormCrossLayer, source=source)


class DecoderEmbedding(nn.Module):
    """A decoder's position table and norm; it shares the encoder's token vectors.

    Args:
        offset: Number of rows of `positions` before the first position.
    """

    def __init__(self, spec: EncoderSpec, positions: int, offset: int) -> None:
        super().__init__()
        self.position, self.norm = EmbeddingTable(positions, spec.hidden), Norm(spec)
        self._offset = offset

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Add positions to token vectors [tokens, hidden] and normalise them."""
        return self.norm.forward(tokens + self.position.forward(positions + self._offset))


class Decoder(nn.Module):
    """A stack of layers with cross attention.

    Args:
        start: The token inserted before each sequence; the last token of the sequence is dropped.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        start: int,
        *,
        embed: DecoderEmbedding | None = None,
        relative: PositionBias | None = None,
    ) -> None:
        """`spec.causal` must be true. Without `embed`, layers receive the token vectors alone."""
        super().__init__()
        self.embed, self.relative = embed, relative
        kind = cross_layer(spec, spec.hidden)
        self.stack = tuple(kind(spec, each) for each in spec.layers)
        self.layers = nn.ModuleList(self.stack)
        self.norm = None if spec.norm == "post" else Norm(spec)
        self.start = start

    def forward(
        self,
        states: Tensor,
        batch: Packed,
        table: EmbeddingTable,
        rows: Rows | None = None,
        yield_point: YieldPoint = never_yield,
    ) -> Tensor:
        """Return the states of the batch's tokens shifted right by one: [tokens, hidden], or
        [sequences, hidden] with `rows`.

        Args:
            states: The encoder's states of the same batch.
            table: The table of token vectors.
        """
        x = table.forward(self.shifted(batch))
        x = x if self.embed is None else self.embed.forward(x, batch.positions)
        shared = Shared({}, None if self.relative is None else self.relative.table)
        short = rows == "last"
        for layer in self.stack[:-1] if short else self.stack:
            yield_point()
            x = layer.decode(x, states, batch, shared)
        if rows is not None:
            yield_point()
            chosen = batch.rows(rows)
            if short:
                x = self.stack[-1].decode_rows(x, states, batch, shared, chosen, batch.row_layout())
            else:
                x = x.index_select(0, chosen)
        return x if self.norm is None else self.norm.forward(x)

    def shifted(self, batch: Packed) -> Tensor:
        """Return the batch's token ids, each sequence shifted right by one place: [tokens]."""
        return torch.where(batch.positions == 0, self.start, batch.ids.roll(1))


class EncoderDecoder(PackedEncoder):
    """An encoder and a decoder over the same tokens shifted right. Heads read the decoder's
    states."""

    def __init__(
        self,
        spec: EncoderSpec,
        embed: InputLayer,
        decoder: Decoder,
        *,
        relative: PositionBias | None = None,
    ) -> None:
        super().__init__(spec, embed, relative=relative)
        self.decoder = decoder

    @torch.inference_mode()
    def forward(
        self, batch: Packed, rows: Rows | None = None, yield_point: YieldPoint = never_yield
    ) -> Tensor:
        states = super().forward(batch, None, yield_point)
        return self.decoder.forward(states, batch, self.table, rows, yield_point)

    @property
    def table(self) -> EmbeddingTable:
        """Return the token vectors that encoder and decoder share."""
        table = self.embed.get_submodule("token")
        if not isinstance(table, EmbeddingTable):
            raise TypeError("the encoder takes no token ids")
        return table
