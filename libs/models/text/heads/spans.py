"""Pooling of the token states of spans of a sequence: late chunking (Günther et al., arXiv
2409.04701).

Every pooling supported here is a sum of weighted states: the mean, the mean by position, the last
token's state. A span in several windows of a text is therefore the sum of each window's result,
which `processing/chunking/span_pooling.py` computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.kernels.layout import cumulated, to_device
from libs.kernels.rows.segments import reduce
from libs.models.interface.head import Array
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output

_ROWS: Final = 1024
"""Token states gathered at a time. Spans may overlap, so their rows can far exceed the batch's
tokens."""


@dataclass(frozen=True, slots=True)
class SpanRows:
    """`InputSequence.input` of this head: the tokens of each span, and their weights."""

    rows: NDArray[np.int32]
    """Tokens of the sequence, span after span: [n]."""
    weights: NDArray[np.float32]
    """The weight of each row in each pooling: [n, poolings]."""
    counts: NDArray[np.int32]
    """Number of rows of each span, at least one."""


class SpanHead(nn.Module):
    """Map hidden states to [spans, poolings * hidden] float32 for each sequence."""

    @property
    def rows(self) -> Rows | None:
        return None

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        """Return [spans of all sequences, poolings * hidden]."""
        spans = [_spans(sequence) for sequence in sequences]
        starts = np.cumsum((0, *batch.lengths[:-1]))
        rows = np.concatenate(
            [own.rows + start for own, start in zip(spans, starts, strict=True)]
        ).astype(np.int32)
        weights = np.concatenate([own.weights for own in spans])
        ends = np.cumsum(np.concatenate([own.counts for own in spans]))
        out = hidden.new_zeros((len(ends), weights.shape[1] * hidden.shape[1]), dtype=torch.float32)
        for begin in range(0, len(rows), _ROWS):
            end = min(begin + _ROWS, len(rows))
            first, last = np.searchsorted(ends, (begin, end - 1), side="right")
            cuts = np.clip(ends[first : last + 1], begin, end) - begin
            segments = cumulated(np.diff(cuts, prepend=0).tolist(), hidden.device)
            states = hidden.index_select(0, to_device(rows[begin:end], hidden.device)).float()
            shares = to_device(weights[begin:end], hidden.device, np.float32)
            parts = [
                reduce(states * shares[:, one : one + 1], "sum", segments)
                for one in range(weights.shape[1])
            ]
            out[first : last + 1] += torch.cat(parts, dim=1)
        return (out,)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        ends = np.cumsum([len(_spans(sequence).counts) for sequence in sequences])[:-1]
        return list(np.split(arrays[0].astype(np.float32, copy=False), ends))


def _spans(sequence: InputSequence) -> SpanRows:
    if not isinstance(sequence.input, SpanRows):
        raise TypeError("a sequence has no spans to pool")
    return sequence.input
