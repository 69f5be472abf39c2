"""Predicted times against those measured on an H200 (docs/gpu.md), and their part of a report."""

from __future__ import annotations

import pytest

from benchmarks.gpu import roofline
from benchmarks.gpu.roofline import TOLERANCE, Gpu
from benchmarks.models.families import PUBLISHED

SHAPES = {shape.name: shape for shape in PUBLISHED}
LENGTHS = [51] * (16_384 // 51)
NAME = "NVIDIA H200"


@pytest.fixture
def h200() -> Gpu:
    found = roofline.gpu_named(NAME)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "milliseconds"),
    [("BERT-large", 20.2), ("ModernBERT-base", 11.8), ("Qwen3-0.6B", 32.2)],
)
def test_batches_took_as_long_as_predicted(name: str, milliseconds: float, h200: Gpu) -> None:
    """The time of the busy kernels of a batch."""
    predicted = roofline.batch_seconds(h200, SHAPES[name], LENGTHS) * 1e3
    assert predicted == pytest.approx(milliseconds, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "queries", "milliseconds"),
    [("ModernBERT-base", 1, 0.90), ("MiniLM-L6", 1, 0.30), ("MiniLM-L6", 8, 0.34)],
)  # fmt: skip
def test_queries_took_as_long_as_predicted(
    name: str, queries: int, milliseconds: float, h200: Gpu
) -> None:
    """One model is slower in larger batches than its kernels explain: 1.60 ms for 32 queries of
    ModernBERT-base, 0.96 predicted.
    """
    predicted = roofline.query_seconds(h200, SHAPES[name], 12, queries) * 1e3
    assert predicted == pytest.approx(milliseconds, rel=TOLERANCE)


def test_share_of_the_peak(h200: Gpu) -> None:
    assert roofline.mfu(h200, SHAPES["BERT-large"], LENGTHS, 989e12) == pytest.approx(0.5, abs=0.01)


def test_steps_read_weights_and_keys(h200: Gpu) -> None:
    shape = SHAPES["Qwen3-0.6B"]
    one, many, long = (
        roofline.step_seconds(h200, shape, count, keys)
        for count, keys in ((1, 128), (64, 128), (64, 2048))
    )
    assert one < many < long
    read = 64 * (2048 - 128) * 28 * 2 * 1024 * 2 / h200.memory
    assert long - many == pytest.approx(read, rel=TOLERANCE)


def test_swap_is_a_copy_of_the_weights(h200: Gpu) -> None:
    weights = roofline.weights_bytes(SHAPES["BERT-large"])
    assert weights == pytest.approx(0.61e9, rel=0.02)
    assert roofline.swap_seconds(h200, weights) == weights / h200.host_copy


def test_measurements_far_from_predictions_are_named() -> None:
    row = roofline.compared({"what": "x", "a_ms": 1.1, "b_ms": 2.0}, {"a_ms": 1.0, "b_ms": 1.0})
    assert (row["predicted_a_ms"], row["unexpected"]) == (1.0, ["b_ms"])
    assert roofline.gpu_named("NVIDIA GeForce") is None
