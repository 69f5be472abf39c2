"""Forwards on static buffers filled up to a bucket, against the eager ones; and everything that keeps a graph from being used."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from libs.kernels import triton_here
from libs.models import EncodeWork, InputRows, InputSequence, Output, PackedModel, SparseRow
from libs.models.graphs.buckets import SEQUENCES, TOKENS, Bucket, Uses, bucket_of
from libs.models.graphs.buffers import filled, own_batch, whole_batch
from libs.models.graphs.graphs import ROUGH_BYTES, Event, Graphs, Owner, distance, tolerance
from libs.models.graphs.store import STALE, GraphStore
from libs.models.layers.encoder import PackedEncoder
from libs.models.packed import Packed, Rows
from libs.models.text.registry import build_encoder
from libs.models.tiers import alone, sharing
from libs.models.weights import TensorFile
from tests.models.conftest import load
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.parity.recipes import RECIPES
from tests.support.graphs import FakeCapture

GIB = 1 << 30


def ids(count: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(5, 300, count, dtype=np.int32)


def sequences(*lengths: int) -> list[InputSequence]:
    return [InputSequence(ids(length, number)) for number, length in enumerate(sorted(lengths))]


@dataclass
class Memory:
    """What may be reserved, what was, and what was told."""

    limit: int = GIB
    reserved: list[int] = field(default_factory=list)
    told: Counter[Event] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def reserve(self, size: int) -> bool:
        if size <= self.limit:
            self.reserved.append(size)
        return size <= self.limit

    def tell(self, event: Event, detail: str) -> None:
        self.told[event] += 1
        self.details += [detail] if detail else []

    @property
    def owner(self) -> Owner:
        return Owner(self.reserve, self.tell, activation_bytes_per_token=10.0)


@dataclass
class Kept:
    """A model with graphs, captured from the first batch on unless said otherwise."""

    model: PackedModel
    capture: FakeCapture = field(default_factory=FakeCapture)
    memory: Memory = field(default_factory=Memory)

    def keep(self, *, most: int = 8, after: int = 0, check_every: int = 1) -> Graphs:
        graphs = Graphs(self.capture, self.memory.owner, most=most, after=after, check_every=check_every)
        self.model.keep_graphs(graphs)
        return graphs


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(load(write_checkpoint("bert", tmp_path, sentence=SentenceFiles())))


def close(got: Sequence[Output], wanted: Sequence[Output]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert not isinstance(one, tuple | SparseRow)
        assert not isinstance(other, tuple | SparseRow)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# Buckets


def test_every_batch_of_a_bucket_can_be_filled_up() -> None:
    for lengths in ((12,), (1,), (16,), (3, 3, 3), (1,) * 40, (100, 1), (511,), (64,) * 7, (8,) * 63):
        bucket = bucket_of(lengths, 512)
        assert bucket is not None
        fillers = bucket.fillers(sum(lengths), len(lengths))
        assert fillers is not None
        assert sum(lengths) + sum(fillers) == bucket.tokens
        assert len(lengths) + len(fillers) == bucket.sequences
        assert all(1 <= one <= bucket.longest for one in fillers)
    assert bucket_of((12,), 512) == Bucket(16, 2, 16)
    assert bucket_of((16,), 512) == Bucket(32, 2, 32), "no bucket has one sequence"
    assert bucket_of((8, 8), 512) == Bucket(16, 2, 16), "full: no fillers"
    assert (bucket_of((513,), 1024), bucket_of((1,) * 65, 512)) == (None, None)


def test_fillers_are_no_longer_than_the_encoder_takes() -> None:
    """A bias by distance has no entry for longer ones."""
    assert bucket_of((8, 8, 1), 8) == Bucket(32, 8, 8)
    assert Bucket(32, 8, 8).fillers(17, 3) == (3, 3, 3, 3, 3)
    assert Bucket(64, 2, 8).fillers(10, 1) is None
    assert bucket_of((8,) * 64, 8) == Bucket(512, 64, 8)


def test_a_shape_is_due_after_its_uses_and_put_off_twice_as_long() -> None:
    uses = Uses(after=2)
    assert [uses.add("a") for _ in range(3)] == [False, False, True]
    assert uses.add("a"), "until it is captured or put off"
    uses.put_off("a")
    assert [uses.add("a") for _ in range(5)] == [False] * 4 + [True]
    uses.put_off("a")
    assert sum(not uses.add("a") for _ in range(20)) == 8
    uses.captured("a")
    assert [uses.add("a") for _ in range(3)] == [False, False, True]
    assert not uses.add("b")


@dataclass(frozen=True)
class Sized:
    bytes: int


def test_the_store_drops_the_least_recently_used_and_only_stale_ones() -> None:
    store: GraphStore[Sized] = GraphStore(most=2, most_bytes=100)
    store.add("a", Sized(10), now=1)
    store.add("b", Sized(20), now=2)
    assert store.use("a", now=3) is not None
    assert not store.make_room(10, now=4)
    assert not store.make_room(10, now=1 + STALE)
    assert (len(store), store.bytes) == (2, 30)
    assert store.make_room(10, now=2 + STALE), "b was used last at 2"
    assert (store.use("b", 0), store.bytes) == (None, 10)
    assert store.make_room(90, now=0)
    assert not store.make_room(91, now=0)
    assert store.make_room(91, now=3 + STALE)
    assert len(store) == 0
    assert not store.make_room(101, now=9 * STALE), "it would not fit alone"


# Buffers


def test_a_buffer_holds_the_batch_and_its_fillers() -> None:
    bucket = Bucket(16, 4, 16)
    given = [InputSequence(np.array([7, 8], np.int32)), InputSequence(np.array([9, 10, 11], np.int32), np.array([0, 1, 1], np.int32))]
    buffer = torch.from_numpy(filled(bucket, given))
    whole = whole_batch(buffer, bucket, typed=True)
    assert whole.ids.tolist() == [7, 8, 9, 10, 11, *[0] * 11]
    assert whole.positions.tolist() == [0, 1, 0, 1, 2, *[0] * 11]
    assert whole.type_ids is not None
    assert whole.type_ids.tolist() == [0, 0, 0, 1, 1, *[0] * 11]
    assert whole.cu_seqlens.tolist() == [0, 2, 5, 11, 16]
    assert whole.lengths == (2, 3, 6, 5)
    assert (whole.row_layout().cu_queries.tolist(), whole.row_layout().max_keys) == ([0, 1, 2, 3, 4], 16)
    own = own_batch(buffer, bucket, (2, 3), typed=True)
    eager = Packed.of([one.ids for one in given], [one.type_ids for one in given])
    for name in ("ids", "positions", "type_ids", "cu_seqlens"):
        assert torch.equal(getattr(own, name), getattr(eager, name))
    assert (own.lengths, own.keys, own.layout.runs) == (eager.lengths, eager.keys, eager.layout.runs)
    assert whole_batch(buffer, bucket, typed=False).type_ids is None
    with pytest.raises(ValueError, match="do not fit"):
        filled(Bucket(16, 2, 16), sequences(17))


# Models


@pytest.mark.parametrize("kind", [kind for kind in RECIPES if kind != "deberta-v2"])
def test_every_family_answers_as_eagerly(kind: str, tmp_path: Path) -> None:
    """Pooled tokens, and the encoder's shortcut for one row of each sequence."""
    for pooling in ("mean_tokens", "lasttoken", "cls_token"):
        kept = Kept(load(write_checkpoint(kind, tmp_path / pooling, sentence=SentenceFiles(pooling=pooling))))  # type: ignore[arg-type]
        batches = [sequences(12), sequences(5, 9, 1), sequences(3), sequences(30, 2, 2, 2, 40), sequences(15)]
        wanted = [kept.model.forward("dense", batch) for batch in batches]
        kept.keep()
        for _ in range(2):
            for batch, one in zip(batches, wanted, strict=True):
                close(kept.model.forward("dense", batch), one)
        assert kept.memory.told == {"captured": len(kept.capture.made), "replayed": 10, "checked": 10}
        assert 3 <= len(kept.capture.made) < len(batches), "some share a graph"


