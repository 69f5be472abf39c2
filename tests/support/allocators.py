"""CUDA's caching allocator as torch has it, without a device: segments, best fit, splits and
merges, or pages that are remapped.

Rules and sizes are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11), for one stream and
allocations above 1 MiB: those that a worker's copy stream makes for weights.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import Final, Protocol

MIB: Final = 1 << 20
MIN_SPLIT_BYTES: Final = MIB
"""The remainder of a block is split off if it is larger (kSmallSize)."""
LARGE_SEGMENT_BYTES: Final = 20 * MIB
"""The segment for allocations below MIN_LARGE_BYTES, and the page of an expandable segment
(kLargeBuffer).
"""
MIN_LARGE_BYTES: Final = 10 * MIB
"""Size from which a segment is as large as its first block, rounded up to SEGMENT_ROUNDING_BYTES
(kMinLargeAlloc, kRoundLarge).
"""
SEGMENT_ROUNDING_BYTES: Final = 2 * MIB


class FakeAllocator(Protocol):
    """`allocate` returns an address, or None if the device is out of memory."""

    @property
    def reserved_bytes(self) -> int: ...

    def allocate(self, size: int) -> int | None: ...

    def free(self, address: int) -> None: ...


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    segment: _Segment
    is_free: bool = False


@dataclass(slots=True, eq=False)
class _Segment:
    """Memory of one cudaMalloc. `blocks` cover it, by address."""

    size: int
    blocks: list[_Block]


class FakeSegments:
    """Segments of a fixed size: one goes back to the device only when no block of it is in use."""

    def __init__(self, device_bytes: int) -> None:
        self._device_bytes = device_bytes
        self._segments: list[_Segment] = []
        self._used: dict[int, _Block] = {}
        self._next_address = 0

    @property
    def reserved_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    def allocate(self, size: int) -> int | None:
        block = self._best_fit(size) or self._new_segment(size)
        if block is None:
            self._segments = [
                one for one in self._segments if len(one.blocks) > 1 or not one.blocks[0].is_free
            ]
            block = self._new_segment(size)
        if block is None:
            return None
        block.is_free = False
        if block.size - size > MIN_SPLIT_BYTES:
            rest = _Block(block.address + size, block.size - size, block.segment, is_free=True)
            block.size = size
            block.segment.blocks.insert(block.segment.blocks.index(block) + 1, rest)
        self._used[block.address] = block
        return block.address

    def free(self, address: int) -> None:
        block = self._used.pop(address)
        block.is_free = True
        blocks = block.segment.blocks
        place = blocks.index(block)
        for first, second in ((place, place + 1), (place - 1, place)):
            if (
                first >= 0
                and second < len(blocks)
                and blocks[first].is_free
                and blocks[second].is_free
            ):
                blocks[first].size += blocks.pop(second).size

    def _best_fit(self, size: int) -> _Block | None:
        fitting = (
            block
            for segment in self._segments
            for block in segment.blocks
            if block.is_free and block.size >= size
        )
        return min(fitting, key=lambda block: (block.size, block.address), default=None)

    def _new_segment(self, size: int) -> _Block | None:
        whole = (
            LARGE_SEGMENT_BYTES
            if size < MIN_LARGE_BYTES
            else -(-size // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
        )
        if self.reserved_bytes + whole > self._device_bytes:
            return None
        segment = _Segment(whole, [])
        segment.blocks.append(_Block(self._next_address, whole, segment, is_free=True))
        self._segments.append(segment)
        self._next_address += whole
        return segment.blocks[0]


class FakeExpandable:
    """One expandable segment: a range of addresses with pages that are mapped when needed and
    unmapped when memory is short.
    """

    def __init__(self, device_bytes: int) -> None:
        self._pages = device_bytes // LARGE_SEGMENT_BYTES
        self._mapped: set[int] = set()
        self._used: list[tuple[int, int]] = []  # (address, end), by address

    @property
    def reserved_bytes(self) -> int:
        return len(self._mapped) * LARGE_SEGMENT_BYTES

    def allocate(self, size: int) -> int | None:
        fitting = [(end - begin, begin) for begin, end in self._gaps() if end - begin >= size]
        mapped = [gap for gap in fitting if self._missing(gap[1], size) == set()]
        _, address = min(mapped or fitting)
        missing = self._missing(address, size)
        if len(self._mapped) + len(missing) > self._pages:
            in_use = {page for begin, end in self._used for page in _pages(begin, end)}
            self._mapped &= in_use
            missing = self._missing(address, size)
        if len(self._mapped) + len(missing) > self._pages:
            return None
        self._mapped |= missing
        insort(self._used, (address, address + size))
        return address

    def free(self, address: int) -> None:
        self._used.remove(next(one for one in self._used if one[0] == address))

    def _gaps(self) -> list[tuple[int, int]]:
        """Free ranges of addresses. The last one is as large as anything: torch reserves more
        addresses than there is memory.
        """
        ends = [0, *(end for _, end in self._used)]
        begins = [*(begin for begin, _ in self._used), 1 << 60]
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if begin > end]

    def _missing(self, address: int, size: int) -> set[int]:
        return set(_pages(address, address + size)) - self._mapped


def _pages(begin: int, end: int) -> range:
    return range(begin // LARGE_SEGMENT_BYTES, -(-end // LARGE_SEGMENT_BYTES))
