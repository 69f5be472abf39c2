"""Forwards on static buffers filled up to a bucket, against the eager ones; and everything that
keeps a graph from being used.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers.sparse_encoder import SparseEncoder
from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from libs.catalog.card import PoolingMode
from libs.kernels import triton_here
from libs.models import (
    CancelCheck,
    EncodeWork,
    EntitiesWork,
    GeneratedIds,
    InputRows,
    InputSequence,
    Output,
    PackedModel,
    Prepared,
    Result,
    SparseRow,
    Work,
)
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.processor import Processor
from libs.models.layers.encoder import PackedEncoder
from libs.models.runtime.graphs.buckets import (
    HOT,
    MAX_WAIT_BATCHES,
    Bucket,
    Uses,
    hot_buckets,
    max_tokens,
    smallest_bucket,
)
from libs.models.runtime.graphs.buffers import fill, filled, own_batch, whole_batch
from libs.models.runtime.graphs.capture import Forward
from libs.models.runtime.graphs.graphs import ROUGH_BYTES, Event, Graphs, Owner
from libs.models.runtime.graphs.shapes import GraphShape, distance, tolerance
from libs.models.runtime.graphs.store import STALE_FORWARDS, GraphStore
from libs.models.runtime.loaded.peft import TensorNames
from libs.models.runtime.loaded.tiers import alone, sharing
from libs.models.text.heads.pooled import PooledHead
from libs.models.text.registry import build_encoder
from libs.models.weights import TensorFile
from tests.models.conftest import load
from tests.parity.adapters import write_random_adapter
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.parity.gliner_models import make_reference
from tests.parity.recipes import RECIPES
from tests.support.graphs import FakeCapture, FakeCaptured

GIB = 1 << 30


def ids(count: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(5, 300, count, dtype=np.int32)


def sequences(*lengths: int) -> list[InputSequence]:
    return [InputSequence(ids(length, number)) for number, length in enumerate(sorted(lengths))]


@dataclass
class Memory:
    """An owner of graphs that records reservations and events."""

    limit: int = GIB
    reserved: list[int] = field(default_factory=list)
    reported: Counter[Event] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def reserve(self, size: int) -> bool:
        if size <= self.limit:
            self.reserved.append(size)
        return size <= self.limit

    def report(self, event: Event, detail: str) -> None:
        self.reported[event] += 1
        self.details += [detail] if detail else []

    @property
    def owner(self) -> Owner:
        return Owner(self.reserve, self.report, activation_bytes_per_token=10.0)


@dataclass
class Kept:
    """A model with graphs, worth a capture after their first batch unless said otherwise."""

    model: PackedModel
    capture: FakeCapture = field(default_factory=FakeCapture)
    memory: Memory = field(default_factory=Memory)

    def keep(
        self, *, most: int = 8, after: int = 0, check_every: int = 1, is_hot: bool = False
    ) -> Graphs:
        """`is_hot`: the shapes that are expected after a load wait for their capture."""
        graphs = Graphs(
            self.capture, self.memory.owner, most=most, after=after, check_every=check_every
        )
        self.model.keep_graphs(graphs)
        if not is_hot:
            graphs.drop()
        return graphs

    def settle(self) -> None:
        """Captures all that waits, as an idle device thread does."""
        while self.model.awaits_capture:
            self.model.capture_graph()

    def warm(self, *batches: list[InputSequence], head: str = "dense") -> None:
        """Runs each batch eagerly, and captures it."""
        for batch in batches:
            self.model.forward(head, batch)
        self.settle()


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(load(write_checkpoint("bert", tmp_path, sentence=SentenceFiles())))


def close(got: Sequence[Output], wanted: Sequence[Output]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert not isinstance(one, tuple | SparseRow | GeneratedIds)
        assert not isinstance(other, tuple | SparseRow | GeneratedIds)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# Buckets


def test_every_batch_of_a_bucket_can_be_filled_up() -> None:
    for lengths in (
        (12,),
        (1,),
        (16,),
        (3, 3, 3),
        (1,) * 40,
        (100, 1),
        (511,),
        (64,) * 7,
        (8,) * 63,
    ):
        bucket = smallest_bucket(lengths, 512)
        assert bucket is not None
        fillers = bucket.fillers(sum(lengths), len(lengths))
        assert fillers is not None
        assert sum(lengths) + sum(fillers) == bucket.tokens
        assert len(lengths) + len(fillers) == bucket.sequences
        assert all(1 <= one <= bucket.longest for one in fillers)
    assert smallest_bucket((12,), 512) == Bucket(16, 2, 16)
    assert smallest_bucket((16,), 512) == Bucket(32, 2, 32), "no bucket has one sequence"
    assert smallest_bucket((8, 8), 512) == Bucket(16, 2, 16), "full: no fillers"
    assert (smallest_bucket((513,), 1024), smallest_bucket((1,) * 65, 512)) == (None, None)


def test_fillers_are_no_longer_than_the_encoder_takes() -> None:
    """A bias by distance has no entry for longer ones."""
    assert smallest_bucket((8, 8, 1), 8) == Bucket(32, 8, 8)
    assert Bucket(32, 8, 8).fillers(17, 3) == (3, 3, 3, 3, 3)
    assert Bucket(64, 2, 8).fillers(10, 1) is None
    assert smallest_bucket((8,) * 64, 8) == Bucket(512, 64, 8)


def test_shape_is_due_after_its_uses_and_put_off_twice_as_long() -> None:
    uses = Uses(after=2)
    assert [uses.add("a") for _ in range(3)] == [False, False, True]
    assert uses.add("a"), "until it is captured or put off"
    uses.postpone("a")
    assert [uses.add("a") for _ in range(5)] == [False] * 4 + [True]
    uses.postpone("a")
    assert sum(not uses.add("a") for _ in range(20)) == 8
    for _ in range(20):
        uses.postpone("a")
    assert sum(not uses.add("a") for _ in range(2000)) == MAX_WAIT_BATCHES, (
        "however often it was refused"
    )
    uses.captured("a")
    assert [uses.add("a") for _ in range(3)] == [False, False, True]
    assert not uses.add("b")


def test_sample_fills_all_but_one_sequence_of_its_bucket(kept: Kept) -> None:
    for bucket in [
        Bucket(16, 2, 16),
        Bucket(32, 2, 16),
        Bucket(64, 64, 8),
        *hot_buckets(512),
        *hot_buckets(8),
    ]:
        shape = GraphShape(kept.model.backbones[0].encoder, None, None, False, bucket)
        lengths = [one.tokens for one in shape.sample()]
        assert len(lengths) == bucket.sequences - 1
        assert max(lengths) <= bucket.longest
        assert min(lengths) >= 1
        assert bucket.fillers(sum(lengths), len(lengths)) is not None


def test_store_is_stale_when_half_of_its_graphs_are() -> None:
    store: GraphStore[str] = GraphStore(most=2)
    assert not store.is_stale(now=5 * STALE_FORWARDS)
    store.add("a", "first", now=1)
    assert [store.is_full] == [False]
    store.add("b", "second", now=2)
    assert [store.is_full] == [True]
    assert store.use("a", now=3) is not None
    assert not store.is_stale(now=1 + STALE_FORWARDS)
    assert store.is_stale(now=2 + STALE_FORWARDS), "b was used last at 2"
    assert "b" in store
    store.clear()
    assert (len(store), store.use("a", 5)) == (0, None)


# Buffers


def test_buffer_holds_the_batch_and_its_fillers() -> None:
    bucket = Bucket(16, 4, 16)
    given = [
        InputSequence(np.array([7, 8], np.int32)),
        InputSequence(np.array([9, 10, 11], np.int32), np.array([0, 1, 1], np.int32)),
    ]
    buffer = torch.from_numpy(filled(bucket, given))
    whole = whole_batch(buffer, bucket, typed=True)
    assert whole.ids.tolist() == [7, 8, 9, 10, 11, *[0] * 11]
    assert whole.positions.tolist() == [0, 1, 0, 1, 2, *[0] * 11]
    assert whole.type_ids is not None
    assert whole.type_ids.tolist() == [0, 0, 0, 1, 1, *[0] * 11]
    assert whole.cu_seqlens.tolist() == [0, 2, 5, 11, 16]
    assert whole.lengths == (2, 3, 6, 5)
    assert (whole.row_layout().cu_queries.tolist(), whole.row_layout().max_keys) == (
        [0, 1, 2, 3, 4],
        16,
    )
    own = own_batch(buffer, bucket, (2, 3), typed=True)
    eager = Packed.from_sequences([one.ids for one in given], [one.type_ids for one in given])
    for name in ("ids", "positions", "type_ids", "cu_seqlens"):
        assert torch.equal(getattr(own, name), getattr(eager, name))
    assert (own.lengths, own.keys, own.layout.runs) == (
        eager.lengths,
        eager.keys,
        eager.layout.runs,
    )
    assert whole_batch(buffer, bucket, typed=False).type_ids is None
    with pytest.raises(ValueError, match="do not fit"):
        filled(Bucket(16, 2, 16), sequences(17))


# Models


@pytest.mark.parametrize(
    "kind",
    [kind for kind in RECIPES if kind not in ("deberta", "deberta-v2", "phi3", "qwen3_5_text")],
)
def test_every_family_answers_as_eagerly(kind: str, tmp_path: Path) -> None:
    """Pooled tokens, and the encoder's shortcut for one row of each sequence."""
    for pooling in ("mean_tokens", "lasttoken", "cls_token"):
        kept = Kept(
            load(
                write_checkpoint(kind, tmp_path / pooling, sentence=SentenceFiles(pooling=pooling))
            )
        )
        batches = [
            sequences(12),
            sequences(5, 9, 1),
            sequences(3),
            sequences(30, 2, 2, 2, 40),
            sequences(15),
        ]
        wanted = [kept.model.forward("dense", batch) for batch in batches]
        kept.keep()
        kept.warm(*batches)
        for _ in range(2):
            for batch, one in zip(batches, wanted, strict=True):
                close(kept.model.forward("dense", batch), one)
        made = len(kept.capture.made)
        assert kept.memory.reported == {"captured": made, "replayed": 10, "checked": 10 + made}
        assert 3 <= made < len(batches), "some share a graph"