@pytest.mark.parametrize("kind", ["bert", "mpnet", "modernbert", "qwen3", "gemma3_text"])
def test_equal_to_the_bit_on_an_accelerators_kernels(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels, interpreted: like a GPU's they take every length from the buffer. What they compute for the batch does
    not depend on the fillers; only products of other sizes may round differently."""
    pytest.importorskip("triton")
    write_checkpoint(kind, tmp_path, hidden=32, heads=2, layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    encoder, *_ = build_encoder(config, TensorFile.open(tmp_path), dtype=torch.float32, device=torch.device("cpu"), head_tables={})
    monkeypatch.setattr(triton_here, "_DEVICES", ("cpu",))
    bucket = Bucket(32, 4, 32)
    rows: Rows | None
    for rows in (None, "last"):
        captured = FakeCapture().capture(_forward(encoder, bucket, rows), filled(bucket, sequences(20, 2, 3)))
        assert captured is not None
        for batch in (sequences(1, 4, 9), sequences(12), sequences(20, 2, 3)):
            wanted = encoder.forward(Packed.of([one.ids for one in batch]), rows)
            hidden = captured.replay(filled(bucket, batch))
            assert len(hidden) == (32 if rows is None else 4)
            assert distance(hidden[: len(wanted)], wanted) < 1e-5


def _forward(encoder: PackedEncoder, bucket: Bucket, rows: Rows | None):  # type: ignore[no-untyped-def]
    def forward(buffer: Tensor) -> Tensor:
        # Without runs and lengths, as on a GPU.
        whole = whole_batch(buffer, bucket, typed=False)
        assert whole.one_row is not None
        bare = [Packed.__dataclass_fields__]  # noqa: F841
        return encoder.forward(whole, rows)

    return forward
