"""Sizes of a request, and the measured tokens per byte."""

from __future__ import annotations

import pytest
from shoal.v1 import models_pb2

from services.router.admission.validation.sizes import ImageSizes, Sizes, tokens_per_byte


def test_bytes_repeated_for_each_sequence_count_for_each_item() -> None:
    images = {1: ImageSizes(bytes=1000, tokens=5)}
    sizes = Sizes([10, 20], per_sequence_bytes=3, sequences_per_item=4, images=images)
    assert sizes.read == [22, 1032]


def test_bytes_of_a_job_do_not_count_for_items() -> None:
    assert Sizes([10, 20], per_job_bytes=500, per_job_texts=2).read == [10, 20]


@pytest.mark.parametrize(
    ("measured", "rate"), [(0.0, 0.25), (0.5, 0.5), (0.001, 1 / 16), (7.0, 1.0)]
)
def test_tokens_per_byte_are_measured_within_bounds(measured: float, rate: float) -> None:
    assert tokens_per_byte(models_pb2.ModelCard(tokens_per_byte=measured), 0.25) == rate


def test_model_without_a_card_has_the_default() -> None:
    assert tokens_per_byte(None, 0.25) == 0.25
