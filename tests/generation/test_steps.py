"""Decode steps on CUDA, in Triton's interpreter: the tokens that a loop generates, eagerly and from
a fake's graphs, and the inputs of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from libs.kernels import triton_here
from libs.kinds.generative import model as writers
from libs.models.generation import (
    DecodeLoop,
    DecodeSettings,
    LanguageModel,
    SequenceRequest,
    load_language_model,
)
from libs.models.generation.decoding import graphs as graphs_module
from libs.models.generation.decoding.graphs import StepGraphs
from libs.models.generation.decoding.rules import TokenRules
from libs.models.generation.decoding.steps import StepRow, StepShape
from libs.models.generation.model import _pool_pages
from libs.models.interface.source import LoadArguments
from libs.models.runtime.graphs.buckets import Uses
from libs.models.runtime.graphs.graphs import Event, Graphs, Owner
from tests.generation.checkpoints import prompts, write, written
from tests.generation.served import write as write_served
from tests.generation.test_loop import finished
from tests.kernels.ways import use_dense
from tests.support.graphs import FakeCapture

pytest.importorskip("triton")

from libs.kernels.attention import paged_triton

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="kernels are compiled, for the accelerator alone"
    ),
]

MAX_NEW_TOKENS = 4
SEQUENCES = (1, 2, 4)


@dataclass
class EventRecorder:
    """Records the events of an owner that grants at most `limit` bytes."""

    limit: int = 1 << 40
    reserved: int = 0
    events: list[Event] = field(default_factory=list)

    @property
    def owner(self) -> Owner:
        return Owner(self._reserve, lambda event, detail: self.events.append(event))

    def _reserve(self, size: int) -> bool:
        if size <= self.limit:
            self.reserved = size
        return size <= self.limit


def load(directory: Path) -> LanguageModel:
    return load_language_model(directory, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module", name="llama")
def llama_model(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[transformers.PreTrainedModel, Path]:
    directory = tmp_path_factory.mktemp("llama")
    return write("llama", directory), directory


@pytest.fixture(name="triton")
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    use_dense(monkeypatch)
    monkeypatch.setattr(triton_here, "_DEVICES", ("cpu",))
    # The interpreter takes about a millisecond for each program.
    monkeypatch.setattr(graphs_module, "SEQUENCES", SEQUENCES)
    monkeypatch.setattr(paged_triton, "splits", lambda sequences, kv_heads: 2)


def make_graphs(
    loop: DecodeLoop, reported: EventRecorder, capture: FakeCapture, *, check_every: int = 1 << 30
) -> StepGraphs:
    graphs = loop.keep_graphs(capture, reported.owner)
    assert graphs is not None
    graphs._check_every = check_every
    return graphs


@torch.inference_mode()
def capture_all(graphs: StepGraphs) -> None:
    while graphs.is_pending:
        graphs.capture_one()


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.usefixtures("triton")
def test_steps_generate_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """Eagerly, then from graphs: sequences of different lengths, of which one after the other
    joins.
    """
    model = write(name, tmp_path)
    language_model, inputs = load(tmp_path), prompts(3)
    wanted = written(model, inputs, MAX_NEW_TOKENS)
    requested = [SequenceRequest(ids, most=MAX_NEW_TOKENS) for ids in inputs]
    loop = DecodeLoop(language_model, 64, most_rows=40)
    assert [text for text, _ in finished(loop, requested, every=2)] == wanted
    reported, capture = EventRecorder(), FakeCapture()
    capture_all(make_graphs(loop, reported, capture))
    assert [text for text, _ in finished(loop, requested, every=2)] == wanted
    assert reported.events.count("replayed") == sum(each.replays for each in capture.made) > 0
    assert {each.buffer.shape[0] for each in capture.made if each.replays} <= {
        StepShape(count, loop._steps.width).size for count in (1, 2, 4) if loop._steps is not None
    }


@pytest.mark.usefixtures("triton")
def test_choices_that_need_scores_are_the_same_from_a_graph(
    llama: tuple[transformers.PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample, search by beams, and use log probabilities and rules next to a greedy sequence, with
    a bounded vocabulary.
    """
    monkeypatch.setattr(graphs_module, "SEQUENCES", (8,))
    language_model = load(llama[1])
    language_model.settings = replace(
        language_model.settings, vocabulary=language_model.vocabulary - 40
    )
    plain, own = prompts(1)[0], language_model.settings
    requested = [
        SequenceRequest(plain, most=MAX_NEW_TOKENS),
        SequenceRequest(
            plain, most=MAX_NEW_TOKENS, settings=replace(own, temperature=1.0), seed=b"seed"
        ),
        SequenceRequest(plain, most=MAX_NEW_TOKENS, settings=replace(own, beams=2)),
        SequenceRequest(plain, most=MAX_NEW_TOKENS, top_logprobs=2),
        SequenceRequest(plain, most=MAX_NEW_TOKENS, settings=replace(own, no_repeat_ngram=2)),
    ]
    loop = DecodeLoop(language_model, 64)
    eager = finished(loop, requested)
    capture = FakeCapture()
    capture_all(make_graphs(loop, EventRecorder(), capture))
    assert finished(loop, requested) == eager
    assert sum(each.replays for each in capture.made)
    assert all(max(text) < language_model.vocabulary - 40 for text, _ in eager)


