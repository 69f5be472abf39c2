"""The laya package's head: transformer layers and an MLP map hidden states to a logit for each
option's marker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.kernels.attention.varlen import varlen_attention
from libs.kernels.layout import BatchLayout, to_device
from libs.models.interface.head import Array
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output
from libs.models.text.heads.linear import HeadNorm, check_shape, linear_layer

_HEAD_SIZE: Final = 64
_TYPES: Final = 3  # of questions: choice, score, truth
_CHOICE: Final = 0

State = Mapping[str, Tensor]


class OptionsHead(nn.Module):
    """Map hidden states to [options of all sequences] float32. `InputSequence.input` has the rows
    of the markers.
    """

    def __init__(self, state: State, layers: int, size: int, file: str) -> None:
        """Build the head. Raises ModelBroken for a tensor that is missing or has another shape.

        Args:
            size: Size of hidden states.
        """
        super().__init__()
        check_shape(state, "type_emb.weight", (_TYPES, size), file)
        self.kind = nn.Parameter(state["type_emb.weight"][_CHOICE].clone(), requires_grad=False)
        self.layers = nn.ModuleList(
            _Layer(state, f"head.layers.{number}", size, file) for number in range(layers)
        )
        self.norm = HeadNorm(state, "scorer.0", size, file)
        self.inner = linear_layer(state, "scorer.1", (size, size), file, "gelu")
        self.outer = linear_layer(state, "scorer.3", (1, size), file)

    @property
    def rows(self) -> Rows | None:
        return None

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        x = hidden.float() + self.kind
        layout = BatchLayout.from_lengths(batch.lengths, batch.lengths, hidden.device)
        for layer in self.layers:
            x = layer(x, layout)
        starts = np.cumsum([0, *batch.lengths[:-1]])
        rows = np.concatenate(
            [start + _markers(sequence) for start, sequence in zip(starts, sequences, strict=True)]
        )
        options = x.index_select(0, to_device(rows.astype(np.int32), hidden.device).long())
        return (self.outer.forward(self.inner.forward(self.norm.forward(options))).squeeze(-1),)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        ends = np.cumsum([len(_markers(sequence)) for sequence in sequences])[:-1]
        return list(np.split(arrays[0].astype(np.float32, copy=False), ends))


class _Layer(nn.Module):
    """PyTorch's TransformerEncoderLayer with norms before its blocks and ReLU."""

    def __init__(self, state: State, stem: str, size: int, file: str) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = (
            HeadNorm(state, f"{stem}.norm{number}", size, file) for number in (1, 2)
        )
        attention = {
            "weight": f"{stem}.self_attn.in_proj_weight",
            "bias": f"{stem}.self_attn.in_proj_bias",
        }
        qkv = {f"qkv.{end}": state[name] for end, name in attention.items() if name in state}
        self.qkv = linear_layer(qkv, "qkv", (3 * size, size), file)
        self.out = linear_layer(state, f"{stem}.self_attn.out_proj", (size, size), file)
        self.up = linear_layer(state, f"{stem}.linear1", (4 * size, size), file, "relu")
        self.down = linear_layer(state, f"{stem}.linear2", (size, 4 * size), file)
        self._heads = max(1, size // _HEAD_SIZE)

    def forward(self, x: Tensor, layout: BatchLayout) -> Tensor:
        """Apply the layer to [tokens, size] float32."""
        fused = self.qkv.forward(self.attention_norm.forward(x)).view(len(x), 3, self._heads, -1)
        q, k, v = fused.unbind(1)
        x = x + self.out.forward(
            varlen_attention(q, k, v, layout, scale=q.shape[2] ** -0.5).flatten(1)
        )
        return x + self.down.forward(self.up.forward(self.ffn_norm.forward(x)))


def _markers(sequence: InputSequence) -> NDArray[np.int32]:
    return cast("NDArray[np.int32]", sequence.input)
