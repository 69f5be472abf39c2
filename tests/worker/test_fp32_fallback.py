"""Outputs that are not finite: the recomputation in float32 on a separate thread, and a real
checkpoint that overflows in float16.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from libs.catalog.overrides import Overrides
from libs.models import EncodeResult, EncodeWork, InputSequence, Output, is_finite, load_model
from tests.models.restoring import restore
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.worker.fakes import (
    ENDLESS,
    SLOW,
    FakeLanes,
    FakeModel,
    encode_job,
    routers,
    until,
    vector,
    vectors,
)
from tests.worker.running import MODEL, RunningWorker, worker


class FakeFp32Model(FakeModel):
    """A model without ENDLESS: its outputs do not overflow."""

    @staticmethod
    def _vector(sequence: InputSequence) -> Output:
        return np.array([sequence.tokens, float(sequence.ids.sum())], dtype=np.float32)


async def loaded(bay: RunningWorker, lanes: FakeLanes) -> FakeModel:
    lanes.put(MODEL, encode_job("first", "first"))
    await until(lambda: "first" in lanes.answers)
    return bay.model


async def test_sequences_that_are_not_finite_are_recomputed_in_float32(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running) as bay:
        model = await loaded(bay, lanes)
        model.fp32_model = FakeFp32Model()
        lanes.put(
            MODEL, encode_job("odd", "fine", ENDLESS + "x", "good"), encode_job("even", "even")
        )
        await until(lambda: {"odd", "even"} <= lanes.answers.keys())
        assert vectors(lanes.answer_of("odd")) == [
            vector("fine"),
            vector(ENDLESS + "x"),
            vector("good"),
        ]
        assert vectors(lanes.answer_of("even")) == [vector("even")]
        assert model.fp32_model.batches == [[2]]
        # Neither the event loop's thread nor the device's.
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        assert [names[ident].partition("_")[0] for ident in model.widenings] == ["fp32"]


async def test_job_fails_if_float32_is_not_finite_either(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running) as bay:
        model = await loaded(bay, lanes)
        model.fp32_model = FakeModel()
        lanes.put(MODEL, encode_job("odd", ENDLESS), encode_job("even", "even"))
        await until(lambda: {"odd", "even"} <= lanes.answers.keys())
        assert "not finite" in lanes.answer_of("odd").failure.message
        assert vectors(lanes.answer_of("even")) == [vector("even")]


async def test_fallback_does_not_delay_other_jobs_and_stays_loaded_while_needed(
    tmp_path: Path,
) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running) as bay:
        model = await loaded(bay, lanes)
        fp32_model = model.fp32_model = FakeFp32Model()
        model.gate.set()
        lanes.put(MODEL, encode_job("slow", SLOW + ENDLESS), encode_job("odd", ENDLESS))
        try:
            await until(fp32_model.started.is_set)
            for number in range(5):
                lanes.put(MODEL, encode_job(f"even {number}", "even"))
                await until(lambda name=f"even {number}": name in lanes.answers)  # type: ignore[misc]
            assert not {"slow", "odd"} & lanes.answers.keys()
        finally:
            fp32_model.gate.set()
        await until(lambda: {"slow", "odd"} <= lanes.answers.keys())
        assert vectors(lanes.answer_of("odd")) == [vector(ENDLESS)]
        assert len(model.widenings) == 1
        lanes.put(MODEL, encode_job("later", ENDLESS))
        await until(lambda: "later" in lanes.answers)
        assert len(model.widenings) == 2


async def test_expired_job_is_not_recomputed(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running) as bay:
        model = await loaded(bay, lanes)
        fp32_model = model.fp32_model = FakeFp32Model()
        model.gate.set()
        lanes.put(MODEL, encode_job("slow", SLOW + ENDLESS))
        await until(fp32_model.started.is_set)
        lanes.put(MODEL, encode_job("late", ENDLESS, seconds=120.0))
        await until(lambda: [1] in model.batches and len(model.batches) >= 3)
        lanes.advance_clock(300.0)
        # Late jobs end before they reach the device once the worker knows the time.
        lanes.put(MODEL, encode_job("later", "a", seconds=120.0))
        await until(lambda: "later" in lanes.answers)
        fp32_model.gate.set()
        await until(lambda: "late" in lanes.answers)
        assert lanes.answer_of("late").failure.reason == "DEADLINE_PASSED"
        assert fp32_model.batches == [[2]]


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT with a feed-forward that overflows float16 (65,504) but not float32; LayerNorm
    makes it small again.
    """
    directory = write_checkpoint(
        "bert", tmp_path_factory.mktemp("loud") / "m", sentence=SentenceFiles()
    )
    state = load_file(directory / "model.safetensors")
    for name, tensor in state.items():
        if name.endswith(("intermediate.dense.weight", "layer.0.output.dense.weight")):
            state[name] = tensor * 300
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


CPU = torch.device("cpu")
WORK = EncodeWork(["a text that is embedded", "another"])


def test_fallback_of_a_real_model_equals_float32(loud: Path) -> None:
    overrides = Overrides(source="test.yaml:1", dtype="float16")
    half = load_model(loud, "test/loud", CPU, torch.float32, overrides)
    prepared = half.prepare(WORK)
    assert not all(is_finite(output) for output in half.forward(prepared.head, prepared.sequences))
    fp32_model = half.load_fp32_fallback()
    assert fp32_model is not None
    outputs = fp32_model.forward(prepared.head, prepared.sequences)
    assert all(is_finite(output) for output in outputs)
    whole = load_model(loud, "test/loud", CPU, torch.float32)
    expected = whole.forward(prepared.head, prepared.sequences)
    np.testing.assert_array_equal(np.stack(outputs), np.stack(expected))  # type: ignore[arg-type]
    answer = half.finish(prepared, outputs)
    assert isinstance(answer, EncodeResult)
    assert answer.dense is not None
    np.testing.assert_allclose(np.linalg.norm(restore(answer.dense), axis=1), 1.0, rtol=1e-5)


def test_float32_model_has_no_fallback(loud: Path) -> None:
    assert load_model(loud, "test/loud", CPU, torch.float32).load_fp32_fallback() is None
    low = load_model(loud, "test/loud", CPU, torch.bfloat16).load_fp32_fallback()
    assert low is not None
    assert low.load_fp32_fallback() is None