@pytest.mark.usefixtures("triton")
def test_all_sizes_are_captured_at_a_load_the_largest_first(
    llama: tuple[transformers.PreTrainedModel, Path],
) -> None:
    reported, capture = EventRecorder(), FakeCapture(size=100)
    loop = DecodeLoop(load(llama[1]), 8)
    graphs = make_graphs(loop, reported, capture)
    capture_all(graphs)
    width = 0 if loop._steps is None else loop._steps.width
    assert [len(each.buffer) for each in capture.made] == [
        StepShape(count, width).size for count in reversed(SEQUENCES)
    ]
    assert reported.events == ["captured"] * len(SEQUENCES)
    assert reported.reserved == 100 * len(SEQUENCES)
    graphs.drop()
    assert (reported.reserved, capture.kept) == (0, [])


@pytest.mark.usefixtures("triton")
def test_without_memory_steps_are_eager_and_captured_later(
    llama: tuple[transformers.PreTrainedModel, Path],
) -> None:
    reported, capture = EventRecorder(limit=10), FakeCapture()
    loop = DecodeLoop(load(llama[1]), 8)
    graphs = make_graphs(loop, reported, capture)
    capture_all(graphs)
    assert (reported.events, capture.made) == (["refused"] * len(SEQUENCES), [])
    graphs._uses = Uses(after=1)
    finished(loop, [SequenceRequest(prompts(1)[0], most=MAX_NEW_TOKENS)])
    assert graphs._pending == {1}
    reported.limit = 1 << 40
    capture_all(graphs)
    assert reported.events[len(SEQUENCES) :] == ["captured"]
    assert not graphs.is_pending


@pytest.mark.usefixtures("triton")
def test_graph_that_differs_or_fails_is_the_last(
    llama: tuple[transformers.PreTrainedModel, Path],
) -> None:
    model, directory = llama
    inputs = prompts(1)
    wanted = written(model, inputs, MAX_NEW_TOKENS)
    reported, capture = EventRecorder(), FakeCapture()
    loop = DecodeLoop(load(directory), 8)
    graphs = make_graphs(loop, reported, capture, check_every=1)
    capture_all(graphs)
    assert [
        text for text, _ in finished(loop, [SequenceRequest(inputs[0], most=MAX_NEW_TOKENS)])
    ] == wanted
    assert reported.events.count("checked") == MAX_NEW_TOKENS - 1
    step = graphs._steps[1]
    run = step.run

    def wrong(buffer: torch.Tensor) -> torch.Tensor:
        tokens = run(buffer)
        assert step.scores is not None
        step.scores = -step.scores
        return tokens

    capture.made[-1]._forward = wrong
    assert [
        text for text, _ in finished(loop, [SequenceRequest(inputs[0], most=MAX_NEW_TOKENS)])
    ] == wanted
    assert reported.events[-1] == "differed"
    assert (graphs.is_off, graphs.is_pending, capture.kept, reported.reserved) == (
        True,
        False,
        [],
        0,
    )
    assert [
        text for text, _ in finished(loop, [SequenceRequest(inputs[0], most=MAX_NEW_TOKENS)])
    ] == wanted

    reported, capture = EventRecorder(), FakeCapture()
    capture.error = RuntimeError("operation not permitted when stream is capturing")
    graphs = make_graphs(loop, reported, capture)
    capture_all(graphs)
    assert (graphs.is_off, reported.events) == (True, ["failed"])
    assert [
        text for text, _ in finished(loop, [SequenceRequest(inputs[0], most=MAX_NEW_TOKENS)])
    ] == wanted


