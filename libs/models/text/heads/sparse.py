"""Sparse vectors over the vocabulary: SPLADE from a masked language model's logits, lexical weights
(bge-m3) from token states.

The logits of all tokens are never in memory at once (`libs/kernels/pooling/sparse.py`), and only
SPLADE's non-zero weights are copied from the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.catalog.card import SparseOutput
from libs.kernels.pooling.sparse import max_by_id, splade_max, splade_sum
from libs.models.interface.head import Array
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output, SparseRow
from libs.models.text.heads.linear import HeadLinear
from libs.models.text.heads.mlm import MlmTransform


class SpladeHead(nn.Module):
    """Map token states to log(1 + relu(logit)), pooled over each sequence's tokens, special ones
    included as in the reference.

    Args:
        weight: The decoder's, [vocabulary, embedding size].
        bias: [vocabulary]
        shared: The weight is the encoder's token table.
    """

    def __init__(
        self,
        transform: MlmTransform,
        weight: Tensor,
        bias: Tensor | None,
        card: SparseOutput,
        *,
        shared: bool,
    ) -> None:
        super().__init__()
        self.transform = transform
        self.weight = None if shared else nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._table = (weight,)  # in a tuple: the encoder's table must not count as this module's
        self._card = card

    @property
    def rows(self) -> Rows | None:
        return None

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        """Return [sequences, vocabulary] float32."""
        weight = self._table[0] if self.weight is None else self.weight
        states = self.transform.forward(hidden).to(weight.dtype)
        activation = self._card.activation
        if self._card.pooling == "sum":
            return (splade_sum(states, weight, self.bias, batch.cu_seqlens, activation=activation),)
        return (
            splade_max(
                states, weight, self.bias, batch.cu_seqlens, batch.lengths, activation=activation
            ),
        )

    def compact(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Pack into one int32 tensor, and so one copy: the number of entries of each row, then all
        columns, then all weights.
        """
        best = tensors[0]
        rows, columns = best.nonzero(as_tuple=True)
        counts = torch.count_nonzero(best, dim=1)
        return (torch.cat((counts.int(), columns.int(), best[rows, columns].view(torch.int32))),)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        """Split the array that `compact` packed."""
        counts, entries = np.split(arrays[0].astype(np.int32, copy=False), [len(sequences)])
        columns, weights = np.split(entries, 2)
        return _rows(columns, weights.view(np.float32), np.cumsum(counts, dtype=np.int64)[:-1])


class LexicalHead(nn.Module):
    """Return bge-m3's lexical weights, as FlagEmbedding's M3 model does: relu(linear(state)) of
    each token, and the maximum over a token's occurrences.

    Args:
        unused: Ids without a weight ([CLS] and similar).
    """

    def __init__(self, linear: HeadLinear, unused: Collection[int]) -> None:
        super().__init__()
        self.linear = linear
        self._unused = np.array(sorted(unused), dtype=np.int64)

    @property
    def rows(self) -> Rows | None:
        return None

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        """Return [tokens] float32."""
        return (self.linear.forward(hidden.float()).squeeze(1),)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        ids = torch.from_numpy(np.concatenate([sequence.ids for sequence in sequences]))
        weights = torch.from_numpy(arrays[0].astype(np.float32, copy=False))
        offsets, columns, best = (
            part.numpy() for part in max_by_id(ids, weights, [item.tokens for item in sequences])
        )
        kept = (best != 0) & ~np.isin(columns, self._unused)
        ends = np.concatenate(([0], np.cumsum(kept)))[offsets[1:-1]]
        return _rows(columns[kept].astype(np.int32), best[kept], ends)


def _rows(
    columns: NDArray[np.int32], weights: NDArray[np.float32], ends: NDArray[np.int64]
) -> list[Output]:
    """Split at `ends`, the ends of all rows but the last."""
    parts = zip(np.split(columns, ends), np.split(weights, ends), strict=True)
    return [SparseRow(indices, values) for indices, values in parts]
