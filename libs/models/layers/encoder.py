"""The packed transformer encoder: one forward for every family, assembled from an EncoderSpec.

It maps a Packed to hidden states for the heads. Constructors choose every variant, so a forward
compares no names and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from libs.kernels.attention.varlen import varlen_attention
from libs.kernels.layout import BatchLayout, to_device
from libs.kernels.linear.packed import PackedLinear
from libs.kernels.native import layer as native_layer
from libs.kernels.native.library import native
from libs.kernels.rows.gated import gate_up
from libs.kernels.rows.norms import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_of_sum,
    layer_norm_plus,
    rms_norm,
    rms_norm_of_sum,
    rms_norm_plus,
)
from libs.kernels.rows.rope import HeadNorms, angles, norm_rotate, rotate
from libs.kernels.triton_here import has_triton
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import YieldPoint, never_yield
from libs.models.layers.activations import FUNCTIONS
from libs.models.layers.carried import Carried, StateShape
from libs.models.layers.delta import DeltaChunks
from libs.models.layers.embeddings import InputLayer, TokenEmbedding
from libs.models.layers.experts import Experts, GatedExperts
from libs.models.layers.spec import EncoderSpec, LayerSpec, Rope

Rotation = tuple[Tensor, Tensor]
"""cos and sin, [tokens, pairs] float32."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Tensors that all layers of one forward share."""

    rotations: dict[Rope, Rotation]
    bias: Tensor | None
    """The bias on attention scores by distance."""
    chunks: DeltaChunks | None = None
    """The chunks of the batch's tokens, for encoders with gated delta nets."""
    query_scales: Tensor | None = None
    """Factors on queries by their position, [tokens, 1, 1]; None if all of them are 1."""


