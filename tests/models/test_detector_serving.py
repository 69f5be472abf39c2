"""Directories of detectors load as models: a job of images and labels in, regions out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from libs.errors import InvalidInput, TaskNotSupported
from libs.image_size import PixelSize, read_image_size
from libs.models import PackedModel, load_model
from libs.models.interface.results import ExtractResult
from libs.models.interface.work import Part, RegionsWork
from libs.models.runtime.precision.samples import works
from services.router.admission.validation import image_price as image_prices
from services.worker.mesh.codec import to_card
from tests.parity.detection_models import LABELS, MODELS, write_checkpoint
from tests.parity.image_models import pictures


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    directory: Path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return load_model(directory, "org/detector", torch.device("cpu"), torch.float32)


def job(threshold: float | None = None) -> RegionsWork:
    images = pictures()[:3]
    parts = {number: (Part(data, f"items[{number}].image"),) for number, data in enumerate(images)}
    return RegionsWork([""] * len(images), LABELS, threshold, parts)


def found(model: PackedModel, work: RegionsWork) -> ExtractResult:
    prepared = model.prepare(work)
    result = model.finish(prepared, model.forward(prepared.head, prepared.sequences))
    assert isinstance(result, ExtractResult)
    return result


def test_regions_of_every_item(model: PackedModel) -> None:
    assert (model.card.tasks, model.card.inputs, model.card.kind) == (
        ("regions",),
        ("image",),
        "images",
    )
    loose, strict = found(model, job(0.0)), found(model, job(0.999))
    assert len(loose.items) == 3
    for item in loose.items:
        scores = [one.score for one in item.regions]
        assert scores == sorted(scores, reverse=True)
        assert {one.label for one in item.regions} == set(LABELS)
    assert sum(len(item.regions) for item in strict.items) < sum(
        len(item.regions) for item in loose.items
    )
    assert found(model, job()).items


def test_prices(model: PackedModel) -> None:
    images, prepared = model.card.images, model.prepare(job())
    assert images is not None
    assert prepared.image_tokens == prepared.tokens == sum(one.tokens for one in prepared.sequences)
    assert max(one.tokens for one in prepared.sequences) <= images.max_tokens
    if images.height > 1:
        assert all(one.tokens == images.max_tokens for one in prepared.sequences)


def test_job_for_a_self_test(model: PackedModel) -> None:
    for work in works(model.card, []):
        prepared = model.prepare(work)
        assert all(
            np.isfinite(np.asarray(one)).all()
            for one in model.forward(prepared.head, prepared.sequences)
        )


def test_items_other_than_images_are_refused(model: PackedModel) -> None:
    with pytest.raises(TaskNotSupported) as caught:
        model.prepare(RegionsWork(["a text"], LABELS))
    assert caught.value.field == "items[0].text"
    with pytest.raises(InvalidInput) as broken:
        model.prepare(RegionsWork([""], LABELS, parts={0: (Part(b"<svg/>", "items[0].image"),)}))
    assert broken.value.field == "items[0].image"


def test_routers_price_images_by_their_size(model: PackedModel) -> None:
    """Tokens are known from the header: for an image that keeps its proportions, up to a rounding
    of its sides.
    """
    reported = to_card(model.card).images
    for index, sequence in enumerate(model.prepare(job()).sequences):
        price = image_prices.image_tokens(read_image_size(pictures()[index]), reported)
        assert abs(price - sequence.tokens) <= 0.05 * sequence.tokens
    if model.card.family == "grounding-dino":
        thin, square = (
            image_prices.image_tokens(PixelSize(*size), reported)
            for size in ((30, 300), (300, 300))
        )
        assert thin < square <= reported.max_tokens


def test_memory_of_a_batch_is_measured(model: PackedModel) -> None:
    assert model.image_bytes(1 << 16) >= 1.5 * model.image_bytes(1 << 15) > 0
