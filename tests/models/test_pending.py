"""Batches of a real model that are launched and collected later, on the tests' asynchronous
device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers.sparse_encoder import SparseEncoder
from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer

from libs.kinds.gliner2.spans.head import StructureHead
from libs.models import (
    ClassifyWork,
    EncodeWork,
    EntitiesWork,
    GeneratedIds,
    Output,
    PackedModel,
    Prepared,
    SparseRow,
    Work,
)
from libs.models.interface.head import ReadsDevice
from libs.models.interface.pending import LaunchesBatches, PendingBatch
from libs.models.runtime.graphs.graphs import Graphs, Owner
from tests.models.conftest import load
from tests.parity.adapters import write_random_adapter
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.parity.gliner_models import make_reference
from tests.support.asynchronous import UNWRITTEN, FakeQueue
from tests.support.graphs import FakeCapture
from tests.support.waiting import wait_until

FIRST, SECOND = (
    ["a text of some words", "another one", "x"],
    ["two of", "these are", "a few more words here"],
)


def load_model(kind: str, directory: Path) -> tuple[PackedModel, list[Work]]:
    if kind == "entities":
        found = make_reference(directory, {}).directory
        return load(found), [
            EntitiesWork(texts, labels=("person", "city")) for texts in (FIRST, SECOND)
        ]
    if kind == "labels":
        found = write_checkpoint(
            "bert", directory, head="token_classification", labels=("O", "B-X")
        )
        return load(found), [EntitiesWork(texts) for texts in (FIRST, SECOND)]
    if kind == "classes":
        found = write_checkpoint(
            "bert", directory, head="sequence_classification", labels=("good", "bad")
        )
        return load(found), [ClassifyWork(texts) for texts in (FIRST, SECOND)]
    if kind == "sparse":
        transformer = Transformer(
            str(write_checkpoint("bert", directory / "base", head="masked_lm")),
            transformer_task="fill-mask",
        )
        SparseEncoder(modules=[transformer, SpladePooling()], device="cpu").save(
            str(directory / "model")
        )
        return load(directory / "model"), [EncodeWork(texts) for texts in (FIRST, SECOND)]
    found = write_checkpoint("bert", directory, sentence=SentenceFiles())
    return load(found), [EncodeWork(texts) for texts in (FIRST, SECOND)]


@pytest.fixture
def model(tmp_path: Path) -> PackedModel:
    return load_model("dense", tmp_path)[0]


def prepared(model: PackedModel, texts: Sequence[str]) -> Prepared:
    return model.prepare(EncodeWork(list(texts)))


def launched(model: PackedModel, job: Prepared) -> PendingBatch:
    assert isinstance(model, LaunchesBatches)
    assert model.can_launch(job.head)
    return model.launch(job.head, job.sequences)


def arrays(outputs: Sequence[Output]) -> list[NDArray[np.generic]]:
    found: list[NDArray[np.generic]] = []
    for output in outputs:
        if isinstance(output, tuple):
            found += arrays(output)
        else:
            assert not isinstance(output, GeneratedIds)
            found += [output.indices, output.values] if isinstance(output, SparseRow) else [output]
    return found


def assert_equal(got: Sequence[Output], wanted: Sequence[Output]) -> None:
    for one, other in zip(arrays(got), arrays(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["dense", "sparse", "labels", "classes", "entities"])
def test_two_batches_on_the_device_give_the_outputs_of_forwards(kind: str, tmp_path: Path) -> None:
    model, works = load_model(kind, tmp_path)
    jobs = [model.prepare(work) for work in works]
    wanted = [model.forward(job.head, job.sequences) for job in jobs]
    queue = model.queue = FakeQueue(is_manual=True)
    first, second = (launched(model, job) for job in jobs)
    assert queue.pending == 2
    assert not first.is_done()
    queue.end_one()
    assert first.is_done()
    assert_equal(first.collect(), wanted[0])
    queue.end_one()
    assert_equal(second.collect(), wanted[1])
    assert first.seconds > 0
    assert second.seconds > 0


def test_forward_of_an_asynchronous_device_is_a_launch_and_its_collection(
    model: PackedModel,
) -> None:
    job = prepared(model, FIRST)
    wanted = model.forward(job.head, job.sequences)
    queue = model.queue = FakeQueue()
    assert_equal(model.forward(job.head, job.sequences), wanted)
    assert len(queue.submissions) == 1


def test_outputs_do_not_lie_in_the_page_locked_copies(model: PackedModel) -> None:
    """Pinned buffers are few, and outputs may be kept for minutes."""
    queue = model.queue = FakeQueue()
    job = prepared(model, FIRST)
    outputs = launched(model, job).collect()
    kept = [np.array(output) for output in outputs]
    with torch.inference_mode():
        for copy in queue.submissions[0].copies:
            copy.view(torch.uint8).fill_(UNWRITTEN)
    assert_equal(outputs, kept)


def test_adapters_of_one_batch_are_not_those_of_the_next(tmp_path: Path) -> None:
    directory = write_checkpoint("bert", tmp_path / "base", sentence=SentenceFiles())
    model = load(directory)
    write_random_adapter("bert", tmp_path / "lora", seed=1, r=2, target_modules=["query"])
    model.add_adapter("org/lora", tmp_path / "lora")
    plain = prepared(model, FIRST)
    adapted = [replace(one, adapter="org/lora") for one in plain.sequences]
    wanted = [model.forward("dense", adapted), model.forward("dense", plain.sequences)]
    queue = model.queue = FakeQueue(is_manual=True)
    batches = [model.launch("dense", adapted), model.launch("dense", plain.sequences)]
    model.remove_adapter("org/lora")
    for batch, one in zip(batches, wanted, strict=True):
        queue.end_one()
        assert_equal(batch.collect(), one)


def test_adapter_is_loaded_once_the_weights_are_on_the_device(
    model: PackedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """DeBERTa's adapters are multiplied by weights, which a resume copies asynchronously."""
    steps: list[str] = []
    monkeypatch.setattr(
        model, "_arena", SimpleNamespace(wait=lambda: steps.append("wait for the copy"))
    )
    monkeypatch.setattr(
        model._adapters, "add", lambda name, directory: steps.append(f"load {name}")
    )
    model.add_adapter("org/lora", tmp_path)
    assert steps == ["wait for the copy", "load org/lora"]


