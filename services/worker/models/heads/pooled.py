"""One vector a text: pooling of the token states, then the dense layers of modules.json.

Cutting (Matryoshka) and scaling to length 1 come after, in `processing/answers.py`: they are wishes of a request, and jobs with
different wishes share a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from libs.catalog.card import PoolingMode
from libs.kernels.pooling import cls, last, maximum, mean, weighted_mean
from services.worker.models.heads.linear import HeadLinear
from services.worker.models.packed import Packed


def _mean_by_root(hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The sum over the square root of the number of tokens."""
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
    """Hidden states -> [sequences, dimensions] float32; several poolings are concatenated."""

    def __init__(self, modes: Sequence[PoolingMode], layers: Sequence[HeadLinear]) -> None:
        super().__init__()
        self._modes = tuple(modes)
        self._poolings = [_POOLINGS[mode] for mode in modes]
        self.layers = nn.ModuleList(layers)

    def rows(self, batch: Packed) -> Tensor | None:
        """The only rows of the last layer that are looked at, one a sequence; None: all."""
        if self._modes == ("cls",):
            return batch.first_rows()
        return batch.last_rows() if self._modes == ("lasttoken",) else None

    def forward(self, hidden: Tensor, batch: Packed, skips: Sequence[int]) -> Tensor:
        """`hidden` [tokens, hidden], or [sequences, hidden] where `rows` chose them. `skips`: leading tokens not to pool."""
        if hidden.shape[0] == len(batch.lengths) and self.rows(batch) is not None and not any(skips):
            pooled = hidden.float()
        else:
            hidden, cu_seqlens = _without_prompts(hidden, batch, skips)
            pooled = torch.cat([pooling(hidden, cu_seqlens) for pooling in self._poolings], dim=1)
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled


def _without_prompts(hidden: Tensor, batch: Packed, skips: Sequence[int]) -> tuple[Tensor, Tensor]:
    if not any(skips):
        return hidden, batch.cu_seqlens
    starts = np.cumsum((0, *batch.lengths[:-1]))
    kept = [np.arange(start + skip, start + length) for start, skip, length in zip(starts, skips, batch.lengths, strict=True)]
    rows = torch.from_numpy(np.concatenate(kept)).to(hidden.device)
    offsets = np.cumsum([0, *(len(part) for part in kept)], dtype=np.int32)
    return hidden.index_select(0, rows), torch.from_numpy(offsets).to(hidden.device)
