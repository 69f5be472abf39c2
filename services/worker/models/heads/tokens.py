"""Numbers for each token: late-interaction vectors, or the logits of token labels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from services.worker.models.heads.linear import HeadLinear
from services.worker.models.packed import Packed


class TokenHead(nn.Module):
    """Hidden states -> [tokens, out] float32, through one or more linear layers (none: the states themselves)."""

    def __init__(self, layers: Sequence[HeadLinear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def rows(self, batch: Packed) -> None:
        """Every row is looked at."""

    def forward(self, hidden: Tensor, batch: Packed, skips: Sequence[int]) -> Tensor:
        out = hidden.float()
        for layer in self.layers:
            out = layer(out)
        return out
