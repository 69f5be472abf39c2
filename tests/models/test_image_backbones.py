"""Image encoders as backbones of a served model: files in, vectors out, next to a text model."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from libs.errors import InvalidInput
from libs.models import PackedModel
from libs.models.images.loading import ImageModel, load_images
from tests.models.test_backbones import joined, vectors
from tests.parity.image_models import pictures, write_checkpoint


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    """Images of different sizes are sequences of different lengths."""
    directory: Path = tmp_path_factory.mktemp("images")
    write_checkpoint("dinov2", directory)
    return load_images(directory, dtype=torch.float32, device=torch.device("cpu"))


def make_png(size: tuple[int, int]) -> bytes:
    out = BytesIO()
    Image.new("L", size).save(out, "PNG")
    return out.getvalue()


def test_files_to_vectors(embedder: PackedModel, images: ImageModel) -> None:
    """An image has the same result alone and in any batch; its encoder is counted, its patches'
    weights one time.
    """
    backbone = images.backbones[0]
    model = joined(embedder, backbone)
    assert model.bytes == embedder.bytes + backbone.encoder.bytes
    assert model.probe() >= embedder.probe()
    sequences = [images.input.sequence(data, "items[0]") for data in pictures()]
    together = vectors(model.forward("image", sequences))
    backwards = vectors(model.forward("image", sequences[::-1]))[::-1]
    np.testing.assert_allclose(backwards, together, rtol=1e-5, atol=1e-5)
    for number, sequence in enumerate(sequences):
        np.testing.assert_allclose(
            vectors(model.forward("image", [sequence]))[0], together[number], rtol=1e-5, atol=1e-5
        )


def test_prepared_pixels_are_bytes(images: ImageModel) -> None:
    """Prepared images are uint8 pixels; the device computes numbers and patches."""
    rows = images.input.sequence(pictures()[1], "items[0]").rows
    assert rows is not None
    assert rows.values.dtype == np.uint8
    assert rows.values.shape == (80, 40, 3)


def test_errors_name_the_item(images: ImageModel) -> None:
    data = pictures()[0]
    for broken in (data[:40], data[: len(data) // 2], b"", b"<svg/>"):
        with pytest.raises(InvalidInput) as caught:
            images.input.sequence(broken, "items[7].image")
        assert caught.value.field == "items[7].image"


@pytest.mark.parametrize("size", [(1, 900), (900, 1)])
def test_more_patches_than_the_encoder_takes(images: ImageModel, size: tuple[int, int]) -> None:
    """Refused from the header alone: 40 x 36,000 pixels after resizing."""
    for check in (images.input.tokens, images.input.sequence):
        with pytest.raises(
            InvalidInput, match="has 25,711 patches; the model takes at most 16,384"
        ) as caught:
            check(make_png(size), "items[2].image")
        assert caught.value.field == "items[2].image"


def test_less_than_a_patch(images: ImageModel) -> None:
    """An image may be too small if it is not resized."""
    small = replace(images.input, processing=replace(images.input.processing, size=None))
    with pytest.raises(InvalidInput, match="less than one patch"):
        small.sequence(make_png((6, 90)), "items[0]")
    assert small.sequence(make_png((7, 90)), "items[0]").tokens == 1 + 12
