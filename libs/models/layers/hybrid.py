"""The token mixers of Qwen3.5: gated delta nets in most layers, attention with an output gate in
the
others.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from libs.kernels.layout import Layout
from libs.kernels.linear.packed import PackedLinear
from libs.kernels.rows.rope import rotate
from libs.models.interface.packed import Packed
from libs.models.layers.convolution import Convolution
from libs.models.layers.delta import delta_rule
from libs.models.layers.encoder import Attention, Norm, Shared
from libs.models.layers.spec import DeltaSpec, EncoderSpec, LayerSpec


def mixer(spec: EncoderSpec, layer: LayerSpec) -> Attention:
    """Return the mixer that the layer's spec describes; an `AttentionType`."""
    return GatedAttention(spec, layer) if layer.delta is None else GatedDeltaNet(spec, layer.delta)


class GatedAttention(Attention):
    """Attention with its output multiplied by the sigmoid of a gate. The query projection returns
    each head's gate after its query.
    """

    def __init__(self, spec: EncoderSpec, layer: LayerSpec) -> None:
        super().__init__(spec, layer)
        widths = [spec.head_size * part for part in (2 * spec.heads, spec.shared, spec.shared)]
        self.qkv = PackedLinear(spec.hidden, sum(widths), bias=spec.qkv_bias, slots=widths)

    def forward(self, x: Tensor, batch: Packed, shared: Shared) -> Tensor:
        q, k, v, gate = self._projected(x, shared)
        return self.mix(q, k, v, batch, batch.layout, shared) * gate

    def forward_rows(
        self, x: Tensor, batch: Packed, shared: Shared, rows: Tensor, layout: Layout
    ) -> Tensor:
        q, k, v, gate = self._projected(x, shared)
        return self.mix(q.index_select(0, rows), k, v, batch, layout, shared) * gate.index_select(
            0, rows
        )

    def _projected(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of `project`, and the factor on the output: [tokens,
        heads * head_size].
        """
        heads, keys, values = self.parts
        fused = self.qkv.forward(x).view(len(x), -1, self.head_size)
        both, k, v = fused.split_with_sizes((2 * heads, keys, values), dim=1)
        q, gate = both[:, 0::2], both[:, 1::2].flatten(1).sigmoid()
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.forward(q), self.k_norm.forward(k)
        if self.rope is not None:
            cos, sin = shared.rotations[self.rope]
            q, k = rotate(q.contiguous(), cos, sin), rotate(k.contiguous(), cos, sin)
        return q, k, v, gate


class GatedDeltaNet(Attention):
    """A gated delta net (`delta.py`) in place of attention. The layer applies its output
    projection.

    `inputs` projects to queries, keys and values, the gate on the output, the share that is
    overwritten, and the decay.
    """

    is_graph_capturable = False

    def __init__(self, spec: EncoderSpec, delta: DeltaSpec) -> None:
        nn.Module.__init__(self)
        values = delta.widths[2]
        self.slots = (sum(delta.widths), values, delta.value_heads, delta.value_heads)
        # The state accumulates int8 errors: with random weights, cosines were 0.984 to 0.997 with
        # int8 here and 0.998 without it.
        self.inputs = PackedLinear(
            spec.hidden, sum(self.slots), bias=False, slots=self.slots, exact=True
        )
        self.out = PackedLinear(values, spec.hidden, bias=False)
        self.conv = Convolution(sum(delta.widths), delta.width)
        self.dt_bias: Tensor = nn.Parameter(torch.empty(delta.value_heads), requires_grad=False)
        self.A_log: Tensor = nn.Parameter(torch.empty(delta.value_heads), requires_grad=False)
        self.norm = Norm(replace(spec, norm_kind="rms", norm_shift=0.0), delta.value_size)
        self.rope, self._delta = None, delta

    def forward(self, x: Tensor, batch: Packed, shared: Shared) -> Tensor:
        """Mix the tokens of each sequence: [tokens, hidden] to [tokens, value_heads *
        value_size]."""
        if shared.chunks is None or batch.key_rows is not None:
            raise ValueError("a gated delta net needs the chunks of whole sequences")
        delta = self._delta
        qkv, gate, beta, step = self.inputs.forward(x).split_with_sizes(self.slots, dim=1)
        mixed = functional.silu(self.conv.forward(qkv, batch.positions)).float()
        q, k, v = mixed.split_with_sizes(delta.widths, dim=1)
        repeats = delta.value_heads // delta.key_heads
        q, k = (
            _unit(each.view(-1, delta.key_heads, delta.key_size)).repeat_interleave(repeats, dim=1)
            for each in (q, k)
        )
        decay = -self.A_log.float().exp() * functional.softplus(step.float() + self.dt_bias.float())
        v = v.view(-1, delta.value_heads, delta.value_size)
        reads = self.norm.forward(
            delta_rule(q, k, v, decay, beta.sigmoid().float(), shared.chunks).to(x.dtype)
        )
        return (reads * functional.silu(gate.float()).view_as(reads)).to(x.dtype).flatten(1)

    def forward_rows(
        self, x: Tensor, batch: Packed, shared: Shared, rows: Tensor, layout: Layout
    ) -> Tensor:
        return self.forward(x, batch, shared).index_select(0, rows)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)
