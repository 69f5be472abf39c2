"""The layout of a packed batch for attention kernels: which queries attend to which keys.

Built once per batch on the host (`libs/models/interface/packed.py`), so kernels never read lengths
from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceRun:
    """Adjacent sequences of one shape, which a kernel can view as one dense batch.

    Attributes:
        query: Row of the first sequence's first query.
        key: Row of the first sequence's first key.
        queries: Queries of each sequence.
        keys: Keys of each sequence.
    """

    query: int
    key: int
    count: int
    queries: int
    keys: int

    @property
    def offset(self) -> int:
        """Return the position of the first query relative to the first key.

        Queries end with the keys: surplus keys are a shared prefix, or all but the last row of a
        sequence. With fewer keys than queries, the keys are the beginning of the sequence, and the
        queries begin with them.
        """
        return max(0, self.keys - self.queries)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The queries `cu_queries[i]:cu_queries[i + 1]` and keys `cu_keys[i]:cu_keys[i + 1]` of each
    sequence i, both int32.

    Attributes:
        memo: A cache of data that a kernel computes once per batch for all layers (masks, biases by
            distance); each kernel has separate keys.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int
    runs: tuple[SequenceRun, ...]
    memo: dict[object, object] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def from_lengths(
        queries: Sequence[int], keys: Sequence[int], device: torch.device | str = "cpu"
    ) -> BatchLayout:
        """Build the layout of sequences with these numbers of queries and keys, laid end to end in
        this order.
        """
        is_same = queries is keys or tuple(queries) == tuple(keys)
        cu_queries, *other = upload(
            [ends(queries)] if is_same else [ends(queries), ends(keys)], device
        )
        return BatchLayout.at(cu_queries, other[0] if other else cu_queries, queries, keys)

    @staticmethod
    def at(
        cu_queries: Tensor, cu_keys: Tensor, queries: Sequence[int], keys: Sequence[int]
    ) -> BatchLayout:
        """Build the same from bounds that are on the device already."""
        return BatchLayout(cu_queries, cu_keys, max(queries), max(keys), runs(queries, keys))

    @property
    def max_positions(self) -> int:
        """Return the positions of the longest sequence, in queries or keys."""
        return max(self.max_queries, self.max_keys)

    @property
    def ends_align(self) -> bool:
        """Return whether every sequence has at least as many keys as queries, as the CUDA kernels'
        causal and window masks assume.
        """
        return all(run.keys >= run.queries for run in self.runs)


def runs(queries: Sequence[int], keys: Sequence[int]) -> tuple[SequenceRun, ...]:
    """Return the runs of adjacent sequences of equal shape."""
    found: list[SequenceRun] = []
    query = key = 0
    for (own, seen), group in groupby(zip(queries, keys, strict=True)):
        count = sum(1 for _ in group)
        found.append(SequenceRun(query, key, count, own, seen))
        query += count * own
        key += count * seen
    return tuple(found)


def ends(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Return the start of each sequence and the end of the last: [sequences + 1] int32."""
    return np.cumsum((0, *lengths), dtype=np.int32)


def cumulated(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """Return `ends` on the device."""
    return to_device(ends(lengths), device)


_ALIGNED: Final = 4
"""Numbers in 16 bytes. Triton compiles a kernel separately for tensors that begin at a multiple of
that and for others.
"""


def upload(arrays: Sequence[NDArray[np.int32]], device: torch.device | str) -> list[Tensor]:
    """Copy arrays [n] to the device without waiting for it: on CUDA, views of one buffer, filled by
    one copy.
    """
    if torch.device(device).type != "cuda":
        return [to_device(array, device) for array in arrays]
    starts = np.cumsum([0, *(-(-len(array) // _ALIGNED) * _ALIGNED for array in arrays)]).tolist()
    pinned = torch.empty(starts[-1], dtype=torch.int32, pin_memory=True)
    whole = pinned.numpy()
    for start, array in zip(starts, arrays, strict=False):
        whole[start : start + len(array)] = array
    buffer = pinned.to(device, non_blocking=True)
    return [
        buffer[start : start + len(array)] for start, array in zip(starts, arrays, strict=False)
    ]


def to_device(
    array: NDArray[np.number], device: torch.device | str, dtype: type[np.generic] = np.int32
) -> Tensor:
    """Copy to the device with type `dtype`, without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=dtype))
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
