"""Layers of a decoder that attends to an encoder's states, between its own attention and its feed-forward."""

from __future__ import annotations

from torch import Tensor, nn

from libs.kernels.linear.packed import PackedLinear
from libs.models.layers.encoder import AttentionType, Layer, Norm, add_and_norm
from libs.models.layers.spec import EncoderSpec, LayerSpec


class CrossAttention(nn.Module):
    """The projections of attention to an encoder's states, which are `source` numbers wide. Heads are those of the decoder."""

    def __init__(self, spec: EncoderSpec, source: int) -> None:
        super().__init__()
        width = spec.heads * spec.head_size
        self.q = PackedLinear(spec.hidden, width, bias=spec.qkv_bias)
        self.kv = PackedLinear(source, 2 * width, bias=spec.qkv_bias, slots=[width, width])
        self.out = PackedLinear(width, spec.hidden, bias=spec.out_bias)
        self.heads, self.head_size = spec.heads, spec.head_size
        self.scale = spec.head_size**-0.5 if spec.scale is None else spec.scale


class CrossLayer(Layer):
    """A decoder's layer. Keys and values of the states are computed once (`keys`), and stored in pages of their own."""

    def __init__(self, spec: EncoderSpec, layer: LayerSpec, attention: AttentionType, *, source: int) -> None:
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
        """The layer's input and what its own attention mixed -> the residual so far, and queries [rows, heads, head_size]."""
        raise NotImplementedError

    def after_cross(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual so far and what attention to the states mixed, [rows, heads * head_size] -> the layer's result."""
        raise NotImplementedError

    def queries(self, x: Tensor) -> Tensor:
        return self.cross.q.forward(x).view(-1, self.cross.heads, self.cross.head_size)


class PostNormCrossLayer(CrossLayer):
    """BART: norm after each residual add."""

    def before_attention(self, x: Tensor) -> Tensor:
        return x

    def after_self(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        total = self.attn.out.add(mixed, x)
        x = total if self.attn_norm is None else self.attn_norm.forward(total)
        return x, self.queries(x)

    def after_cross(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = add_and_norm(self.cross.out, self.cross_norm, mixed, x)[1]
        return add_and_norm(self.ffn, self.ffn_norm, x, x)[1]


class PreNormCrossLayer(CrossLayer):
    """mBART, T5: norm before each block; the residual stream itself is not normalised."""

    def after_self(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        x, normed = add_and_norm(self.attn.out, self.cross_norm, mixed, x)
        return x, self.queries(normed)

    def after_cross(self, x: Tensor, mixed: Tensor) -> Tensor:
        x, normed = add_and_norm(self.cross.out, self.ffn_norm, mixed, x)
        return self.ffn.add(normed, x)
