"""The measured rates of a model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libs.catalog.card import Card
from libs.models import (
    ClassifyWork,
    EncodeWork,
    InputSequence,
    Prepared,
    RelationsWork,
    ScoreWork,
    Work,
)
from services.worker.scheduling.meter import Meter, whole_texts


def test_large_batch_counts_for_more_than_a_small_one() -> None:
    meter = Meter()
    for _ in range(2):
        meter.add_forward(10, 0.01)
    meter.add_forward(1000, 0.1)
    assert meter.tokens_per_second == pytest.approx((9 + 1000) / (0.009 + 0.1))
    assert meter.expected_seconds(1009) == pytest.approx(0.109)


def test_speed_of_a_generative_model_is_that_of_many_steps_and_in_the_tokens_of_prices() -> None:
    meter = Meter()
    for _ in range(2):
        meter.add_steps(1, 0.01, 0, 1.0)
    for _ in range(98):
        meter.add_steps(1, 0.01, 0, 1.0)
    meter.add_steps(500, 0.1, 0, 1.0)  # a prompt
    assert meter.tokens_per_second < 600 / 1.0, "not that of the last few"
    computed = meter.expected_seconds(100)
    # An answer ended early: the work that it was priced at is done.
    meter.add_steps(1, 0.01, 2000, 1.0)
    assert meter.tokens_per_second > 2 * 100 / computed
    assert meter.expected_seconds(100) == pytest.approx(computed, rel=0.05)


def test_steps_of_a_search_by_beams_add_no_token_until_its_end() -> None:
    meter = Meter()
    for _ in range(3):
        meter.add_steps(0, 0.01, 0, 1.0)
    assert (meter.tokens_per_second, meter.expected_seconds(10), meter.min_seconds(10)) == (0, 0, 0)


def test_speed_of_generations_is_that_of_a_full_pool() -> None:
    meter = Meter()
    for _ in range(10):
        meter.add_steps(8, 0.01, 0, 8 / 64)
    assert meter.tokens_per_second == pytest.approx(64 / 0.01)
    assert meter.expected_seconds(8) == pytest.approx(0.01), "of the sequences that there are"
    assert meter.batch_tokens == 0, "the speed is not of that few tokens"


def test_ends_of_long_answers_are_no_peaks_of_the_speed() -> None:
    meter, speeds, price, generated = Meter(), [], 4096, 1000
    for _ in range(8):
        for step in range(generated):
            is_last = step == generated - 1
            meter.add_steps(1, 0.06, price - generated if is_last else 0, 1.0)
            speeds.append(meter.tokens_per_second)
    true = price / (generated * 0.06)
    assert max(speeds) < 1.3 * true
    assert min(speeds[3 * generated :]) > 0.7 * true


def test_first_pass_counts_only_until_the_second() -> None:
    meter = Meter()
    assert (meter.tokens_per_second, meter.batch_tokens) == (0.0, 0)
    meter.add_forward(10, 5.0)
    assert meter.tokens_per_second == pytest.approx(2.0)
    meter.add_forward(10, 0.01)
    assert meter.tokens_per_second == pytest.approx(1000.0)


def test_batch_size_of_the_measurement_is_reported() -> None:
    meter = Meter()
    for _ in range(3):
        meter.add_forward(8, 0.01)
    assert meter.batch_tokens == 8
    meter.add_forward(2000, 0.1)
    assert 1900 < meter.batch_tokens < 2000, "most tokens were in the large one"


def test_min_seconds_are_below_the_expectation_by_the_measured_error() -> None:
    steady, wild = Meter(), Meter()
    assert steady.min_seconds(100) == 0.0
    for number in range(40):
        steady.add_forward(100, 0.1)
        wild.add_forward(100, 0.11 if number % 2 else 0.09)
    assert steady.min_seconds(100) == pytest.approx(0.1)
    assert wild.min_seconds(100) == pytest.approx(0.8 * wild.expected_seconds(100), rel=0.05)
    for number in range(40):
        wild.add_forward(100, 0.3 if number % 2 else 0.01)
    assert wild.min_seconds(100) == pytest.approx(0.5 * wild.expected_seconds(100)), (
        "but half of it at least"
    )


CARD = Card(
    model="t/m",
    revision="r",
    family="f",
    kind="dense",
    tasks=("encode",),
    representations=("dense",),
    max_tokens=64,
)


def sequences(*lengths: int) -> list[InputSequence]:
    return [InputSequence(np.zeros(length, np.int32)) for length in lengths]


def learnt(work: Work, *lengths: int, card: Card = CARD, looked_up: int = 0) -> tuple[int, int]:
    return whole_texts(work, Prepared(work, "head", sequences(*lengths), looked_up=looked_up), card)


def test_truncated_texts_do_not_count_for_tokens_per_byte() -> None:
    meter = Meter()
    meter.add_texts(*learnt(EncodeWork(["x" * 40, "é" * 30]), 10, 20))
    assert meter.tokens_per_byte == pytest.approx(0.3)
    for _ in range(100):
        meter.add_texts(
            *learnt(EncodeWork(["x" * 1_000_000] * 6), *[64] * 6)
        )  # truncated to the model's maximum
        meter.add_texts(
            *learnt(EncodeWork(["x" * 1_000_000] * 6), *[32] * 6)
        )  # truncated further, as late-interaction queries are
        meter.add_texts(*learnt(EncodeWork(["x" * 100]), looked_up=20))
    assert meter.tokens_per_byte == pytest.approx(0.3)
    assert learnt(EncodeWork(["x" * 1_000_000, "x" * 40]), 64, 10) == (10, 40), (
        "the others of a job count"
    )
    assert learnt(EncodeWork(["x"], instruction="i" * 39), 20) == (20, 40), (
        "text that a request puts before a text counts as well"
    )


def test_query_and_label_tokens_are_not_counted_as_text() -> None:
    score = ScoreWork("q" * 30, ["d" * 10, "d" * 30], "i" * 10)
    assert learnt(score, 15, 20) == (35, 120), "pairs"
    assert learnt(score, 9, 5, 15) == (20, 40), "the query has a vector of its own"
    assert learnt(score, 5, 15, looked_up=9) == (20, 40)
    classify = ClassifyWork(["t" * 40, "t" * 40], ("l" * 4, "l" * 6), hypothesis="h" * 5)
    assert learnt(classify, 10, 10) == (20, 120), "labels before each text"
    assert learnt(classify, 10, 10, 5, 5) == (20, 80), "an embedding model"
    infers = replace(CARD, contradiction=0, labels=("contradiction", "entailment"))
    assert learnt(classify, 12, 13, 12, 13, card=infers) == (24, 100), "each text with each label"
    assert learnt(classify, 10, 10, card=replace(CARD, labels=("a", "b"))) == (20, 80), (
        "its own classes"
    )
    relations = RelationsWork(["t" * 40], ("in",), ("city",))
    assert learnt(relations, 14) == (14, 46)
    assert learnt(relations, 14, 14) == (0, 0), "sequences that are not those of the texts"
