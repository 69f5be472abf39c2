"""An output for each token: late-interaction vectors, or the logits of token classification."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from libs.models.interface.head import Array, split_token_rows
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output


class TokenHead(nn.Module):
    """Map hidden states to [tokens, out] float32 by any number of layers; without layers, return
    the states.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @property
    def rows(self) -> Rows | None:
        return None

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        out = hidden.float()
        for layer in self.layers:
            out = layer(out)
        return (out,)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        return split_token_rows(arrays[0], sequences)
