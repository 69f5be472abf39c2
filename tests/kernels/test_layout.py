"""A batch is uploaded to the device in one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from libs.kernels.layout import BatchLayout, upload
from libs.models.interface.packed import Packed
from tests.support.device import no_synchronization

IDS = [np.arange(5, 5 + length, dtype=np.int32) for length in (1, 3, 3, 8)]
TYPES = [None, np.array([0, 1, 1], np.int32), None, None]

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")


def test_equal_queries_and_keys_share_their_ends() -> None:
    layout = BatchLayout.from_lengths((1, 3), [1, 3])
    assert layout.cu_queries is layout.cu_keys
    assert layout.cu_queries.tolist() == [0, 1, 4]
    other = BatchLayout.from_lengths((1, 3), (2, 3))
    assert (other.cu_queries.tolist(), other.cu_keys.tolist(), other.max_keys) == (
        [0, 1, 4],
        [0, 2, 5],
        3,
    )


def test_positions_follow_the_shared_prefix() -> None:
    batch = Packed.from_sequences(IDS, before=[None, None, 1, None], seen=[0, 0, 2, 0])
    assert batch.positions.tolist() == [0, 0, 1, 2, 3, 4, 5, *range(8)]
    assert batch.positions.dtype is torch.int32
    assert batch.keys == (1, 3, 5, 8)
    assert batch.key_rows is not None
    assert batch.key_rows.tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 5, *range(7, 15)]
    assert (batch.layout.cu_queries.tolist(), batch.layout.cu_keys.tolist()) == (
        [0, 1, 4, 7, 15],
        [0, 1, 4, 9, 17],
    )


def test_axes_are_positions_where_none_are_given() -> None:
    given = np.full((3, 3), 9, np.int32)
    batch = Packed.from_sequences(IDS, axes=[None, given, None, None])
    assert batch.axes is not None
    assert batch.axes.tolist() == [[0, 9, 9, 9, 0, 1, 2, *range(8)]] * 3


@pytest.mark.gpu
@GPU
def test_one_copy_brings_all_and_each_part_is_aligned() -> None:
    arrays = [np.arange(length, dtype=np.int32) for length in (5, 1, 8, 3)]
    upload(arrays, "cuda")
    with no_synchronization():
        found = upload(arrays, "cuda")
    assert len({one.untyped_storage().data_ptr() for one in found}) == 1
    assert all(one.data_ptr() % 16 == 0 for one in found)
    for one, wanted in zip(found, arrays, strict=True):
        assert one.cpu().tolist() == wanted.tolist()


@pytest.mark.gpu
@GPU
def test_batch_on_the_accelerator_equals_that_on_the_cpu() -> None:
    def packed_on(device: str) -> Packed:
        return Packed.from_sequences(
            IDS, TYPES, device, before=[None, None, 1, None], seen=[0, 0, 2, 0]
        )

    ours, wanted = packed_on("cuda"), packed_on("cpu")
    for name in ("ids", "positions", "type_ids", "key_rows"):
        assert getattr(ours, name).cpu().tolist() == getattr(wanted, name).tolist()
    for own, plain in ((ours.layout, wanted.layout), (ours.row_layout(), wanted.row_layout())):
        assert own.cu_queries.cpu().tolist() == plain.cu_queries.tolist()
        assert own.cu_keys.cpu().tolist() == plain.cu_keys.tolist()
        assert (own.max_queries, own.max_keys, own.runs) == (
            plain.max_queries,
            plain.max_keys,
            plain.runs,
        )
    for rows in ("first", "last"):
        assert ours.rows(rows).cpu().tolist() == wanted.rows(rows).tolist()
