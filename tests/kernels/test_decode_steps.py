"""Decode steps on a GPU: the loop writes the same tokens with gathered keys, by the Triton kernel,
and from CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from libs.kernels.attention import paged_triton
from libs.models.generation import DecodeLoop, LanguageModel, SequenceRequest, load_language_model
from libs.models.generation.decoding.graphs import SEQUENCES
from libs.models.generation.decoding.rules import Ids
from libs.models.generation.decoding.steps import StepForward, StepRow, StepShape
from libs.models.runtime.graphs.cuda import CudaCapture
from libs.models.runtime.graphs.graphs import Event, Owner
from tests.generation.checkpoints import VOCABULARY, write
from tests.support.device import no_synchronization

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]

LENGTHS = (1, 31, 32, 33, 70, 5)
TOKENS = 40


@dataclass
class EventRecorder:
    events: list[tuple[Event, str]] = field(default_factory=list)

    @property
    def owner(self) -> Owner:
        return Owner(lambda size: True, lambda event, detail: self.events.append((event, detail)))

    def count(self, event: Event) -> int:
        return sum(one == event for one, _ in self.events)


def load(directory: Path, name: str, dtype: torch.dtype) -> LanguageModel:
    write(name, directory)
    return load_language_model(directory, torch.device("cuda"), dtype)


def prompts() -> list[Ids]:
    random = np.random.default_rng(0)
    return [random.integers(3, VOCABULARY, length).astype(np.int32) for length in LENGTHS]


def texts(loop: DecodeLoop, asked: Sequence[Ids]) -> list[list[int]]:
    """Sequences that end one after the other, so that steps have 1 to 6 of them."""
    added = [
        loop.add(SequenceRequest(ids, most=TOKENS - 5 * number)) for number, ids in enumerate(asked)
    ]
    found: dict[int, list[int]] = {id(each): [] for each in added}
    while loop.sequences:
        for written in loop.step():
            found[id(written.sequence)] += written.ids
    return [found[id(each)] for each in added]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_tokens_are_those_of_gathered_keys(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    language_model = load(tmp_path, name, torch.float32)
    loop = DecodeLoop(language_model, 64)
    by_kernel = texts(loop, prompts())
    reported, capture = EventRecorder(), CudaCapture(torch.device("cuda"))
    graphs = loop.keep_graphs(capture, reported.owner)
    assert graphs is not None
    with torch.inference_mode():
        while graphs.is_pending:
            graphs.capture_one()
    graphs._check_every = 7
    assert reported.events == [("captured", "")] * len(SEQUENCES)
    from_graphs = texts(loop, prompts())
    assert (reported.count("differed"), reported.count("failed")) == (0, 0)
    assert reported.count("replayed") > reported.count("checked") > 0
    monkeypatch.setattr(paged_triton, "takes", lambda heads, kv_heads, dim: False)
    assert by_kernel == texts(DecodeLoop(language_model, 64), prompts())
    assert from_graphs == by_kernel
    graphs.drop()
    torch.cuda.synchronize()
    assert capture.bytes == 0
    torch.cuda.empty_cache()


@torch.inference_mode()
def test_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    language_model = load(tmp_path, "qwen3", torch.bfloat16)
    pages = language_model.pages(8)
    steps = StepForward(language_model, pages)
    rows = [StepRow(5, 0, 1, [3]), StepRow(7, 0, 1, [6])]
    shape = StepShape(4, steps.width)
    inputs = np.zeros(shape.size, np.int32)
    shape.fill(inputs, rows)
    buffer = torch.from_numpy(inputs).cuda()
    wanted, scores = steps.run(shape, buffer)  # kernels are compiled and loaded
    with no_synchronization():
        tokens, again = steps.run(shape, buffer)
    assert torch.equal(tokens, wanted)
    assert torch.equal(again[:2], scores[:2])
    assert scores.isfinite().all()
