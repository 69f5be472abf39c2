"""LoRA updates of a linear layer on a packed batch: many adapters in one batch, each for its rows
(multi-LoRA).

Rows of one adapter are contiguous, and the host knows where they begin, so nothing here
synchronises with the device. On a CPU each adapter's rows take two separate low-rank products,
which is the least arithmetic. On an accelerator, where a launch costs more than that, the factors
of the batch's adapters are concatenated: two products for all rows, with the other adapters' ranks
masked to zero between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from libs.kernels.layout import to_device

_FEW = 2  # adapters; up to this many, separate products are faster than masks on any device


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter's factors for one linear layer: x -> (x a') b.

    `gain` and `shift`, [outputs], for an adapter that also scales the layer's weights (DoRA): the
    layer's result y becomes y gain + shift before the product is added; the shift preserves the
    layer's bias. None: y stays.

    Attributes:
        a: [rank, inputs].
        b: [rank, outputs], including the adapter's scale.
    """

    a: Tensor
    b: Tensor
    gain: Tensor | None = None
    shift: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start` to `stop` of a batch belong to adapter number `adapter`."""

    start: int
    stop: int
    adapter: int


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The assignment of a batch's rows to adapters, for each number of rows that a layer may
    receive: all tokens, or one per sequence.

    Rows without an adapter are in no segment.

    Attributes:
        memo: A cache of masks, computed once per batch and shared by all layers.
    """

    segments: Mapping[int, tuple[Segment, ...]]
    memo: dict[object, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def from_adapters(adapters: Sequence[int | None], lengths: Sequence[int]) -> AdapterRows:
        """Build the assignment.

        Args:
            adapters: Adapter number of each sequence of the batch, in its order; None for none.
            lengths: Tokens of each sequence.
        """
        return AdapterRows(
            {
                sum(lengths): _segments(adapters, lengths),
                len(lengths): _segments(adapters, (1,) * len(lengths)),
            }
        )

    def within(self, rows: int, start: int, stop: int) -> Iterator[tuple[int, int, int | None]]:
        """Yield the rows `start` to `stop` of a batch of `rows`, split where the adapter changes:
        start, stop and adapter of each.
        """
        for segment in self.segments[rows]:
            if segment.stop > start and segment.start < stop:
                if segment.start > start:
                    yield start, segment.start, None
                start, end = max(start, segment.start), min(stop, segment.stop)
                yield start, end, segment.adapter
                start = end
        if start < stop:
            yield start, stop, None


def _segments(adapters: Sequence[int | None], lengths: Sequence[int]) -> tuple[Segment, ...]:
    found: list[Segment] = []
    start = 0
    for adapter, group in groupby(zip(adapters, lengths, strict=True), key=lambda pair: pair[0]):
        stop = start + sum(length for _, length in group)
        if adapter is not None:
            found.append(Segment(start, stop, adapter))
        start = stop
    return tuple(found)


@dataclass(frozen=True, slots=True)
class LoraUpdates:
    """The updates of a batch's adapters to one linear layer.

    Attributes:
        parts: The factors by adapter number, for adapters of this layer.
    """

    rows: AdapterRows
    parts: Mapping[int, LowRank]

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """Add each row's adapter's update for x [rows, inputs] to y [rows, outputs] in place, and
        return y.
        """
        segments = [
            segment for segment in self.rows.segments[len(x)] if segment.adapter in self.parts
        ]
        for segment in segments:
            part = self.parts[segment.adapter]
            if part.gain is not None and part.shift is not None:
                rows = slice(segment.start, segment.stop)
                y[rows] = torch.addcmul(part.shift, y[rows], part.gain).type_as(y)
        if y.device.type == "cpu" or len(segments) <= _FEW:
            return add_sliced(y, x, segments, self.parts)
        return add_masked(y, x, segments, self.parts, self.rows.memo)

    @property
    def scales(self) -> bool:
        """Return whether an adapter scales the layer's result, to which nothing else may have been
        added then.
        """
        return any(part.gain is not None for part in self.parts.values())

    def add_rows_to(self, y: Tensor, numbers: Tensor) -> Tensor:
        """Add the updates of a lookup table's rows `numbers` [rows] to y [rows, size] in place, and
        return y.

        Here `a` of a part is [table rows, rank]: the low-rank input of each row of the table.
        """
        for segment in self.rows.segments[len(numbers)]:
            part = self.parts.get(segment.adapter)
            if part is not None:
                rows = slice(segment.start, segment.stop)
                y[rows] += (part.a.index_select(0, numbers[rows]) @ part.b).type_as(y)
        return y


def add_sliced(
    y: Tensor, x: Tensor, segments: Sequence[Segment], parts: Mapping[int, LowRank]
) -> Tensor:
    """Compute each adapter's rows separately. An adapter of another type than the batch (float32)
    keeps its type.
    """
    for segment in segments:
        part, rows = parts[segment.adapter], slice(segment.start, segment.stop)
        if part.a.dtype == x.dtype:
            y[rows].addmm_(x[rows] @ part.a.T, part.b)
        else:
            y[rows] += ((x[rows].to(part.a.dtype) @ part.a.T) @ part.b).type_as(y)
    return y


def add_masked(
    y: Tensor,
    x: Tensor,
    segments: Sequence[Segment],
    parts: Mapping[int, LowRank],
    memo: dict[object, Tensor],
) -> Tensor:
    """Compute all rows with all adapters together. Rows of the same adapter need not be contiguous
    here.
    """
    used = list(dict.fromkeys(segment.adapter for segment in segments))
    ranks = tuple((number, len(parts[number].a)) for number in used)
    low = x @ torch.cat([parts[number].a for number in used]).T
    return y.addmm_(
        low * _mask(len(x), segments, ranks, low, memo),
        torch.cat([parts[number].b for number in used]),
    )


def _mask(
    rows: int,
    segments: Sequence[Segment],
    ranks: tuple[tuple[int, int], ...],
    low: Tensor,
    memo: dict[object, Tensor],
) -> Tensor:
    """Return 1 where row and rank belong to the same adapter, else 0: [rows, ranks] in the type of
    `low`.
    """
    key = (rows, ranks)
    if key not in memo:
        of_row = np.full(rows, -1, np.int32)
        for segment in segments:
            of_row[segment.start : segment.stop] = segment.adapter
        of_rank = np.repeat(*np.array(ranks, np.int32).T)
        memo[key] = (to_device(of_row, low.device)[:, None] == to_device(of_rank, low.device)).to(
            low.dtype
        )
    return memo[key]