class Norm(nn.Module):
    """LayerNorm or RMSNorm, chosen by the spec."""

    def __init__(self, spec: EncoderSpec, size: int | None = None) -> None:
        super().__init__()
        size = spec.hidden if size is None else size
        self.weight: Tensor = nn.Parameter(torch.empty(size), requires_grad=False)
        has_bias = spec.norm_kind == "layer" and spec.norm_bias
        self.bias: Tensor | None = (
            nn.Parameter(torch.empty(size), requires_grad=False) if has_bias else None
        )
        self.eps, self.shift, self.rms = spec.norm_eps, spec.norm_shift, spec.norm_kind == "rms"

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size]."""
        if self.rms:
            return rms_norm(x, self.weight, self.eps, shift=self.shift)
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + residual, and the norm of the sum."""
        if self.rms:
            return add_rms_norm(x, residual, self.weight, self.eps, shift=self.shift)
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def norm_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the norm of x + residual, for layers that do not need the sum."""
        if self.rms:
            return rms_norm_of_sum(x, residual, self.weight, self.eps, shift=self.shift)
        return layer_norm_of_sum(x, residual, self.weight, self.bias, self.eps)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + norm(x)."""
        if self.rms:
            return rms_norm_plus(x, residual, self.weight, self.eps, shift=self.shift)
        return layer_norm_plus(x, residual, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Self-attention without its output projection, which the layer fuses with the residual add.

    A family with different attention gives PackedEncoder a subclass that overrides `project` or
    `mix`.
    """

    def __init__(self, spec: EncoderSpec, layer: LayerSpec) -> None:
        super().__init__()
        size = spec.head_size
        self.parts = (spec.heads, spec.shared, spec.shared)
        self.qkv = PackedLinear(
            spec.hidden,
            sum(self.parts) * size,
            bias=spec.qkv_bias,
            slots=[part * size for part in self.parts],
        )
        self.out = PackedLinear(spec.heads * size, spec.hidden, bias=spec.out_bias)
        rms = replace(spec, norm_kind="rms")
        self.q_norm = Norm(rms, size) if spec.qk_norm else None
        self.k_norm = Norm(rms, size) if spec.qk_norm else None
        self.head_size = size
        self.scale = size**-0.5 if spec.scale is None else spec.scale
        self.causal, self.window, self.rope, self.softcap = (
            spec.causal,
            layer.window,
            layer.rope,
            spec.softcap,
        )

    @property
    def is_graph_capturable(self) -> bool:
        """False if the kernels launched depend on sequence lengths."""
        return True

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """States that the mixer carries from token to token in place of keys and values."""
        return ()

    def resume(
        self, x: Tensor, shared: Shared, memory: Sequence[Tensor], carried: Carried
    ) -> Tensor:
        """Mix the new tokens of sequences as `forward` does, from the states in `memory`, one
        tensor for each of `state_shapes`. The new states replace them.
        """
        raise NotImplementedError

    def forward(self, x: Tensor, batch: Packed, shared: Shared) -> Tensor:
        """Attend within each sequence: [tokens, hidden] to [tokens, heads * head_size]."""
        q, k, v = self.project(x, shared)
        return self.mix(q, k, v, batch, batch.layout, shared)

    def forward_rows(
        self, x: Tensor, batch: Packed, shared: Shared, rows: Tensor, layout: BatchLayout
    ) -> Tensor:
        """Attend with one query row of each sequence: [tokens, hidden] to [sequences, heads *
        head_size].
        """
        q, k, v = self.project(x, shared)
        return self.mix(q.index_select(0, rows), k, v, batch, layout, shared)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Packed, layout: BatchLayout, shared: Shared
    ) -> Tensor:
        """Attend from queries [queries, heads, head_size] to keys and values, [tokens, kv_heads,
        head_size] each, and return [queries, heads * head_size].
        """
        if batch.key_rows is not None:
            k, v = k.index_select(0, batch.key_rows), v.index_select(0, batch.key_rows)
        mixed = varlen_attention(
            q,
            k,
            v,
            layout,
            scale=self.scale,
            causal=self.causal,
            window=self.window,
            bias=shared.bias,
            softcap=self.softcap,
        )
        return mixed.flatten(1)

    def project(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        """Project [tokens, hidden] to queries [tokens, heads, head_size], and keys and values
        [tokens, kv_heads, head_size].
        """
        fused = self.qkv.forward(x).view(-1, sum(self.parts), self.head_size)
        # Queries and keys are adjacent in the fused projection, which may be changed in place:
        # nothing else reads it.
        both, v = fused.split_with_sizes((sum(self.parts[:2]), self.parts[2]), dim=1)
        rotation = None if self.rope is None else shared.rotations[self.rope]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = norm_rotate(both, self._head_norms(self.q_norm, self.k_norm), rotation)
        else:
            q, k = (both if rotation is None else rotate(both, *rotation)).split_with_sizes(
                self.parts[:2], dim=1
            )
        return q if shared.query_scales is None else q * shared.query_scales, k, v

    def project_gated(
        self, x: Tensor, shared: Shared
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the result of `project`, and a factor on the output of `mix`, if there is one:
        [tokens, heads * head_size].
        """
        return (*self.project(x, shared), None)

    def _head_norms(self, q_norm: Norm, k_norm: Norm) -> HeadNorms:
        return HeadNorms(q_norm.weight, k_norm.weight, self.parts[0], q_norm.eps, q_norm.shift)


class FeedForward(nn.Module):
    """A feed-forward: the up projection (and the gate), the activation, the down projection."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        fused = spec.activation == "gelu" and not spec.gated
        parts = [spec.ffn] * (2 if spec.gated else 1)
        self.up = PackedLinear(
            spec.hidden,
            sum(parts),
            bias=spec.up_bias,
            activation="gelu" if fused else "none",
            slots=parts,
        )
        self.down = PackedLinear(spec.ffn, spec.hidden, bias=spec.down_bias)
        if spec.gated and spec.activation == "quick_gelu":
            raise ValueError("quick_gelu is not served with a gate")
        self.gated, self.gate_last, self.activation = spec.gated, spec.gate_last, spec.activation
        self._function = None if fused else FUNCTIONS[spec.activation]
        self._is_tanh = spec.activation == "gelu_tanh" and not spec.gated

    def forward(self, x: Tensor) -> Tensor:
        """Apply the up projection and the activation: [rows, hidden] to [rows, ffn]."""
        if self._is_tanh and (done := self.up.gelu_tanh(x)) is not None:
            return done
        x = self.up.forward(x)
        if self._function is None:
            return x
        if self.gated and self.activation != "quick_gelu":
            return gate_up(x, self.activation, gate_last=self.gate_last)
        return self._function(x)

    def whole(self, x: Tensor) -> Tensor:
        """Apply the whole feed-forward to [rows, hidden]."""
        return self.down.forward(self.forward(x))

    def add(self, x: Tensor, residual: Tensor, *, overwrite: bool = False) -> Tensor:
        """Return `whole` plus `residual`. `overwrite` has the meaning it has in
        `PackedLinear.add`."""
        return self.down.add(self.forward(x), residual, overwrite=overwrite)


Block = PackedLinear | FeedForward | Experts | GatedExperts


def add_and_norm(block: Block, norm: Norm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return block(x) + residual and the norm of that sum.

    The residual add is fused into the norm's launch, or into the block's matrix product.
    """
    if has_triton(x):
        return norm.add(_whole(block, x), residual)
    total = block.add(x, residual)
    return total, norm.forward(total)


def norm_of_sum(block: Block, norm: Norm, x: Tensor, residual: Tensor) -> Tensor:
    """Return only the norm that `add_and_norm` returns, where the sum is not needed."""
    if has_triton(x):
        return norm.norm_sum(_whole(block, x), residual)
    return norm.forward(block.add(x, residual))


def _whole(block: Block, x: Tensor) -> Tensor:
    return block.forward(x) if isinstance(block, PackedLinear) else block.whole(x)


def _experts(spec: EncoderSpec, count: int) -> Experts | GatedExperts:
    return GatedExperts(spec, count) if spec.gated else Experts(spec, count)


AttentionType = Callable[[EncoderSpec, LayerSpec], Attention]


class Layer(nn.Module):
    """One transformer layer: attention and feed-forward, each with its residual. Subclasses place
    the norms.
    """

    is_graph_capturable: ClassVar[bool] = True
    """`Attention.is_graph_capturable` for the rest of the layer."""

    def __init__(self, spec: EncoderSpec, layer: LayerSpec, attention: AttentionType) -> None:
        super().__init__()
        self.attn = attention(spec, layer)
        self.ffn: FeedForward | Experts | GatedExperts = (
            FeedForward(spec) if not layer.experts else _experts(spec, layer.experts)
        )
        self.attn_norm = Norm(spec) if layer.attention_norm else None
        self.ffn_norm = Norm(spec)
        self._linears: tuple[PackedLinear, ...] = ()
        self._native: native_layer.NativeLayer | None = None
        # A layer with experts runs PyTorch's operators for all blocks: any other rounding sends
        # some tokens to different experts.
        self._is_asked = any(one.experts for one in spec.layers)

    def _parts(self) -> native_layer.LayerParts | None:
        """Return the layer's parts for the native library, or None if the layer has a rare form."""
        attn, ffn, post = self.attn, self.ffn, type(self) is PostNormLayer
        if (
            not (post or type(self) is PreNormLayer)
            or type(attn) is not Attention
            or type(ffn) is not FeedForward
        ):
            return None
        if attn.softcap is not None:
            return None
        self._linears = attn.qkv, attn.out, ffn.up, ffn.down

        def linear(one: PackedLinear) -> native_layer.Linear:
            return native_layer.Linear(one.panels, one.bias, one.inputs, one.outputs)

        def norm(one: Norm) -> native_layer.NormWeights:
            return native_layer.NormWeights(one.weight, one.bias)

        return native_layer.LayerParts(
            qkv=linear(attn.qkv),
            out=linear(attn.out),
            up=linear(ffn.up),
            down=linear(ffn.down),
            attention_norm=None if self.attn_norm is None else norm(self.attn_norm),
            ffn_norm=norm(self.ffn_norm),
            q_norm=None if attn.q_norm is None else norm(attn.q_norm),
            k_norm=None if attn.k_norm is None else norm(attn.k_norm),
            heads=attn.parts[0],
            kv_heads=attn.parts[1],
            dim=attn.head_size,
            scale=attn.scale,
            causal=attn.causal,
            window=attn.window,
            post=post,
            rms=self.ffn_norm.rms,
            eps=self.ffn_norm.eps,
            shift=self.ffn_norm.shift,
            gated=ffn.gated,
            gate_last=ffn.gate_last,
            activation=ffn.activation,
        )

    def fused(
        self,
        x: Tensor,
        batch: Packed,
        shared: Shared,
        rows: Tensor | None,
        layout: BatchLayout,
        pages: native_layer.LayerPages | None = None,
    ) -> Tensor | None:
        """Run `forward`, or with `rows` `forward_rows`, in one call of the native library.

        Returns None if the library does not support the layer or the batch. `pages` is where keys
        and values are also stored, and possibly read (`NativeLayer.forward`).
        """
        if not x.is_cpu or batch.key_rows is not None or has_triton(x):
            return None
        if shared.query_scales is not None:
            return None
        if x.dtype not in native_layer.LAYER_DTYPES or native() is None:
            return None
        if not self._is_asked:
            # Built at the first call, when all weights are loaded and packed.
            parts, self._is_asked = self._parts(), True
            if parts is not None and native_layer.NativeLayer.takes(parts, x.dtype):
                self._native = native_layer.NativeLayer(parts, x.dtype)
        if self._native is None:
            return None
        if any(linear.delta is not None for linear in self._linears):
            return None
        rope = self.attn.rope
        rotation = None if rope is None else shared.rotations[rope]
        return self._native.forward(x, layout, rows, rotation, shared.bias, None, pages)

    def forward(self, x: Tensor, batch: Packed, shared: Shared) -> Tensor:
        """Apply the layer to [tokens, hidden]."""
        done = self.fused(x, batch, shared, None, batch.layout)
        if done is not None:
            return done
        return self.after_attention(x, self.attn.forward(self.before_attention(x), batch, shared))

    def forward_rows(
        self, x: Tensor, batch: Packed, shared: Shared, rows: Tensor, layout: BatchLayout
    ) -> Tensor:
        """Apply the layer to one row of each sequence. The other rows only supply keys and values.

        Returns [sequences, hidden].
        """
        done = self.fused(x, batch, shared, rows, layout)
        if done is not None:
            return done
        mixed = self.attn.forward_rows(self.before_attention(x), batch, shared, rows, layout)
        return self.after_attention(x.index_select(0, rows), mixed)

    def before_attention(self, x: Tensor) -> Tensor:
        return x if self.attn_norm is None else self.attn_norm.forward(x)

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        raise NotImplementedError


class PostNormLayer(Layer):
    """Apply the norm after each residual add, as BERT does."""

    def before_attention(self, x: Tensor) -> Tensor:
        return x

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        normed = (
            self.attn.out.add(mixed, x)
            if self.attn_norm is None
            else norm_of_sum(self.attn.out, self.attn_norm, mixed, x)
        )
        return norm_of_sum(self.ffn, self.ffn_norm, normed, normed)


class PreNormLayer(Layer):
    """Apply the norm before each block; the residual stream is not normalised."""

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        x, normed = add_and_norm(self.attn.out, self.ffn_norm, mixed, x)
        # This method created the sum, and nothing else reads it.
        return self.ffn.add(normed, x, overwrite=True)


class SandwichLayer(Layer):
    """Apply a norm before each block and one to its output before the residual add, as Gemma
    does."""

    def __init__(self, spec: EncoderSpec, layer: LayerSpec, attention: AttentionType) -> None:
        super().__init__(spec, layer, attention)
        self.attn_out_norm, self.ffn_out_norm = Norm(spec), Norm(spec)

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = self.attn_out_norm.plus(self.attn.out.forward(mixed), x)
        return self.ffn_out_norm.plus(self.ffn.whole(self.ffn_norm.forward(x)), x)


_LAYERS: dict[str, type[Layer]] = {
    "post": PostNormLayer,
    "pre": PreNormLayer,
    "sandwich": SandwichLayer,
}


LayerType = Callable[[EncoderSpec, LayerSpec, AttentionType], Layer]


class PositionBias(nn.Module):
    """A family's bias on attention scores by distance. `table` is the `bias` argument of
    `varlen_attention`; subclasses compute it in `prepare`.
    """

    table: Tensor


class PackedEncoder(nn.Module):
    """Map a packed batch to hidden states. The input layer decides whether the input is token ids
    or given rows.

    `max_positions` is the number of tokens of the longest sequence.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        embed: InputLayer,
        *,
        relative: PositionBias | None = None,
        attention: AttentionType = Attention,
        layer: LayerType | None = None,
    ) -> None:
        """Build the layers of a spec. Without `layer`, `spec.norm` names the kind of layer."""
        super().__init__()
        self.hidden_size, self.max_positions = spec.hidden, embed.max_positions
        self.causal = spec.causal
        self.recurrent = any(each.delta is not None for each in spec.layers)
        """True if a layer carries a state from token to token. Such a layer has no keys to mask or
        share."""
        self.convolves = any(each.convolution is not None for each in spec.layers)
        """True if a layer reads a token's neighbours, which must be in the same sequence."""
        self.embed, self.relative, self._growth = embed, relative, spec.growth
        kind = _LAYERS[spec.norm] if layer is None else layer
        own = [kind(spec, each, attention) for each in spec.layers]
        self.layers = nn.ModuleList(own)
        self.stack = tuple(own[number] for number in spec.order) if spec.order else tuple(own)
        final = spec if spec.final_eps is None else replace(spec, norm_eps=spec.final_eps)
        self.norm = None if spec.norm == "post" else Norm(final)
        self.long_from = max(
            (each.rope.long_from for each in spec.layers if each.rope is not None), default=0
        )
        """Sequences of more tokens use other rotary frequencies from their first token on
        (LongRoPE); 0 if all lengths use the same.
        """
        self._ropes = tuple(
            dict.fromkeys(each.rope for each in spec.layers if each.rope is not None)
        )
        self._frequencies: dict[Rope, Tensor] = {}
        self._long: dict[Rope, Tensor] = {}
        self._axes: dict[Rope, Tensor] = {}
        # The frequencies of all rotations of plain positions with one factor, end to end.
        self._together: Tensor | None = None
        # Kernels place a single query at the end of its keys. Masks and biases by distance would be
        # wrong for the row of a first token.
        plain = (
            bool(spec.layers)
            and not spec.causal
            and spec.layers[-1].window is None
            and relative is None
        )
        self._short: tuple[Rows, ...] = (
            ("first", "last") if plain else ("last",) if spec.layers else ()
        )

    def prepare(self) -> None:
        """Put the frequencies of all rotations on the device, in float32 for every type of encoder.

        Call it after loading.
        """
        self._frequencies = {rope: self._on_device(rope.frequencies) for rope in self._ropes}
        self._long = {rope: self._on_device(rope.long) for rope in self._ropes if rope.long}
        self._axes = {
            rope: torch.tensor(rope.axes, device=self.device) for rope in self._ropes if rope.axes
        }
        is_plain = (
            len({rope.factor for rope in self._ropes}) == 1 and not self._long and not self._axes
        )
        self._together = torch.cat(list(self._frequencies.values())) if is_plain else None

    def _on_device(self, numbers: tuple[float, ...]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=self.device)

    @cached_property
    def is_graph_capturable(self) -> bool:
        """False if the kernels launched depend on sequence lengths."""
        return not self.long_from and all(
            layer.is_graph_capturable and layer.attn.is_graph_capturable for layer in self.stack
        )

    @property
    def shares_prefixes(self) -> bool:
        """True if a prefix shared by several sequences can be computed once for all of them."""
        return self.causal and not self.recurrent and not self.convolves and not self.long_from

    @property
    def token_weight(self) -> Tensor:
        """Return the token table [vocabulary, embedding size] in the encoder's type, for heads that
        share it (a tied decoder).
        """
        if not isinstance(self.embed, TokenEmbedding):
            raise TypeError("the encoder takes no token ids")
        return self.embed.token.weight

    @property
    def dtype(self) -> torch.dtype:
        """The type of the computation."""
        return next(self.embed.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.embed.parameters()).device

    @property
    def bytes(self) -> int:
        """Memory of all weights in their current layout."""
        return resident_bytes(self)

    @torch.inference_mode()
    def forward(
        self, batch: Packed, rows: Rows | None = None, yield_point: YieldPoint = never_yield
    ) -> Tensor:
        """Return hidden states [tokens, hidden] in the encoder's type.

        With `rows`, return only one row of each sequence, in order: [sequences, hidden]. The last
        layer then skips most of its work where the family allows it.
        """
        shared = self.shared(batch)
        short = rows in self._short
        x = self.embed.forward(batch)
        for number, layer in enumerate(self.stack[:-1] if short else self.stack):
            yield_point()
            x = self.step(number, layer, x, batch, shared)
        if rows is not None:
            yield_point()
            chosen = batch.rows(rows)
            x = (
                self.stack[-1].forward_rows(x, batch, shared, chosen, batch.row_layout())
                if short
                else x.index_select(0, chosen)
            )
        return x if self.norm is None else self.norm.forward(x)

    def shared(self, batch: Packed) -> Shared:
        """Return the tensors that all layers of a forward share."""
        return Shared(
            rotations=self._rotations(batch),
            bias=None if self.relative is None else self.relative.table,
            chunks=DeltaChunks.from_lengths(batch.lengths, self.device) if self.recurrent else None,
            query_scales=self._query_scales(batch),
        )

    def _query_scales(self, batch: Packed) -> Tensor | None:
        growth, layout = self._growth, batch.layout
        if growth is None or max(layout.max_queries, layout.max_keys) <= growth.every:
            return None
        turns = (batch.positions // growth.every).float()
        return (1.0 + growth.share * (1.0 + turns).log()).to(self.dtype)[:, None, None]

    @staticmethod
    def step(number: int, layer: Layer, x: Tensor, batch: Packed, shared: Shared) -> Tensor:
        """Apply one layer to [tokens, hidden], and add the batch's given rows for that layer."""
        x = layer.forward(x, batch, shared)
        if batch.given is None or number >= len(batch.given.deeper):
            return x
        return x.index_add(0, batch.given.places, batch.given.deeper[number].to(x.dtype))

    def _rotations(self, batch: Packed) -> dict[Rope, Rotation]:
        if self._together is None or not has_triton(batch.positions):
            return {rope: self._rotation(rope, batch) for rope in self._ropes}
        # One launch computes all of them; the kernels that rotate take slices of its rows.
        cos, sin = angles(batch.positions, self._together, self._ropes[0].factor)
        pairs = [len(rope.frequencies) for rope in self._ropes]
        parts = zip(
            cos.split_with_sizes(pairs, dim=1), sin.split_with_sizes(pairs, dim=1), strict=True
        )
        return dict(zip(self._ropes, parts, strict=True))

    def _rotation(self, rope: Rope, batch: Packed) -> Rotation:
        if batch.axes is None or not rope.axes:
            return angles(batch.positions, self._frequencies_by_length(rope, batch), rope.factor)
        return angles(
            batch.axes.index_select(0, self._axes[rope]).T.contiguous(),
            self._frequencies[rope],
            rope.factor,
        )

    def _frequencies_by_length(self, rope: Rope, batch: Packed) -> Tensor:
        """Return frequencies [pairs], or [tokens, pairs] if some of the batch's sequences are
        long."""
        short = self._frequencies[rope]
        is_long = [
            bool(rope.long) and length > rope.long_from for length in batch.wholes or batch.keys
        ]
        if not any(is_long):
            return short
        both = torch.stack((short, self._long[rope]))
        return both.index_select(
            0, to_device(np.repeat(is_long, batch.lengths).astype(np.int32), self.device)
        )


def resident_bytes(module: nn.Module) -> int:
    """Return the memory of a module's weights, counting shared storage once."""
    storages: dict[int, int] = {}
    packed = 0
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:
            packed += tensor.numel() * tensor.element_size()
    return packed + sum(storages.values())