def test_inputs_overwrite_those_before_and_are_aligned() -> None:
    shape = StepShape(4, 3)
    inputs = np.full(shape.size, 7_000_000, np.int32)
    rows: Sequence[StepRow] = [StepRow(11, 39, 40, [5, 2]), StepRow(12, 2, 3, [9])]
    shape.fill(inputs, rows)
    batch, places = shape.batch(torch.from_numpy(inputs))
    assert batch.ids.tolist() == [11, 12, 0, 0]
    assert batch.positions.tolist() == [39, 2, 0, 0]
    assert places.every.layout.cu_queries.tolist() == [0, 1, 2, 3, 4]
    assert places.every.layout.cu_keys.tolist() == [0, 40, 43, 43, 43]
    assert places.every.numbers[0, :2].tolist() == [5, 2]
    assert places.every.numbers[1, :1].tolist() == [9]
    whole = torch.zeros(StepShape(64, 256).size, dtype=torch.int32)
    large, where = StepShape(64, 256).batch(whole)
    parts = (
        large.ids,
        large.positions,
        where.every.layout.cu_queries,
        where.every.layout.cu_keys,
        where.every.numbers,
    )
    assert all((part.data_ptr() - whole.data_ptr()) % 64 == 0 for part in parts)
    assert where.every.numbers.is_contiguous()


def test_on_a_cpu_nothing_changes(llama: tuple[transformers.PreTrainedModel, Path]) -> None:
    loop = DecodeLoop(load(llama[1]), 8)
    assert loop.keep_graphs(FakeCapture(), EventRecorder().owner) is None


@pytest.mark.usefixtures("triton")
def test_model_captures_between_batches_and_parks_without_graphs(tmp_path: Path) -> None:
    write_served("qwen3", tmp_path)
    model = writers.load(
        LoadArguments(tmp_path, "random/language_model", torch.device("cpu"), torch.float32)
    )
    reported, capture = EventRecorder(), FakeCapture()
    assert [model.awaits_capture] == [False]
    model.keep_graphs(Graphs(capture, reported.owner, most=8))
    assert ([model.awaits_capture], capture.made) == ([True], [])
    while model.awaits_capture:
        model.capture_graph()
    assert reported.events == ["captured"] * len(SEQUENCES)
    model.drop_graphs()
    assert (capture.kept, reported.reserved, model.awaits_capture) == ([], 0, False)
    model.keep_graphs(Graphs(capture, reported.owner, most=8))
    model.capture_graph()
    assert (len(capture.kept), model.awaits_capture) == (1, True)
    model.park()
    assert (capture.kept, reported.reserved, model.awaits_capture) == ([], 0, False)


def test_pool_of_an_accelerator_is_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-0.6B: 112 KiB a token, on a budget and on all that an 80 GiB device has, and a CPU."""
    properties = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    page = 32 * (112 << 10)
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert _pool_pages(cuda, page, 32 << 30) == (4 << 30) // page
    assert _pool_pages(cuda, page, 0) == (10 << 30) // page
    assert _pool_pages(cuda, page // 4, 0) == 131_072 // 32
    assert _pool_pages(cpu, page, 32 << 30) == (256 << 20) // page


def test_settings_with_rules_need_scores() -> None:
    assert TokenRules(DecodeSettings(vocabulary=5), 1, 9).is_plain
    assert not TokenRules(DecodeSettings(repetition_penalty=1.1), 1, 9).is_plain
