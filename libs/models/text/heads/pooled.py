"""One vector per text: pooling of the token states, then the Dense modules of modules.json.

Truncation (Matryoshka) and normalisation follow in `processing/answers.py`: they are options of a
request, and jobs with different options share a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from libs.catalog.card import PoolingMode
from libs.kernels.layout import cumulated, to_device
from libs.kernels.pooling.pooled import cls, last, maximum, mean, weighted_mean
from libs.models.interface.head import Array, split_rows
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output
from libs.models.text.heads.linear import HeadLinear


def _mean_by_root(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the sum over the square root of the number of tokens."""
    return mean(hidden, cu_seqlens) * cu_seqlens.diff().float().sqrt()[:, None]


_POOLINGS: dict[PoolingMode, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": cls,
    "max": maximum,
    "mean": mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": weighted_mean,
    "lasttoken": last,
}


class PooledHead(nn.Module):
    """Map hidden states to [sequences, dimensions] float32. Several poolings are concatenated."""

    def __init__(self, modes: Sequence[PoolingMode], layers: Sequence[HeadLinear]) -> None:
        super().__init__()
        self._modes = tuple(modes)
        self._poolings = [_POOLINGS[mode] for mode in modes]
        self.layers = nn.ModuleList(layers)

    @property
    def rows(self) -> Rows | None:
        if self._modes == ("cls",):
            return "first"
        return "last" if self._modes == ("lasttoken",) else None

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        skips = [sequence.skip for sequence in sequences]
        is_one_row = (
            hidden.shape[0] == len(batch.lengths) and self.rows is not None and not any(skips)
        )
        hidden, cu_seqlens = (
            (hidden, batch.cu_seqlens) if is_one_row else without_prompts(hidden, batch, skips)
        )
        return (self.pool(hidden, cu_seqlens, is_one_row=is_one_row),)

    def pool(self, hidden: Tensor, cu_seqlens: Tensor, *, is_one_row: bool) -> Tensor:
        """Implement `CapturableHead.pool`."""
        pooled = (
            hidden.float()
            if is_one_row
            else torch.cat([pooling(hidden, cu_seqlens) for pooling in self._poolings], dim=1)
        )
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        return split_rows(arrays[0])


def without_prompts(hidden: Tensor, batch: Packed, skips: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the pooled states, and the `cu_seqlens` of their sequences.

    Args:
        skips: Number of leading tokens of each sequence that are not pooled.
    """
    if not any(skips):
        return hidden, batch.cu_seqlens
    starts = np.cumsum((0, *batch.lengths[:-1]))
    kept = [
        np.arange(start + skip, start + length)
        for start, skip, length in zip(starts, skips, batch.lengths, strict=True)
    ]
    rows = to_device(np.concatenate(kept).astype(np.int32), hidden.device)
    return hidden.index_select(0, rows), cumulated([len(part) for part in kept], hidden.device)
