"""What a model's meter says of it."""

from __future__ import annotations

import pytest

from services.worker.meter import Meter


def test_a_large_batch_counts_for_more_than_a_small_one() -> None:
    meter = Meter()
    for _ in range(2):
        meter.add_forward(10, 0.01)
    meter.add_forward(1000, 0.1)
    assert meter.tokens_per_second == pytest.approx((9 + 1000) / (0.009 + 0.1))
    assert meter.expected_seconds(1009) == pytest.approx(0.109)


def test_the_first_pass_counts_only_until_there_is_another() -> None:
    meter = Meter()
    assert (meter.tokens_per_second, meter.batch_tokens) == (0.0, 0)
    meter.add_forward(10, 5.0)
    assert meter.tokens_per_second == pytest.approx(2.0)
    meter.add_forward(10, 0.01)
    assert meter.tokens_per_second == pytest.approx(1000.0)


def test_it_says_how_large_the_batches_were() -> None:
    meter = Meter()
    for _ in range(3):
        meter.add_forward(8, 0.01)
    assert meter.batch_tokens == 8
    meter.add_forward(2000, 0.1)
    assert 1900 < meter.batch_tokens < 2000, "most tokens were in the large one"


def test_the_least_it_will_take_is_as_far_below_what_is_expected_as_passes_were_off_it() -> None:
    steady, wild = Meter(), Meter()
    assert steady.least_seconds(100) == 0.0
    for number in range(40):
        steady.add_forward(100, 0.1)
        wild.add_forward(100, 0.11 if number % 2 else 0.09)
    assert steady.least_seconds(100) == pytest.approx(0.1)
    assert wild.least_seconds(100) == pytest.approx(0.8 * wild.expected_seconds(100), rel=0.05)
    for number in range(40):
        wild.add_forward(100, 0.3 if number % 2 else 0.01)
    assert wild.least_seconds(100) == pytest.approx(0.5 * wild.expected_seconds(100)), "but half of it at least"
