"""The token mixers of Qwen3.5: gated delta nets in most layers, attention with an output gate in
the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from libs.kernels.layout import BatchLayout
from libs.kernels.linear.packed import PackedLinear
from libs.kernels.rows.rope import rotate
from libs.models.interface.packed import Packed
from libs.models.layers.carried import Carried, StateShape
from libs.models.layers.convolution import Convolution
from libs.models.layers.delta import delta_rule, delta_step
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
        q, k, v, gate = self.project_gated(x, shared)
        return self.mix(q, k, v, batch, batch.layout, shared) * gate

    def forward_rows(
        self, x: Tensor, batch: Packed, shared: Shared, rows: Tensor, layout: BatchLayout
    ) -> Tensor:
        q, k, v, gate = self.project_gated(x, shared)
        return self.mix(q.index_select(0, rows), k, v, batch, layout, shared) * gate.index_select(
            0, rows
        )

    def project_gated(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
        qkv, *rest = self.inputs.forward(x).split_with_sizes(self.slots, dim=1)
        gate, values = self._values(self.conv.forward(qkv, batch.positions), *rest)
        reads, _ = delta_rule(*values, shared.chunks)
        return self._gated(reads, gate, x.dtype)

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        delta = self._delta
        matrix = (delta.value_heads, delta.key_size, delta.value_size)
        return self.conv.state_shape, StateShape(matrix, exact=True)

    def resume(
        self, x: Tensor, shared: Shared, memory: Sequence[Tensor], carried: Carried
    ) -> Tensor:
        if shared.chunks is None:
            raise ValueError("a gated delta net needs the chunks of its sequences")
        inputs, states = memory
        qkv, *rest = self.inputs.forward(x).split_with_sizes(self.slots, dim=1)
        gate, values = self._values(self.conv.resume(qkv, inputs, carried), *rest)
        state = carried.read(states)
        reads, state = (
            delta_step(*values, state)
            if carried.is_step
            else delta_rule(*values, shared.chunks, state)
        )
        carried.write(states, state)
        return self._gated(reads, gate, x.dtype)

    def _values(
        self, mixed: Tensor, gate: Tensor, beta: Tensor, step: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """Return the gate on the output, and the arguments of `delta_rule`: queries, keys, values,
        decay and beta.

        Args:
            mixed: The output of the convolution, [tokens, channels].
        """
        delta = self._delta
        mixed = functional.silu(mixed).float()
        q, k, v = mixed.split_with_sizes(delta.widths, dim=1)
        repeats = delta.value_heads // delta.key_heads
        q, k = (
            _unit(each.view(-1, delta.key_heads, delta.key_size)).repeat_interleave(repeats, dim=1)
            for each in (q, k)
        )
        decay = -self.A_log.float().exp() * functional.softplus(step.float() + self.dt_bias.float())
        v = v.view(-1, delta.value_heads, delta.value_size)
        return gate, (q, k, v, decay, beta.sigmoid().float())

    def _gated(self, reads: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalise the reads of the states and apply the gate: [tokens, value_heads *
        value_size]."""
        normed = self.norm.forward(reads.to(dtype))
        return (normed * functional.silu(gate.float()).view_as(normed)).to(dtype).flatten(1)

    def forward_rows(
        self, x: Tensor, batch: Packed, shared: Shared, rows: Tensor, layout: BatchLayout
    ) -> Tensor:
        return self.forward(x, batch, shared).index_select(0, rows)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)
