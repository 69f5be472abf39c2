"""CUDA graphs on a GPU: a captured encoder against the eager one, the memory that a graph takes, and threads beside a capture."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from libs.models.graphs.buckets import Bucket
from libs.models.graphs.buffers import filled, whole_batch
from libs.models.graphs.cuda import CudaCapture, CudaGraph
from libs.models.graphs.graphs import distance, tolerance
from libs.models.layers.encoder import PackedEncoder
from libs.models.loaded.tiers import copying, sharing
from libs.models.packed import Packed
from libs.models.text.registry import build_encoder
from libs.models.weights import TensorFile
from libs.models.work import InputSequence
from tests.parity.checkpoints import write_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BUCKET = Bucket(64, 4, 64)
BATCHES = ((12,), (1, 4, 9), (60, 2, 1), (16, 16, 16, 16), (12,))


def encoder_of(directory: Path, dtype: torch.dtype) -> PackedEncoder:
    write_checkpoint("modernbert", directory, hidden=256, heads=4, layers=4)
    config = json.loads((directory / "config.json").read_text())
    return build_encoder(config, TensorFile.open(directory), dtype=dtype, device=torch.device("cuda"), head_tables={})[0]


def sequences(*lengths: int) -> list[InputSequence]:
    rng = np.random.default_rng(sum(lengths))
    return [InputSequence(rng.integers(5, 300, length, dtype=np.int32)) for length in lengths]


def forward_of(encoder: PackedEncoder, buffer: Tensor) -> Tensor:
    return encoder.forward(whole_batch(buffer, BUCKET, typed=False))


def captured(encoder: PackedEncoder) -> CudaGraph:
    graph = CudaCapture(torch.device("cuda")).capture(partial(forward_of, encoder), filled(BUCKET, sequences(5)))
    assert graph is not None
    return graph


@torch.inference_mode()
def assert_equal_to_eager(graph: CudaGraph, encoder: PackedEncoder) -> None:
    for lengths in BATCHES:
        batch = sequences(*lengths)
        hidden = graph.replay(filled(BUCKET, batch))[: sum(lengths)]
        wanted = encoder.forward(Packed.of([one.ids for one in batch], device="cuda"))
        assert distance(hidden, wanted) < tolerance(wanted.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_graph_answers_as_the_encoder_does(tmp_path: Path, dtype: torch.dtype) -> None:
    encoder = encoder_of(tmp_path, dtype)
    before = torch.cuda.current_stream()
    graph = captured(encoder)
    assert torch.cuda.current_stream() == before
    assert_equal_to_eager(graph, encoder)


@torch.inference_mode()
def test_replays_without_a_wait_between_them(tmp_path: Path) -> None:
    """Inputs are copied on a stream of their own: never before the replay before has read its own."""
    encoder = encoder_of(tmp_path, torch.float32)
    graph = captured(encoder)
    batches = [sequences(number % 50 + 1) for number in range(200)]
    found = [graph.replay(filled(BUCKET, batch))[: batch[0].tokens].clone() for batch in batches]
    for hidden, batch in zip(found, batches, strict=True):
        assert distance(hidden, encoder.forward(Packed.of([batch[0].ids], device="cuda"))) < tolerance(torch.float32)


@torch.inference_mode()
def test_a_dropped_graph_gives_its_memory_back(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, torch.bfloat16)
    captured(encoder)  # warms up all that stays
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = captured(encoder)
    assert 0 < torch.cuda.memory_reserved() - before <= graph.bytes
    del graph
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@torch.inference_mode()
def test_a_capture_that_fails_leaves_the_device_as_it_was(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, torch.bfloat16)
    before = torch.cuda.current_stream()

    def waits(buffer: Tensor) -> Tensor:
        hidden = forward_of(encoder, buffer)
        hidden.sum().item()  # a wait for the device, which no graph can have
        return hidden

    with pytest.raises(RuntimeError):
        CudaCapture(torch.device("cuda")).capture(waits, filled(BUCKET, sequences(5)))
    assert torch.cuda.current_stream() == before
    assert_equal_to_eager(captured(encoder), encoder)


def _pins() -> object:
    return torch.ones(1 << 20).pin_memory().to("cuda", non_blocking=True)


def _loads() -> object:
    with copying(torch.device("cuda")):
        return torch.ones(1 << 20).to("cuda")


def _trims() -> object:
    with sharing():
        torch.cuda.empty_cache()
    return None


@pytest.mark.parametrize("other", [_pins, _loads, _trims])
@torch.inference_mode()
def test_captures_beside_other_threads(tmp_path: Path, other: Callable[[], object]) -> None:
    """Adapters and answers use the device without asking; loads and trims wait for a capture, which does not begin beside them."""
    encoder = encoder_of(tmp_path, torch.bfloat16)
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
        capture = CudaCapture(torch.device("cuda"))
        graphs: list[CudaGraph] = []
        ends = time.monotonic() + 10
        while len(graphs) < 10 and time.monotonic() < ends:
            graph = capture.capture(partial(forward_of, encoder), filled(BUCKET, sequences(5)))
            graphs += [] if graph is None else [graph]
    finally:
        stop.set()
        thread.join(30)
    assert not errors
    assert graphs
    assert_equal_to_eager(graphs[-1], encoder)
