"""States of boundaries: the places before the first word, between two words and after the last. A
text of n words has n + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.kernels.attention.varlen import varlen_attention
from libs.kernels.layout import BatchLayout, to_device
from libs.kinds.gliner2.card import Boundary
from libs.models.text.heads.extraction.words import prefix_sums
from libs.models.text.heads.linear import HeadNorm, check_shape, linear_layer

State = Mapping[str, Tensor]


class BoundaryEncoder(nn.Module):
    """Map states of words to states of boundaries: from the words on both sides, then by layers
    that attend between boundaries.
    """

    def __init__(
        self, state: State, stem: str, settings: Boundary, *, size: int, file: str
    ) -> None:
        """`size` is that of the words' states. Raises ModelBroken."""
        super().__init__()
        own = settings.size
        for name in ("bos_state", "eos_state"):
            check_shape(state, f"{stem}.{name}", (size,), file)
        edges = torch.stack([state[f"{stem}.bos_state"], state[f"{stem}.eos_state"]])
        self.edges = nn.Parameter(edges, requires_grad=False)
        self.left = linear_layer(state, f"{stem}.left_projection", (own, size), file)
        self.right = linear_layer(state, f"{stem}.right_projection", (own, size), file)
        self.both = linear_layer(state, f"{stem}.output_projection", (own, own * 2), file)
        self.norm = HeadNorm(state, f"{stem}.layer_norm", own, file)
        self.attention = nn.ModuleList(
            _Attention(state, f"{stem}.attention_blocks.{number}", settings, file)
            for number in range(settings.attention_layers)
        )
        self.refinement = nn.ModuleList(
            _Gated(state, f"{stem}.refinement_blocks.{number}", own, file)
            for number in range(settings.layers)
        )

    def forward(self, words: Tensor, counts: Sequence[int]) -> Tensor:
        """Map words [words, size] to [boundaries, own size].

        Args:
            words: The words of all texts, end to end.
            counts: Number of words of each text.
        """
        left, right = _neighbours(counts, words.device)
        sides = torch.cat([words, self.edges])
        pairs = [
            self.left.forward(sides).index_select(0, left),
            self.right.forward(sides).index_select(0, right),
        ]
        x = self.norm.forward(self.both.forward(torch.cat(pairs, dim=-1)))
        layout = BatchLayout.from_lengths(
            [count + 1 for count in counts], [count + 1 for count in counts], words.device
        )
        for block in self.attention:
            x = block(x, layout)
        for block in self.refinement:
            x = block(x)
        return x


class _Attention(nn.Module):
    """Self-attention over the boundaries of a text, with a norm before it."""

    def __init__(self, state: State, stem: str, settings: Boundary, file: str) -> None:
        super().__init__()
        size = settings.size
        self.norm = HeadNorm(state, f"{stem}.norm", size, file)
        self.qkv = linear_layer(state, f"{stem}.qkv_projection", (size * 3, size), file)
        self.out = linear_layer(state, f"{stem}.output_projection", (size, size), file)
        self._heads, self._window = settings.heads, settings.window or None

    def forward(self, x: Tensor, layout: BatchLayout) -> Tensor:
        q, k, v = self.qkv.forward(self.norm.forward(x)).view(len(x), 3, self._heads, -1).unbind(1)
        return x + self.out.forward(
            varlen_attention(
                q, k, v, layout, scale=q.shape[2] ** -0.5, window=self._window
            ).flatten(1)
        )


class _Gated(nn.Module):
    """A gated feed-forward block with a norm before it. Its tensors decide its width."""

    def __init__(self, state: State, stem: str, size: int, file: str) -> None:
        super().__init__()
        found = state.get(f"{stem}.output_projection.weight")
        inner = found.shape[1] if found is not None and found.dim() == 2 else 0
        self.norm = HeadNorm(state, f"{stem}.norm", size, file)
        self.down = linear_layer(state, f"{stem}.output_projection", (size, inner), file)
        self.up = linear_layer(state, f"{stem}.input_projection", (inner * 2, size), file)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up.forward(self.norm.forward(x)).chunk(2, dim=-1)
        return x + self.down.forward(value * F.silu(gate))


def _neighbours(counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows of the words left and right of each boundary, among all words followed by the
    two edges.
    """
    words = sum(counts)
    starts = prefix_sums(counts)
    own = [
        np.arange(start, start + count, dtype=np.int32)
        for start, count in zip(starts, counts, strict=False)
    ]
    left = np.concatenate([np.concatenate([[words], rows]) for rows in own]).astype(np.int32)
    right = np.concatenate([np.concatenate([rows, [words + 1]]) for rows in own]).astype(np.int32)
    return to_device(left, device), to_device(right, device)
