"""The decoder of an encoder-decoder model (arXiv 1706.03762): each layer also attends to the
encoder's states of its sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from libs.kernels.attention.varlen import varlen_attention
from libs.kernels.layout import Layout
from libs.kernels.linear.packed import PackedLinear
from libs.models.layers.embeddings import InputLayer, Table
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
from libs.models.packed import Packed, Rows
from libs.models.work import YieldPoint, never_yield


class CrossAttention(nn.Module):
    """The projections of attention to an encoder's states, which are `source` numbers wide. Heads
    are those of the decoder.
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
    """A decoder's layer. While a text is written, keys and values of the states (`keys`) are
    computed once and stored in pages.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        layer: LayerSpec,
        attention: AttentionType = Attention,
        *,
        source: int,
    ) -> None:
        """`source`: width of the encoder's states."""
        super().__init__(spec, layer, attention)
        self.cross = CrossAttention(spec, source)
        self.cross_norm = Norm(spec)

    def keys(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, source] -> keys and values, [tokens, heads, head_size] each"""
        cross = self.cross
        k, v = cross.kv.forward(states).view(-1, 2 * cross.heads, cross.head_size).chunk(2, dim=1)
        return k, v

    def after_self(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's input and what its own attention mixed -> the residual so far, and queries
        [rows, heads, head_size].
        """
        raise NotImplementedError

    def after_cross(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual so far and what attention to the states mixed, [rows, heads * head_size] ->
        the layer's result.
        """
        raise NotImplementedError

    def queries(self, x: Tensor) -> Tensor:
        return self.cross.q.forward(x).view(-1, self.cross.heads, self.cross.head_size)

    def decode(self, x: Tensor, states: Tensor, batch: Packed, shared: Shared) -> Tensor:
        """[tokens, hidden] and the encoder's states of the same tokens -> [tokens, hidden]"""
        return self._see(
            x, self.attn.forward(self.before_attention(x), batch, shared), states, batch.layout
        )

    def decode_rows(
        self, x: Tensor, states: Tensor, batch: Packed, shared: Shared, rows: Tensor, layout: Layout
    ) -> Tensor:
        """The same for one row of each sequence: [sequences, hidden]"""
        mixed = self.attn.of_rows(self.before_attention(x), batch, shared, rows, layout)
        return self._see(x.index_select(0, rows), mixed, states, layout)

    def _see(self, x: Tensor, mixed: Tensor, states: Tensor, layout: Layout) -> Tensor:
        x, queries = self.after_self(x, mixed)
        seen = varlen_attention(queries, *self.keys(states), layout, scale=self.cross.scale)
        return self.after_cross(x, seen.flatten(1))


class PostNormCrossLayer(CrossLayer):
    """BART: norm after each residual add."""

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
    """mBART, T5: norm before each block; the residual stream itself is not normalised."""

    def after_self(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        x, normed = add_and_norm(self.attn.out, self.cross_norm, mixed, x)
        return x, self.queries(normed)

    def after_cross(self, x: Tensor, mixed: Tensor) -> Tensor:
        x, normed = add_and_norm(self.cross.out, self.ffn_norm, mixed, x)
        # The sum was made here, and nothing else reads it.
        return self.ffn.add(normed, x, overwrite=True)


def cross_layer(spec: EncoderSpec, source: int) -> Callable[..., CrossLayer]:
    """The kind of layer that `spec.norm` names, for `PackedEncoder`. `source`: width of the
    encoder's states.
    """
    return partial(PreNormCrossLayer if spec.norm == "pre" else PostNormCrossLayer, source=source)


class DecoderEmbedding(nn.Module):
    """A decoder's positions and norm; the vectors of tokens are the encoder's. `offset`: rows of
    `positions` before the first.
    """

    def __init__(self, spec: EncoderSpec, positions: int, offset: int) -> None:
        super().__init__()
        self.position, self.norm = Table(positions, spec.hidden), Norm(spec)
        self._offset = offset

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Vectors of tokens [tokens, hidden], and their places [tokens] -> [tokens, hidden]"""
        return self.norm.forward(tokens + self.position.forward(positions + self._offset))


class Decoder(nn.Module):
    """A stack of layers with cross attention. `start`: the token before those of each sequence, of
    which the last is dropped.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        start: int,
        *,
        embed: DecoderEmbedding | None = None,
        relative: PositionBias | None = None,
    ) -> None:
        """`spec.causal` must be true. `embed` None: the vectors of tokens alone."""
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
        table: Table,
        rows: Rows | None = None,
        between: YieldPoint = never_yield,
    ) -> Tensor:
        """The states of the batch's tokens shifted right by one: [tokens, hidden], or [sequences,
        hidden] with `rows`.

        `states`: the encoder's, of the same batch. `table`: of token vectors.
        """
        x = table.forward(self.shifted(batch))
        x = x if self.embed is None else self.embed.forward(x, batch.positions)
        shared = Shared({}, None if self.relative is None else self.relative.table)
        short = rows == "last"
        for layer in self.stack[:-1] if short else self.stack:
            between()
            x = layer.decode(x, states, batch, shared)
        if rows is not None:
            between()
            chosen = batch.rows(rows)
            if short:
                x = self.stack[-1].decode_rows(x, states, batch, shared, chosen, batch.row_layout())
            else:
                x = x.index_select(0, chosen)
        return x if self.norm is None else self.norm.forward(x)

    def shifted(self, batch: Packed) -> Tensor:
        """The ids of the batch, in each sequence one place further: [tokens]"""
        return torch.where(batch.positions == 0, self.start, batch.ids.roll(1))


class EncoderDecoder(PackedEncoder):
    """An encoder and a decoder over the same tokens shifted right, whose states are those that a
    head reads.
    """

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
        self, batch: Packed, rows: Rows | None = None, between: YieldPoint = never_yield
    ) -> Tensor:
        states = super().forward(batch, None, between)
        return self.decoder.forward(states, batch, self.table, rows, between)

    @property
    def table(self) -> Table:
        """The vectors of tokens, which both sides share."""
        table = self.embed.get_submodule("token")
        if not isinstance(table, Table):
            raise TypeError("the encoder takes no token ids")
        return table
