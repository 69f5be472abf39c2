"""CUDA graphs on a GPU: a captured encoder against the eager one, a graph's memory, and threads
during a capture.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from libs.models import PackedModel, load_model
from libs.models.interface.packed import Packed
from libs.models.interface.sequences import InputSequence
from libs.models.layers.encoder import PackedEncoder
from libs.models.runtime.graphs.buckets import Bucket
from libs.models.runtime.graphs.buffers import fill, filled, whole_batch
from libs.models.runtime.graphs.cuda import CudaCapture, CudaCopy, CudaGraph
from libs.models.runtime.graphs.graphs import Event, Graphs, Owner
from libs.models.runtime.graphs.shapes import distance, tolerance
from libs.models.runtime.loaded.tiers import copying, sharing
from libs.models.text.registry import build_encoder
from libs.models.weights import TensorFile
from tests.parity.checkpoints import Pooling, SentenceFiles, write_checkpoint
from tests.support.device import no_synchronization

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DEVICE = torch.device("cuda")
BUCKET = Bucket(64, 4, 64)
BATCHES = ((12,), (1, 4, 9), (60, 2, 1), (16, 16, 16, 16), (12,))


def load_encoder(directory: Path, dtype: torch.dtype) -> PackedEncoder:
    write_checkpoint("modernbert", directory, hidden=256, heads=4, layers=4)
    config = json.loads((directory / "config.json").read_text())
    return build_encoder(
        config, TensorFile.open(directory), dtype=dtype, device=DEVICE, head_tables={}
    )[0]


def sequences(*lengths: int) -> list[InputSequence]:
    rng = np.random.default_rng(sum(lengths))
    return [InputSequence(rng.integers(5, 300, length, dtype=np.int32)) for length in lengths]


def run_forward(encoder: PackedEncoder, buffer: Tensor, bucket: Bucket = BUCKET) -> Tensor:
    return encoder.forward(whole_batch(buffer, bucket, typed=False))


def build_model(directory: Path, pooling: Pooling) -> PackedModel:
    write_checkpoint(
        "modernbert",
        directory,
        hidden=256,
        heads=4,
        layers=4,
        sentence=SentenceFiles(pooling=pooling),
    )
    return load_model(directory, "org/graphed", DEVICE, torch.bfloat16)


@dataclass
class Memory:
    """An owner of graphs that grants all memory. `bytes`: the last reservation."""

    reported: Counter[Event] = field(default_factory=Counter)
    bytes: int = 0

    def graphs(self, *, check_every: int) -> Graphs:
        return Graphs(
            CudaCapture(DEVICE), Owner(self._reserve, self._report), most=8, check_every=check_every
        )

    def _reserve(self, size: int) -> bool:
        self.bytes = size
        return True

    def _report(self, event: Event, detail: str) -> None:
        self.reported[event] += 1


def captured(
    encoder: PackedEncoder, capture: CudaCapture | None = None, bucket: Bucket = BUCKET
) -> CudaGraph:
    forward = partial(run_forward, encoder, bucket=bucket)
    graph = (capture or CudaCapture(DEVICE)).capture(forward, filled(bucket, sequences(5)))
    assert graph is not None
    return graph


def replayed(graph: CudaGraph, batch: list[InputSequence], bucket: Bucket = BUCKET) -> Tensor:
    return graph.replay(partial(fill, bucket=bucket, sequences=batch))[
        : sum(one.tokens for one in batch)
    ]


def assert_equal_to_eager(
    graph: CudaGraph, encoder: PackedEncoder, bucket: Bucket = BUCKET
) -> None:
    for lengths in BATCHES:
        batch = sequences(*lengths)
        hidden = replayed(graph, batch, bucket)
        wanted = encoder.forward(Packed.from_sequences([one.ids for one in batch], device="cuda"))
        assert distance(hidden, wanted) < tolerance(wanted.dtype)


def waits(encoder: PackedEncoder, buffer: Tensor) -> Tensor:
    hidden = run_forward(encoder, buffer)
    hidden.sum().item()  # a wait for the device, which no graph can have
    return hidden


def raises(encoder: PackedEncoder, buffer: Tensor) -> Tensor:
    hidden = run_forward(encoder, buffer)
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("within the capture")
    return hidden


def lacks_memory(encoder: PackedEncoder, buffer: Tensor) -> Tensor:
    hidden = run_forward(encoder, buffer)
    if torch.cuda.is_current_stream_capturing():
        torch.empty(1 << 42, dtype=torch.uint8, device=buffer.device)
    return hidden


FAILURES: tuple[Callable[[PackedEncoder, Tensor], Tensor], ...] = (waits, raises, lacks_memory)


def fail(
    encoder: PackedEncoder, forward: Callable[[PackedEncoder, Tensor], Tensor], capture: CudaCapture
) -> None:
    with pytest.raises((RuntimeError, ValueError)):  # torch.OutOfMemoryError is a RuntimeError
        capture.capture(partial(forward, encoder), filled(BUCKET, sequences(5)))


# Capture and replay


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_graph_answers_as_the_encoder_does(tmp_path: Path, dtype: torch.dtype) -> None:
    encoder = load_encoder(tmp_path, dtype)
    before = torch.cuda.current_stream()
    graph = captured(encoder)
    assert torch.cuda.current_stream() == before
    assert_equal_to_eager(graph, encoder)


@torch.inference_mode()
def test_graphs_of_one_pool_answer_in_any_order(tmp_path: Path) -> None:
    """They share the memory of their activations."""
    encoder, capture = load_encoder(tmp_path, torch.bfloat16), CudaCapture(DEVICE)
    buckets = [Bucket(tokens, 8, min(tokens, 512)) for tokens in (2048, 1024, 512, 128)]
    graphs = [captured(encoder, capture, bucket) for bucket in buckets]
    for number in (3, 0, 2, 1, 0, 3):
        assert_equal_to_eager(graphs[number], encoder, buckets[number])


@torch.inference_mode()
def test_replays_without_a_wait_between_them(tmp_path: Path) -> None:
    """Inputs are copied on a separate stream, but never before the previous replay has read its
    inputs.
    """
    encoder = load_encoder(tmp_path, torch.float32)
    graph = captured(encoder)
    batches = [sequences(number % 50 + 1) for number in range(200)]
    found = [replayed(graph, batch).clone() for batch in batches]
    for hidden, batch in zip(found, batches, strict=True):
        assert distance(
            hidden, encoder.forward(Packed.from_sequences([batch[0].ids], device="cuda"))
        ) < tolerance(torch.float32)


@torch.inference_mode()
def test_two_answers_may_be_on_their_way_to_the_host(tmp_path: Path) -> None:
    graph = captured(load_encoder(tmp_path, torch.float32))
    graph.start_copy().wait()
    batches = [sequences(number + 1) for number in range(20)]
    wanted = [replayed(graph, batch).float().cpu() for batch in batches]
    pending: list[CudaCopy] = []
    found = []
    for batch in batches:
        replayed(graph, batch)
        pending.append(graph.start_copy())
        if len(pending) == 2:
            found.append(pending.pop(0).wait())
    found.append(pending.pop().wait())
    for got, one in zip(found, wanted, strict=True):
        assert torch.equal(torch.from_numpy(got)[: len(one)].float(), one)


@torch.inference_mode()
def test_replay_and_its_copy_do_not_wait_for_the_device(tmp_path: Path) -> None:
    graph = captured(load_encoder(tmp_path, torch.float32))
    replayed(graph, sequences(5))
    graph.start_copy().wait()
    with no_synchronization():
        replayed(graph, sequences(9))
        copy = graph.start_copy()
    assert np.isfinite(copy.wait()).all()


@pytest.mark.parametrize(
    "pooling", ["mean_tokens", "cls_token", "lasttoken", "weightedmean_tokens"]
)
def test_vectors_of_a_model_are_computed_by_its_graphs(tmp_path: Path, pooling: Pooling) -> None:
    """The whole way: expected shapes are captured after the load, with the head, and checked."""
    model = build_model(tmp_path, pooling)
    batches = [
        sequences(12),
        sequences(20),
        sequences(16, 20, 3),
    ]  # of the buckets that are captured after a load
    wanted = [model.forward("dense", batch) for batch in batches]
    memory = Memory()
    model.keep_graphs(memory.graphs(check_every=2))
    while model.awaits_capture:
        model.capture_graph()
    assert memory.reported["captured"] == 4
    for _ in range(4):
        for batch, vectors in zip(batches, wanted, strict=True):
            for got, one in zip(model.forward("dense", batch), vectors, strict=True):
                assert distance(torch.tensor(got)[None], torch.tensor(one)[None]) < tolerance(
                    torch.bfloat16
                )
    assert memory.reported["replayed"] == 12
    assert (memory.reported["failed"], memory.reported["differed"]) == (0, 0)
    model.park().resume()
    assert memory.bytes == 0


# Memory


@torch.inference_mode()
def test_dropped_graphs_give_their_memory_back(tmp_path: Path) -> None:
    encoder = load_encoder(tmp_path, torch.bfloat16)
    warm = CudaCapture(DEVICE)
    kept = [captured(encoder, warm) for _ in range(3)]  # warms up all that stays
    warm.drop()
    del warm, kept
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    capture = CudaCapture(DEVICE)
    graphs = [captured(encoder, capture) for _ in range(3)]
    assert 0 < torch.cuda.memory_reserved() - before <= capture.bytes
    capture.drop()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    assert all(graph.is_dropped for graph in graphs)


@torch.inference_mode()
def test_forgotten_capture_gives_its_memory_back(tmp_path: Path) -> None:
    """Delete the graphs of a model without dropping them first."""
    encoder = load_encoder(tmp_path, torch.bfloat16)
    captured(encoder)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    capture = CudaCapture(DEVICE)
    graph = captured(encoder, capture)
    del graph, capture
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@torch.inference_mode()
def test_smaller_graphs_fit_into_the_memory_of_the_largest(tmp_path: Path) -> None:
    encoder, capture = load_encoder(tmp_path, torch.bfloat16), CudaCapture(DEVICE)
    largest = captured(encoder, capture, Bucket(2048, 8, 512))
    others = [captured(encoder, capture, Bucket(tokens, 8, tokens)) for tokens in (512, 128, 64)]
    assert sum(graph.bytes for graph in others) < largest.bytes


@torch.inference_mode()
def test_graph_dropped_alone_leaves_the_others_usable(tmp_path: Path) -> None:
    encoder, capture = load_encoder(tmp_path, torch.bfloat16), CudaCapture(DEVICE)
    first, second = (captured(encoder, capture) for _ in range(2))
    first.drop()
    torch.cuda.empty_cache()
    assert_equal_to_eager(second, encoder)
    assert_equal_to_eager(captured(encoder, capture), encoder)


# Failures


@pytest.mark.parametrize("forward", FAILURES)
@torch.inference_mode()
def test_capture_that_fails_leaves_the_device_as_it_was(
    tmp_path: Path, forward: Callable[[PackedEncoder, Tensor], Tensor]
) -> None:
    encoder, capture = load_encoder(tmp_path, torch.bfloat16), CudaCapture(DEVICE)
    before = torch.cuda.current_stream()
    captured(encoder, capture)
    fail(encoder, forward, capture)
    assert torch.cuda.current_stream() == before
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # fails for as long as torch believes that a capture is under way
    assert torch.isfinite(torch.randn(8, device="cuda")).all()  # as does the generator
    assert_equal_to_eager(captured(encoder, capture), encoder)


@torch.inference_mode()
def test_failed_captures_keep_no_memory(tmp_path: Path) -> None:
    encoder, capture = load_encoder(tmp_path, torch.bfloat16), CudaCapture(DEVICE)
    reserved = []
    for forward in FAILURES * 3:
        fail(encoder, forward, capture)
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= reserved[2]


@torch.inference_mode()
def test_failed_capture_harms_no_other_models_graphs(tmp_path: Path) -> None:
    encoder = load_encoder(tmp_path, torch.bfloat16)
    other = captured(encoder)
    for forward in FAILURES:
        fail(encoder, forward, CudaCapture(DEVICE))
    torch.cuda.empty_cache()
    assert_equal_to_eager(other, encoder)


# Other threads


def _pins() -> object:
    return torch.ones(1 << 20).pin_memory().to("cuda", non_blocking=True)


def _loads() -> object:
    with copying(DEVICE):
        return torch.ones(1 << 20).to("cuda")


def _trims() -> object:
    with sharing():
        torch.cuda.empty_cache()
    return None


def _recovers() -> object:
    with sharing():
        torch.cuda.synchronize()
    return None


@pytest.mark.parametrize("other", [_pins, _loads, _trims, _recovers])
@torch.inference_mode()
def test_captures_next_to_other_threads(tmp_path: Path, other: Callable[[], object]) -> None:
    """Adapters and outputs use the device without a lock; loads and trims wait for a capture, which
    does not start during them.
    """
    encoder = load_encoder(tmp_path, torch.bfloat16)
    stop, errors = threading.Event(), []

    def work() -> None:
        while not stop.wait(0.001):
            try:
                other()
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        capture = CudaCapture(DEVICE)
        graphs: list[CudaGraph] = []
        ends = time.monotonic() + 10
        while len(graphs) < 10 and time.monotonic() < ends:
            graph = capture.capture(partial(run_forward, encoder), filled(BUCKET, sequences(5)))
            graphs += [] if graph is None else [graph]
    finally:
        stop.set()
        thread.join(30)
    assert not errors
    assert graphs
    assert_equal_to_eager(graphs[-1], encoder)