@pytest.mark.parametrize(
    "kind", ["bert", "mpnet", "modernbert", "qwen3", "gemma3_text", "deberta-v2", "lfm2"]
)
def test_equal_to_the_bit_on_an_accelerators_kernels(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Triton kernels, interpreted: like a GPU's they take every length from the buffer. What
    they compute for the batch does not depend on the fillers; only products of other sizes may
    round differently."""
    pytest.importorskip("triton")
    write_checkpoint(kind, tmp_path, hidden=32, heads=2, layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    encoder, *_ = build_encoder(
        config,
        TensorFile.open(tmp_path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        head_tables={},
    )
    monkeypatch.setattr(triton_here, "_DEVICES", ("cpu",))
    bucket = Bucket(32, 4, 32)
    rows: Rows | None
    for rows in (None, "last"):
        captured = FakeCapture().capture(
            _forward(encoder, bucket, rows), filled(bucket, sequences(20, 2, 3))
        )
        assert captured is not None
        for batch in (sequences(1, 4, 9), sequences(12)):
            wanted = encoder.forward(Packed.from_sequences([one.ids for one in batch]), rows)
            hidden = captured.replay(partial(fill, bucket=bucket, sequences=batch))
            assert len(hidden) == (32 if rows is None else 4)
            assert distance(hidden[: len(wanted)], wanted) < 1e-5


def _forward(encoder: PackedEncoder, bucket: Bucket, rows: Rows | None) -> Forward:
    """The batch has no lengths on the host, as on a GPU."""

    def forward(buffer: Tensor) -> Tensor:
        whole = whole_batch(buffer, bucket, typed=False)
        one_row = replace(whole.row_layout(), runs=())
        return encoder.forward(
            replace(
                whole, lengths=(), keys=(), layout=replace(whole.layout, runs=()), one_row=one_row
            ),
            rows,
        )

    return forward


@pytest.mark.parametrize(
    "kind", [kind for kind in RECIPES if kind != "qwen3_5_text"]
)  # which is never captured
def test_no_value_is_read_on_the_host(kind: str, tmp_path: Path) -> None:
    """Reading a value or copying from the host raises on the meta device: neither may happen within
    a capture.
    """
    write_checkpoint(kind, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    encoder, *_ = build_encoder(
        config,
        TensorFile.open(tmp_path),
        dtype=torch.float32,
        device=torch.device("meta"),
        head_tables={},
    )
    bucket = Bucket(32, 4, 32)
    buffer = torch.empty(len(filled(bucket, sequences(5))), dtype=torch.int32, device="meta")
    rows: Rows | None
    with _NoCopies():
        for rows in (None, "first", "last"):
            batch = whole_batch(buffer, bucket, typed=True)
            hidden = encoder.forward(batch, rows)
            assert hidden.shape[0] == (32 if rows is None else 4)
            for mode in get_args(PoolingMode):
                pooled = PooledHead((mode,), ()).pool(
                    hidden, batch.cu_seqlens, is_one_row=rows is not None
                )
                assert pooled.shape[0] == 4


class _NoCopies(TorchDispatchMode):
    """Every tensor of every operator is on the meta device; a scalar on the host is a kernel's
    argument.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor)]
        assert all(one.is_meta or one.dim() == 0 for one in tensors), func
        return result


