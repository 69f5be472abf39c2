"""Convolutions of separate channels over packed sequences, and LFM2's short convolution, which
replaces attention in most of its layers.

Sequences lie end to end, and a convolution does not cross their borders.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from libs.kernels.layout import BatchLayout
from libs.kernels.linear.packed import PackedLinear
from libs.models.interface.packed import Packed
from libs.models.layers.carried import Carried, StateShape
from libs.models.layers.encoder import Attention, Shared
from libs.models.layers.spec import ConvolutionSpec, EncoderSpec, LayerSpec


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, *, after: int
) -> Tensor:
    """Sum each channel over a token and its neighbours in the sequence: [tokens, channels].

    The sum is in float32.

    Args:
        weight: [channels, width], in the order of the tokens.
        bias: [channels].
        positions: Each token's position in its sequence, from 0: [tokens].
        after: Number of following tokens among the `width` tokens.
    """
    tokens, before = x.float(), weight.shape[1] - 1 - after
    weight = weight.float()
    total = tokens * weight[:, before]
    for distance in range(1, max(before, after) + 1):
        # A token at this position or later has its predecessor at this distance in its sequence.
        other = (positions[distance:] < distance)[:, None]
        if distance <= before:
            earlier = tokens[:-distance].masked_fill(other, 0.0)
            total[distance:].addcmul_(earlier, weight[:, before - distance])
        if distance <= after:
            later = tokens[distance:].masked_fill(other, 0.0)
            total[:-distance].addcmul_(later, weight[:, before + distance])
    return (total if bias is None else total + bias.float()).to(x.dtype)


class Convolution(nn.Module):
    """The weight of a convolution of separate channels: [channels, 1, width]."""

    def __init__(self, channels: int, width: int, *, after: int = 0, bias: bool = False) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(channels, 1, width), requires_grad=False)
        self.bias: Tensor | None = (
            nn.Parameter(torch.empty(channels), requires_grad=False) if bias else None
        )
        self._after = after

    @property
    def state_shape(self) -> StateShape:
        """The inputs that precede a token."""
        channels, _, width = self.weight.shape
        return StateShape((width - 1, channels))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Convolve [tokens, channels]."""
        return convolve(x, self.weight.squeeze(1), self.bias, positions, after=self._after)

    def resume(self, x: Tensor, memory: Tensor, carried: Carried) -> Tensor:
        """Convolve the new tokens of sequences, [tokens, channels], and keep their last inputs in
        `memory`, [slots, *state_shape].
        """
        window = carried.window(memory.shape[1])
        every = torch.cat([carried.read(memory).flatten(0, 1), x]).index_select(0, window.rows)
        last = every.index_select(0, window.last)
        carried.write(memory, last.view(len(carried.lengths), *memory.shape[1:]))
        return self.forward(every, window.positions).index_select(0, window.own)


class ShortConvolution(Attention):
    """A convolution between two gates in place of attention. The layer applies its output
    projection.

    `inputs` projects to the gate before the convolution, the gate after it, and its input.
    """

    def __init__(self, spec: EncoderSpec, convolution: ConvolutionSpec) -> None:
        nn.Module.__init__(self)
        bias = convolution.bias
        self.inputs = PackedLinear(spec.hidden, 3 * spec.hidden, bias=bias)
        self.conv = Convolution(spec.hidden, convolution.width, after=convolution.after, bias=bias)
        self.out = PackedLinear(spec.hidden, spec.hidden, bias=bias)
        self.rope = None

    def forward(self, x: Tensor, batch: Packed, shared: Shared) -> Tensor:
        """Mix neighbouring tokens of each sequence: [tokens, hidden] to [tokens, hidden]. Tokens
        that attention hides from each other are neighbours all the same.
        """
        before, after, values = self.inputs.forward(x).chunk(3, dim=1)
        return after * self.conv.forward(before * values, batch.positions)

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        return (self.conv.state_shape,)

    def resume(
        self, x: Tensor, shared: Shared, memory: Sequence[Tensor], carried: Carried
    ) -> Tensor:
        before, after, values = self.inputs.forward(x).chunk(3, dim=1)
        return after * self.conv.resume(before * values, memory[0], carried)

    def forward_rows(
        self, x: Tensor, batch: Packed, shared: Shared, rows: Tensor, layout: BatchLayout
    ) -> Tensor:
        return self.forward(x, batch, shared).index_select(0, rows)


def mixer(spec: EncoderSpec, layer: LayerSpec) -> Attention:
    """Return the mixer that the layer's spec describes; an `AttentionType`."""
    if layer.convolution is None:
        return Attention(spec, layer)
    return ShortConvolution(spec, layer.convolution)
