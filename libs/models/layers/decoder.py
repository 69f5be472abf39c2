"""The decoder of an encoder-decoder model (arXiv 1706.03762): each layer also attends to the encoder's states of its sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from libs.kernels.attention.varlen import varlen_attention
from libs.kernels.layout import Layout
from libs.kernels.linear.packed import PackedLinear
from libs.models.layers.embeddings import InputLayer, Table
from libs.models.layers.encoder import (
    Attention,
    AttentionType,
    Norm,
    PackedEncoder,
    PostNormLayer,
    Shared,
    add_and_norm,
)
from libs.models.layers.spec import EncoderSpec, LayerSpec
from libs.models.packed import Packed, Rows
from libs.models.work import Between, nothing_between


class CrossAttention(nn.Module):
    """Attention of a decoder's tokens to the encoder's states, without its output projection, which the layer applies."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        width = spec.heads * spec.head_size
        self.query = PackedLinear(spec.hidden, width, bias=spec.qkv_bias)
        self.kv = PackedLinear(spec.hidden, 2 * width, bias=spec.qkv_bias, slots=[width, width])
        self.out = PackedLinear(width, spec.hidden, bias=spec.out_bias)
        self._heads, self._size = spec.heads, spec.head_size
        self._scale = spec.head_size**-0.5 if spec.scale is None else spec.scale

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's states [tokens, hidden] -> [tokens, heads, head_size] twice."""
        k, v = self.kv.forward(states).view(-1, 2 * self._heads, self._size).chunk(2, dim=1)
        return k, v

    def forward(self, x: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """[queries, hidden], keys and values of `keys_and_values` -> [queries, heads * head_size]"""
        q = self.query.forward(x).view(-1, self._heads, self._size)
        return varlen_attention(q, k, v, layout, scale=self._scale).flatten(1)


class CrossLayer(PostNormLayer):
    """BERT's layer with cross attention between self-attention and feed-forward, and a norm after each of the three."""

    def __init__(self, spec: EncoderSpec, layer: LayerSpec, attention: AttentionType = Attention) -> None:
        super().__init__(spec, layer, attention)
        self.cross, self.cross_norm = CrossAttention(spec), Norm(spec)

    def decode(self, x: Tensor, states: Tensor, batch: Packed, shared: Shared) -> Tensor:
        """[tokens, hidden] and the encoder's states of the same tokens -> [tokens, hidden]"""
        return self._rest(x, self.attn.forward(x, batch, shared), states, batch.layout)

    def decode_rows(self, x: Tensor, states: Tensor, batch: Packed, shared: Shared, rows: Tensor, layout: Layout) -> Tensor:
        """The same for one row of each sequence: [sequences, hidden]"""
        return self._rest(x.index_select(0, rows), self.attn.of_rows(x, batch, shared, rows, layout), states, layout)

    def _rest(self, x: Tensor, mixed: Tensor, states: Tensor, layout: Layout) -> Tensor:
        x = self.attn.out.add(mixed, x) if self.attn_norm is None else add_and_norm(self.attn.out, self.attn_norm, mixed, x)[1]
        mixed = self.cross.forward(x, *self.cross.keys_and_values(states), layout)
        x = add_and_norm(self.cross.out, self.cross_norm, mixed, x)[1]
        return add_and_norm(self.ffn, self.ffn_norm, x, x)[1]


class DecoderEmbedding(nn.Module):
    """A decoder's positions and norm; the vectors of tokens are the encoder's. `offset`: rows of `positions` before the first."""

    def __init__(self, spec: EncoderSpec, positions: int, offset: int) -> None:
        super().__init__()
        self.position, self.norm = Table(positions, spec.hidden), Norm(spec)
        self._offset = offset

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Vectors of tokens [tokens, hidden], and their places [tokens] -> [tokens, hidden]"""
        return self.norm.forward(tokens + self.position.forward(positions + self._offset))


class Decoder(nn.Module):
    """A stack of layers with cross attention. `start`: the token before those of each sequence, of which the last is dropped."""

    def __init__(self, spec: EncoderSpec, embed: DecoderEmbedding, start: int) -> None:
        """`spec.causal` must be true."""
        super().__init__()
        self.embed = embed
        self.stack = tuple(CrossLayer(spec, each) for each in spec.layers)
        self.layers = nn.ModuleList(self.stack)
        self.start = start

    def forward(
        self, states: Tensor, batch: Packed, table: Table, rows: Rows | None = None, between: Between = nothing_between
    ) -> Tensor:
        """The states of the batch's tokens shifted right by one: [tokens, hidden], or [sequences, hidden] with `rows`.

        `states`: the encoder's, of the same batch. `table`: of token vectors.
        """
        x = self.embed.forward(table.forward(self.shifted(batch)), batch.positions)
        shared = Shared({}, None)
        short = rows == "last"
        for layer in self.stack[:-1] if short else self.stack:
            between()
            x = layer.decode(x, states, batch, shared)
        if rows is None:
            return x
        chosen = batch.rows(rows)
        if not short:
            return x.index_select(0, chosen)
        between()
        return self.stack[-1].decode_rows(x, states, batch, shared, chosen, batch.row_layout())

    def shifted(self, batch: Packed) -> Tensor:
        """The ids of the batch, in each sequence one place further: [tokens]"""
        return torch.where(batch.positions == 0, self.start, batch.ids.roll(1))


class EncoderDecoder(PackedEncoder):
    """An encoder and a decoder over the same tokens shifted right, whose states are those that a head reads."""

    def __init__(self, spec: EncoderSpec, embed: InputLayer, decoder: Decoder) -> None:
        super().__init__(spec, embed)
        self.decoder = decoder

    @torch.inference_mode()
    def forward(self, batch: Packed, rows: Rows | None = None, between: Between = nothing_between) -> Tensor:
        states = super().forward(batch, None, between)
        return self.decoder.forward(states, batch, self.table, rows, between)

    @property
    def table(self) -> Table:
        """The vectors of tokens, which both sides share."""
        table = self.embed.get_submodule("token")
        if not isinstance(table, Table):
            raise TypeError("the encoder takes no token ids")
        return table