def test_segments_and_plain_batches_have_graphs_of_their_own(kept: Kept) -> None:
    pair = InputSequence(ids(9), np.array([0, 0, 0, 0, 1, 1, 1, 1, 1], np.int32))
    batches = [[pair], sequences(9), [sequences(4)[0], pair]]
    wanted = [kept.model.forward("dense", batch) for batch in batches]
    kept.keep()
    kept.warm(*batches)
    for batch, one in zip(batches * 2, wanted * 2, strict=True):
        close(kept.model.forward("dense", batch), one)
    assert len(kept.capture.made) == 3
    assert kept.memory.reported["differed"] == 0


@pytest.mark.parametrize("head", ["sparse", "words", "labels"])
def test_heads_run_on_the_batchs_own_rows(head: str, tmp_path: Path) -> None:
    """These heads read the vocabulary's logits, use recurrent layers over words, or return a label
    for each token.
    """
    texts = ["a text of some words", "another one", "x"]
    work: Work = EncodeWork(texts)
    if head == "words":
        directory, work = (
            make_reference(tmp_path, {}).directory,
            EntitiesWork(texts, labels=("person", "city")),
        )
    elif head == "labels":
        directory, work = (
            write_checkpoint("bert", tmp_path, head="token_classification", labels=("O", "B-X")),
            EntitiesWork(texts),
        )
    else:
        transformer = Transformer(
            str(write_checkpoint("bert", tmp_path / "base", head="masked_lm")),
            transformer_task="fill-mask",
        )
        SparseEncoder(modules=[transformer, SpladePooling()], device="cpu").save(
            str(tmp_path / "model")
        )
        directory = tmp_path / "model"
    kept = Kept(load(directory))
    prepared = kept.model.prepare(work)
    wanted = kept.model.forward(prepared.head, prepared.sequences)
    kept.keep()
    kept.warm(list(prepared.sequences), head=prepared.head)
    for _ in range(2):
        for got, one in zip(
            kept.model.forward(prepared.head, prepared.sequences), wanted, strict=True
        ):
            for a, b in zip(_arrays(got), _arrays(one), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    is_capturable = kept.model.backbones[0].encoder.is_graph_capturable
    assert kept.memory.reported == (
        {"captured": 1, "replayed": 2, "checked": 3} if is_capturable else {}
    )


def _arrays(output: Output) -> list[NDArray[np.float32] | NDArray[np.int32] | NDArray[np.int64]]:
    if isinstance(output, tuple):
        return [array for part in output for array in _arrays(part)]
    assert not isinstance(output, GeneratedIds)
    return [output.indices, output.values] if isinstance(output, SparseRow) else [output]


def test_two_heads_of_one_forward_share_its_graph(kept: Kept) -> None:
    backbone = kept.model.backbones[0]
    heads = {"dense": backbone.heads["dense"], "first": PooledHead(("cls",), ())}
    both = Kept(
        PackedModel(
            kept.model.card,
            (replace(backbone, heads=heads),),
            _NoProcessor(),
            TensorNames({}, (), {}),
            torch.device("cpu"),
        )
    )
    batch = sequences(4, 6)
    wanted = [kept.model.forward("dense", batch), both.model.forward("first", batch)]
    both.keep()
    both.warm(batch, head="dense+first")
    for _ in range(2):
        for one, own in zip(
            zip(*both.model.forward("dense+first", batch), strict=True), wanted, strict=True
        ):
            close(one, own)
    assert (len(both.capture.made), both.memory.reported["replayed"]) == (1, 2)


class _NoProcessor(Processor):
    def prepare(self, work: Work, check_cancelled: CancelCheck) -> Prepared:
        raise NotImplementedError

    def finish(
        self, prepared: Prepared, outputs: Sequence[Output], check_cancelled: CancelCheck
    ) -> Result:
        raise NotImplementedError


# What has no graph


def test_unsupported_batches_run_eagerly(tmp_path: Path) -> None:
    kept = Kept(
        load(write_checkpoint("qwen3", tmp_path, sentence=SentenceFiles(pooling="lasttoken")))
    )
    graphs = kept.keep()
    rows = InputRows(np.array([1], np.int32), np.zeros((1, 64), np.float32))
    one = sequences(8)[0]
    for batch in (
        [replace(one, seen=4)],
        [replace(one, before=ids(3))],
        [replace(one, rows=rows)],
        sequences(*[9] * 65),
    ):
        kept.warm(batch)
        backbone = kept.model.backbones[0]
        assert (
            graphs.forward(backbone, [replace(one, adapter="a"), one], [backbone.heads["dense"]])
            is None
        )
    assert (kept.capture.made, kept.memory.reserved) == ([], [])
    kept.warm([one])
    assert len(kept.capture.made) == 1


def test_encoder_that_launches_by_runs_has_none(tmp_path: Path) -> None:
    kept = Kept(load(write_checkpoint("deberta-v2", tmp_path, sentence=SentenceFiles())))
    kept.keep(is_hot=True)
    kept.warm(sequences(5, 7))
    assert kept.capture.made == []


def test_adapters_run_eagerly_next_to_graphs(tmp_path: Path) -> None:
    kept = Kept(load(write_checkpoint("bert", tmp_path / "base", sentence=SentenceFiles())))
    write_random_adapter("bert", tmp_path / "law", seed=3, r=4, target_modules=["query", "value"])
    kept.model.add_adapter("law", tmp_path / "law")
    plain = sequences(6)
    tuned = [replace(plain[0], adapter="law")]
    wanted = [kept.model.forward("dense", one) for one in (plain, tuned)]
    kept.keep()
    kept.warm(plain, tuned)
    for batch, one in zip((plain, tuned, plain), (*wanted, wanted[0]), strict=True):
        close(kept.model.forward("dense", batch), one)
    assert kept.memory.reported == {"captured": 1, "replayed": 2, "checked": 3}


# When a graph is captured, and its memory limit


def test_shape_is_captured_after_its_uses_and_checked_now_and_then(kept: Kept) -> None:
    kept.keep(after=3, check_every=4)
    for _ in range(4 + 9):
        kept.warm(sequences(5))
    assert kept.memory.reported == {"captured": 1, "replayed": 9, "checked": 1 + 2}
    assert kept.capture.made[0].replays == 1 + 9


def test_no_batch_waits_for_a_capture(kept: Kept) -> None:
    """Only `capture_graph`, which the device thread calls between batches, captures."""
    graphs = kept.keep(is_hot=True)
    for _ in range(20):
        kept.model.forward("dense", sequences(5))
    assert (kept.capture.made, kept.memory.reported) == ([], {})
    assert graphs.is_pending
    kept.model.capture_graph()
    assert len(kept.capture.made) == 1


def test_expected_shapes_are_captured_after_a_load_the_largest_first(kept: Kept) -> None:
    """The graph includes the head: it computes a query's vector alone."""
    wanted = kept.model.forward("dense", sequences(12))
    kept.keep(is_hot=True, check_every=1000)
    kept.settle()
    assert [len(one.buffer) for one in kept.capture.made] == [
        3 * tokens + count + 1 for tokens, count in HOT
    ]
    assert kept.memory.reported == {"captured": 4, "checked": 4}
    head = kept.model.backbones[0].heads["dense"]
    assert isinstance(head, PooledHead)
    close(kept.model.forward("dense", sequences(12)), wanted)
    query = kept.capture.made[-1]
    assert query.replays == 2
    assert query._output.shape == (2, 64), (
        "a vector for each of two sequences, not states of 16 tokens"
    )


def test_prompts_that_are_not_pooled_have_the_encoder_alone_in_their_graph(kept: Kept) -> None:
    batch = [replace(one, skip=2) for one in sequences(6, 9)]
    wanted = kept.model.forward("dense", batch)
    kept.keep()
    kept.warm(batch)
    close(kept.model.forward("dense", batch), wanted)
    assert kept.capture.made[0]._output.shape == (32, 64)
    assert kept.memory.reported == {"captured": 1, "replayed": 1, "checked": 2}


@torch.inference_mode()
def test_two_answers_of_one_graph_may_be_on_their_way(kept: Kept) -> None:
    """The next batch may be launched before the last one's answer is read."""
    wanted = [kept.model.forward("dense", sequences(length)) for length in (5, 6)]
    graphs = kept.keep(check_every=1000)
    kept.warm(sequences(5))
    backbone = kept.model.backbones[0]
    for length in (5, 5, 6, 5):  # the first one of a graph is checked
        kept.model.forward("dense", sequences(length))
    flying = [
        graphs.forward(backbone, sequences(length), [backbone.heads["dense"]]) for length in (5, 6)
    ]
    for one, vectors in zip(flying, wanted, strict=True):
        assert one is not None
        assert one.copy is not None
        np.testing.assert_allclose(one.copy.wait()[0], np.asarray(vectors[0]), rtol=1e-4, atol=1e-5)


def test_small_models_have_larger_graphs() -> None:
    assert (max_tokens(22_000_000), max_tokens(50_000_000)) == (2048, 512)
    assert smallest_bucket((50,) * 40, 512, 2048) == Bucket(2048, 64, 512)
    assert smallest_bucket((50,) * 40, 512) is None


def test_memory_is_reserved_before_the_capture_and_resized_to_its_use(kept: Kept) -> None:
    kept.keep()
    kept.warm(sequences(5))
    assert kept.memory.reserved == [ROUGH_BYTES + 16 * 10, 1000]
    kept.warm(sequences(30))
    assert kept.memory.reserved[2:] == [1000 + ROUGH_BYTES + 32 * 10, 2000]
    kept.model.drop_graphs()
    kept.model.drop_graphs()
    assert kept.memory.reserved[4:] == [0]
    assert kept.capture.kept == [], "all of them, as they share their memory"
    kept.warm(sequences(5))
    assert kept.memory.reported["captured"] == 3


def test_waiting_shapes_are_captured_the_largest_first(kept: Kept) -> None:
    kept.keep()
    kept.warm(sequences(5), sequences(100), sequences(30))
    assert [one.buffer.shape[0] for one in kept.capture.made] == [
        3 * 128 + 3,
        3 * 32 + 3,
        3 * 16 + 3,
    ]


def test_running_out_of_memory_in_a_capture_drops_the_models_graphs(kept: Kept) -> None:
    """They share a pool, which a failed capture leaves in no state to be shared; the device needs
    the memory anyway.
    """
    wanted = kept.model.forward("dense", sequences(5))
    graphs = kept.keep()
    kept.warm(sequences(5))
    kept.capture.error = torch.OutOfMemoryError("no")
    kept.warm(sequences(30))
    assert (kept.capture.kept, kept.memory.reserved[-1], graphs.is_off) == ([], 0, False)
    assert kept.memory.reported["refused"] == 1
    close(kept.model.forward("dense", sequences(5)), wanted)
    kept.capture.error = None
    kept.warm()
    close(kept.model.forward("dense", sequences(5)), wanted)
    assert kept.memory.reported["captured"] == 2


@pytest.mark.parametrize("why", ["limit", "larger than thought", "busy", "out of memory"])
def test_refused_capture_runs_eagerly_and_is_retried(kept: Kept, why: str) -> None:
    wanted = kept.model.forward("dense", sequences(5))
    kept.keep(after=1)
    if why == "limit":
        kept.memory.limit = ROUGH_BYTES
    elif why == "larger than thought":
        kept.capture.size = 2 * GIB
    elif why == "busy":
        kept.capture.is_busy = True
    else:
        kept.capture.error = torch.OutOfMemoryError("no")
    for _ in range(3):
        close(kept.model.forward("dense", sequences(5)), wanted)
        kept.settle()
    assert kept.memory.reported == {"refused": 1}
    assert kept.memory.reserved[-1:] in ([0], []), "nothing was granted, or all was given back"
    assert kept.capture.kept == []
    kept.memory.limit, kept.capture = GIB, FakeCapture()
    fresh = kept.keep(after=0)
    kept.warm(sequences(5))
    close(kept.model.forward("dense", sequences(5)), wanted)
    assert not fresh.is_off
    assert kept.memory.reported["captured"] == 1


def test_refused_while_a_load_runs_and_captured_after_it(kept: Kept) -> None:
    """Loads use the device's memory concurrently: no graph is captured then, and batches continue
    eagerly.
    """
    wanted = kept.model.forward("dense", sequences(12))
    kept.keep(is_hot=True)
    kept.capture.is_busy = True
    kept.settle()
    assert (kept.capture.made, kept.memory.reported) == ([], {"refused": 4})
    kept.capture.is_busy = False
    for _ in range(2):
        close(kept.model.forward("dense", sequences(12)), wanted)
        kept.settle()
    assert kept.memory.reported["captured"] == 1


def test_no_more_graphs_than_allowed(kept: Kept) -> None:
    kept.keep(most=2)
    for _ in range(3):
        for length in (5, 20, 40):
            kept.warm(sequences(length))
    assert len(kept.capture.made) == 2
    assert kept.memory.reported == {"captured": 2, "replayed": 4, "checked": 2 + 4, "refused": 3}


def test_graphs_that_are_no_longer_used_make_room_together(kept: Kept) -> None:
    kept.keep(most=2, check_every=10_000)
    kept.warm(sequences(5), sequences(20))
    for _ in range(STALE_FORWARDS):
        kept.model.forward("dense", sequences(5))
    kept.warm(sequences(40))
    assert len(kept.capture.made) == 3
    assert len(kept.capture.kept) == 1, "the two before share their memory"


# Faults


def test_answer_that_differs_is_not_given_and_ends_graphs(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave the buffer unfilled: the graph returns the previous batch."""
    wanted = [kept.model.forward("dense", sequences(length)) for length in (5, 6)]
    graphs = kept.keep(check_every=2)
    kept.warm(sequences(5))
    close(kept.model.forward("dense", sequences(5)), wanted[0])
    stale = kept.capture.made[0]._output
    monkeypatch.setattr(kept.capture.made[0], "replay", lambda fill: stale)
    close(kept.model.forward("dense", sequences(6)), wanted[1])
    assert graphs.is_off
    assert kept.memory.reported == {"captured": 1, "replayed": 2, "checked": 2, "differed": 1}
    assert "1 sequences and 6 tokens" in kept.memory.details[0]
    assert kept.memory.reserved[-1] == 0
    close(kept.model.forward("dense", sequences(6)), wanted[1])
    assert kept.memory.reported["replayed"] == 2


def test_graph_that_differs_at_its_capture_never_answers(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = kept.model.forward("dense", sequences(5))
    graphs = kept.keep(is_hot=True)
    monkeypatch.setattr(FakeCaptured, "replay", lambda self, fill: self._output.zero_())
    kept.settle()
    assert graphs.is_off
    assert kept.memory.reported == {"checked": 1, "differed": 1}
    assert (kept.capture.kept, kept.memory.reserved[-1]) == ([], 0)
    close(kept.model.forward("dense", sequences(5)), wanted)


def test_capture_that_fails_ends_graphs_and_not_the_batch(kept: Kept) -> None:
    wanted = kept.model.forward("dense", sequences(5))
    kept.capture.error = RuntimeError("operation not permitted when stream is capturing")
    graphs = kept.keep()
    for _ in range(2):
        close(kept.model.forward("dense", sequences(5)), wanted)
        kept.settle()
    assert graphs.is_off
    assert kept.memory.reported == {"failed": 1}
    assert "not permitted" in kept.memory.details[0]
    assert kept.memory.reserved[-1] == 0


def test_replay_that_fails_fails_the_batch_and_ends_graphs(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's ladder tries the batch again, then eagerly."""
    graphs = kept.keep()
    wanted = kept.model.forward("dense", sequences(5))
    kept.settle()

    def fails(fill: object) -> Tensor:
        raise RuntimeError("launch failed")

    monkeypatch.setattr(kept.capture.made[0], "replay", fails)
    with pytest.raises(RuntimeError, match="launch failed"):
        kept.model.forward("dense", sequences(5))
    assert graphs.is_off
    close(kept.model.forward("dense", sequences(5)), wanted)


def test_parked_model_has_no_graphs(kept: Kept) -> None:
    kept.keep()
    kept.warm(sequences(5))
    model = kept.model.park().resume()
    assert kept.memory.reserved[-1] == 0
    model.forward("dense", sequences(5))
    kept.settle()
    assert len(kept.capture.made) == 1


def test_distances() -> None:
    wanted = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    assert distance(wanted, wanted) == 0
    assert distance(wanted + torch.tensor([[0.0, 0.5], [0.0, 0.0]]), wanted) == pytest.approx(0.1)
    nan, inf = float("nan"), float("inf")
    assert distance(torch.tensor([[nan, 4.0], [1.0, 0.0]]), wanted) == inf
    assert (
        distance(torch.tensor([[5.0, 5.0], [1.0, 0.0]]), torch.tensor([[inf, 4.0], [1.0, 0.0]]))
        == 0
    ), "not finite eagerly either"
    assert distance(torch.zeros(1, 2), torch.zeros(1, 2)) == 0
    assert tolerance(torch.float32) < 4e-4 < tolerance(torch.bfloat16) < 0.1


# The device's other threads


def test_capture_is_alone_or_not_at_all() -> None:
    with sharing(), sharing(), alone() as is_alone:
        assert not is_alone
    begun, over = threading.Event(), threading.Event()

    def load() -> None:
        begun.set()
        with sharing():
            over.set()

    with alone() as is_alone:
        assert is_alone
        thread = threading.Thread(target=load)
        thread.start()
        begun.wait(120)
        assert not over.is_set()
        with alone() as again:
            assert not again
        assert not over.is_set()
    assert over.wait(120)
    thread.join(120)
    with alone() as is_alone:
        assert is_alone