def test_replays_of_one_graph_keep_their_answers_apart(model: PackedModel) -> None:
    jobs = [prepared(model, texts) for texts in (["one two"], ["three four"], ["five six"])]
    wanted = [model.forward(job.head, job.sequences) for job in jobs]
    capture = FakeCapture()
    model.keep_graphs(
        Graphs(capture, Owner(lambda size: True, lambda event, detail: None), most=4, after=0)
    )
    model.forward(jobs[0].head, jobs[0].sequences)
    while model.awaits_capture:
        model.capture_graph()
    queue = model.queue = FakeQueue(is_manual=True)
    first, second = (launched(model, job) for job in jobs[:2])
    for number, batch in enumerate((first, second)):
        queue.end_one()
        np.testing.assert_allclose(
            np.stack(arrays(batch.collect())),
            np.stack(arrays(wanted[number])),
            rtol=1e-4,
            atol=1e-5,
        )
    third = launched(model, jobs[2])
    queue.end_one()
    np.testing.assert_allclose(
        np.stack(arrays(third.collect())), np.stack(arrays(wanted[2])), rtol=1e-4, atol=1e-5
    )
    assert sum(graph.replays for graph in capture.made) >= 3


@pytest.mark.parametrize("leave", ["park", "drop_graphs"])
def test_model_does_not_leave_while_the_device_computes_with_it(
    leave: str, model: PackedModel
) -> None:
    job = prepared(model, FIRST)
    wanted = model.forward(job.head, job.sequences)
    model.keep_graphs(
        Graphs(FakeCapture(), Owner(lambda size: True, lambda event, detail: None), most=4)
    )
    queue = model.queue = FakeQueue(is_manual=True)
    batch = launched(model, job)
    leaving = threading.Thread(target=getattr(model, leave))
    leaving.start()
    wait_until(lambda: queue.submissions[0].is_awaited)
    assert leaving.is_alive()
    queue.end_one()
    leaving.join(120)
    assert not leaving.is_alive()
    assert_equal(batch.collect(), wanted)


def test_model_with_collected_batches_leaves_at_once(model: PackedModel) -> None:
    queue = model.queue = FakeQueue()
    launched(model, prepared(model, FIRST)).collect()
    queue.submissions[0].is_awaited = False
    model.park()
    assert not queue.submissions[0].is_awaited


def test_error_of_the_device_is_raised_where_the_batch_is_collected(model: PackedModel) -> None:
    queue = model.queue = FakeQueue(is_manual=True)
    batch = launched(model, prepared(model, FIRST))
    queue.end_one(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        batch.collect()


def test_memory_that_is_short_when_results_are_compacted_fails_the_batch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, works = load_model("sparse", tmp_path)
    jobs = [model.prepare(work) for work in works]
    wanted = [model.forward(job.head, job.sequences) for job in jobs]
    queue = model.queue = FakeQueue()
    first, second = (launched(model, job) for job in jobs)
    with monkeypatch.context() as patch:

        def fails(function: object) -> tuple[torch.Tensor, ...]:
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(queue, "read", fails)
        with pytest.raises(torch.OutOfMemoryError):
            first.collect()
    assert_equal(second.collect(), wanted[1])
    assert_equal(model.forward(jobs[0].head, jobs[0].sequences), wanted[0])


def test_heads_that_wait_for_the_device_are_not_launched(model: PackedModel) -> None:
    assert not model.can_launch("dense"), "a CPU computes while it launches"
    with pytest.raises(RuntimeError, match="asynchronous"):
        model.launch("dense", prepared(model, FIRST).sequences)
    assert StructureHead.reads_device
    model.queue = FakeQueue()
    assert model.can_launch("dense")
    head = model.heads["dense"]
    head.reads_device = True  # type: ignore[attr-defined]
    assert isinstance(head, ReadsDevice)
    assert not model.can_launch("dense")
