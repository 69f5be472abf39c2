"""Forty models of mixed sizes take turns on a GPU of 24 GB: 10,000 swaps on a fake of torch's
allocator.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from services.worker.memory.loading import RELIEFS_FOR_A_LOAD
from tests.support.allocators import MIB, FakeAllocator, FakeExpandable, FakeSegments

SWAPS = 10_000
DEVICE_BYTES = 22_900 * MIB
"""24 GB less the driver's context."""
BUDGET_BYTES = 20_900 * MIB
"""Budget of a worker (`_accelerator` in services/worker/machine/device.py): 93 % of the memory
beyond 1 GiB.
"""
WEIGHTS_MIB = (45, 180, 220, 440, 670, 1190, 2400)
"""Weights in bfloat16: MiniLM, DeBERTa-small, BERT-base, GLiNER-large, BERT-large, and decoders of
0.6 and 1.2 billion weights.
"""


def weights(seed: int) -> list[int]:
    chooser = random.Random(seed)
    return [
        int(WEIGHTS_MIB[number % len(WEIGHTS_MIB)] * MIB * chooser.uniform(0.9, 1.1))
        for number in range(40)
    ]


def replay(allocator: FakeAllocator, sizes: Sequence[int], seed: int, reliefs: int = 0) -> int:
    """Return the number of swaps that ran out of memory.

    Each loads a model that is not resident. Random residents are evicted until the ledger has room
    for it, and then up to `reliefs` more while the allocator has none.
    """
    chooser = random.Random(seed)
    resident: dict[int, int] = {}
    used = failed = 0

    def evict() -> int:
        victim = chooser.choice(list(resident))
        allocator.free(resident.pop(victim))
        return sizes[victim]

    for _ in range(SWAPS):
        model = chooser.choice([one for one in range(len(sizes)) if one not in resident])
        while used + sizes[model] > BUDGET_BYTES:
            used -= evict()
        address = allocator.allocate(sizes[model])
        for _ in range(reliefs):
            if address is None:
                used -= evict()
                address = allocator.allocate(sizes[model])
        if address is None:
            failed += 1
        else:
            resident[model] = address
            used += sizes[model]
        assert allocator.reserved_bytes <= DEVICE_BYTES
    return failed


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_split_segments_refuse_models_that_fit_the_ledger(seed: int) -> None:
    assert replay(FakeSegments(DEVICE_BYTES), weights(seed), seed) > SWAPS * 0.3


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_expandable_segments_fit_every_model_that_fits_the_ledger(seed: int) -> None:
    assert replay(FakeExpandable(DEVICE_BYTES), weights(seed), seed) == 0


def test_evictions_do_not_compensate_split_segments() -> None:
    """A load that ran out of memory may evict a few more models, which alone is not enough."""
    assert replay(FakeSegments(DEVICE_BYTES), weights(0), 0, RELIEFS_FOR_A_LOAD) > SWAPS * 0.1


def test_models_of_one_size_fragment_nothing() -> None:
    """Control: the fake does not fail by itself."""
    assert replay(FakeSegments(DEVICE_BYTES), [670 * MIB] * 40, 0) == 0


def test_blocks_are_split_and_merge_again() -> None:
    allocator = FakeSegments(100 * MIB)
    whole = allocator.allocate(60 * MIB)
    assert whole is not None
    allocator.free(whole)
    first, second = allocator.allocate(20 * MIB), allocator.allocate(30 * MIB)
    assert (first, second, allocator.reserved_bytes) == (whole, whole + 20 * MIB, 60 * MIB)
    assert allocator.allocate(50 * MIB) is None, (
        "40 MiB are left of the device, and 10 of the segment"
    )
    assert first is not None
    assert second is not None
    allocator.free(first)
    assert allocator.allocate(50 * MIB) is None, "the segment is kept by its second block"
    allocator.free(second)
    assert allocator.allocate(100 * MIB) is not None, (
        "a segment without a block in use goes back to the device"
    )


def test_pages_between_blocks_are_mapped_elsewhere() -> None:
    allocator = FakeExpandable(100 * MIB)
    first, second = allocator.allocate(60 * MIB), allocator.allocate(20 * MIB)
    assert (first, second) == (0, 60 * MIB)
    assert allocator.allocate(60 * MIB) is None
    allocator.free(0)
    assert allocator.allocate(80 * MIB) == 80 * MIB, (
        "behind the second block, with the pages of the first"
    )
    assert allocator.reserved_bytes == 100 * MIB
