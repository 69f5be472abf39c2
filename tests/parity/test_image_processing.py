"""Resizing, cropping and normalising of images against transformers' `pil` image processors: equal
pixels, bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image

from libs.errors import InvalidInput, ModelBroken
from libs.models.images.decoding import decode
from libs.models.images.processing import ImageProcessing
from libs.models.layers.spec import Config
from tests.parity.image_models import Dinov3Processor

CLASSES = {
    "CLIPImageProcessor": transformers.CLIPImageProcessorPil,
    "SiglipImageProcessor": transformers.SiglipImageProcessorPil,
    "ViTImageProcessor": transformers.ViTImageProcessorPil,
    "BitImageProcessor": transformers.BitImageProcessorPil,
}
SETTINGS: tuple[Mapping[str, object], ...] = (
    {},
    {
        "size": {"shortest_edge": 37},
        "crop_size": {"height": 32, "width": 32},
        "do_center_crop": True,
    },
    {
        "size": {"shortest_edge": 20},
        "crop_size": {"height": 33, "width": 26},
        "do_center_crop": True,
    },
    {"size": {"height": 30, "width": 41}, "resample": 2},
    {"size": 24, "crop_size": 24, "do_center_crop": False},
    {
        "size": {"shortest_edge": 31},
        "resample": 1,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    },
    {
        "do_resize": False,
        "crop_size": {"height": 40, "width": 40},
        "do_center_crop": True,
        "rescale_factor": 1 / 127.5,
    },
    {"size": {"height": 16, "width": 16}, "do_normalize": False, "resample": 0},
    {"size": {"height": 16, "width": 16}, "do_rescale": False},
)
SIZES = ((1, 300), (300, 1), (30, 60), (61, 31), (7, 5), (224, 224), (201, 133), (40, 400))
MODES = ("RGB", "L", "RGBA", "LA", "P", "1", "CMYK")


def images() -> list[tuple[bytes, Image.Image]]:
    """Return noise of all sizes and modes, in which every pixel matters: files, and Pillow's images
    of them.
    """
    numbers = np.random.default_rng(1)
    found: list[tuple[bytes, Image.Image]] = []
    for number, (height, width) in enumerate((*SIZES, *SIZES[3:])):
        noise = Image.fromarray(numbers.integers(0, 256, (height, width, 4), np.uint8))
        mode = MODES[number % len(MODES)]
        data = BytesIO()
        noise.convert("RGB" if mode == "CMYK" else "RGBA").convert(mode).save(
            data, "TIFF" if mode == "CMYK" else "PNG"
        )
        found.append((data.getvalue(), Image.open(BytesIO(data.getvalue()))))
    return found


@pytest.mark.parametrize(
    "processor",
    [
        Dinov3Processor({"height": 224, "width": 224}),
        Dinov3Processor({"height": 30, "width": 41}),
        Dinov3Processor({"shortest_edge": 37}, {"height": 32, "width": 26}),
    ],
)
def test_float_pixels_are_within_rounding_of_torch(
    processor: Dinov3Processor, tmp_path: Path
) -> None:
    """DINOv3's are resized as float32. A difference of one colour in 255 would be 0.004."""
    processor.save_pretrained(tmp_path)
    ours = ImageProcessing.from_config(
        Config(json.loads((tmp_path / "preprocessor_config.json").read_text())), ""
    )
    for data, image in images():
        pixels = ours.apply(decode(data, "items[0]"), "items[0]")
        assert pixels.dtype == np.float32
        got = normalised(ours, pixels)
        # Pillow has a filter's centres and weights in float64, torch in float32, where those of
        # long rows are slightly inexact.
        for dtype, most in ((torch.float64, 2e-6), (torch.float32, 2e-4)):
            wanted = processor(image, dtype=dtype)["pixel_values"][0].numpy()
            np.testing.assert_allclose(got, wanted, rtol=0, atol=most)


def normalised(processing: ImageProcessing, pixels: NDArray[Any]) -> NDArray[np.float32]:
    values = (pixels.astype(np.float64) * processing.scale).astype(np.float32)
    mean, std = np.array(processing.mean, np.float32), np.array(processing.std, np.float32)
    return np.divide(values - mean, std, dtype=np.float32).transpose(2, 0, 1)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", CLASSES)
def test_pixels_equal_transformers(name: str, settings: Mapping[str, object]) -> None:
    theirs = CLASSES[name](**settings)
    ours = ImageProcessing.from_config(Config({"image_processor_type": name, **settings}), "")
    for data, image in images():
        pixels = decode(data, "items[0]")
        got = ours.apply(pixels, "items[0]")
        assert got.shape[:2] == ours.seen(pixels.shape[0], pixels.shape[1], "items[0]")
        raw = theirs(image, do_rescale=False, do_normalize=False, do_convert_rgb=True)[
            "pixel_values"
        ][0]
        assert raw.dtype == got.dtype == np.uint8
        np.testing.assert_array_equal(got, raw.transpose(1, 2, 0))
        np.testing.assert_array_equal(
            normalised(ours, got.astype(np.uint8, copy=False)),
            theirs(image, do_convert_rgb=True)["pixel_values"][0],
        )


@pytest.mark.parametrize("name", CLASSES)
def test_every_key_of_transformers_is_read(name: str, tmp_path: Path) -> None:
    """Every key that it writes is read, and defaults apply to missing ones."""
    CLASSES[name]().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert ImageProcessing.from_config(Config(written), "") == ImageProcessing.from_config(
        Config({}), name
    )
    assert written["image_processor_type"] == name


def test_old_names_and_forms_are_read() -> None:
    old = Config(
        {
            "feature_extractor_type": "CLIPFeatureExtractor",
            "size": 24,
            "crop_size": 20,
            "resample": 3,
        }
    )
    processing = ImageProcessing.from_config(old, "")
    assert (processing.size, processing.crop) == (24, (20, 20))
    assert processing == ImageProcessing.from_config(
        Config({"size": {"shortest_edge": 24}, "crop_size": {"height": 20, "width": 20}}),
        "CLIPImageProcessorFast",
    )
    assert ImageProcessing.from_config(Config({"size": 24}), "ViTImageProcessor").size == (24, 24)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"image_processor_type": "Owlv2ImageProcessor"},
            "image_processor_type is 'Owlv2ImageProcessor': supported are Bit",
        ),
        ({"size": {"longest_edge": 5}}, "size is .*: it needs height and width"),
        (
            {"size": {"shortest_edge": 10, "longest_edge": 50}},
            "size is .*: it needs height and width",
        ),
        ({"size": {"shortest_edge": 0}}, r"size\.shortest_edge is 0: a number of at least 1"),
        ({"size": {"shortest_edge": 100_000}}, r"size\.shortest_edge is 100000: at most 16,384"),
        ({"image_mean": [0.5]}, "image_mean is .*: a list of 3 numbers"),
        ({"image_std": [0.5, 0.0, 0.5]}, r"image_std\[1\] is 0\.0: a number from 1e-06 to 10000"),
        (
            {"image_std": [0.5, 0.5, 1e308]},
            r"image_std\[2\] is 1e\+308: a number from 1e-06 to 10000",
        ),
        (
            {"image_mean": [-1e308, 0.5, 0.5]},
            r"image_mean\[0\] is -1e\+308: a number from -10000 to 10000",
        ),
        ({"image_mean": [math.nan, 0.5, 0.5]}, r"image_mean\[0\] is nan: a finite number"),
        ({"rescale_factor": 1e308}, r"rescale_factor is 1e\+308: a number from 1e-06 to 1000"),
        ({"rescale_factor": 0}, "rescale_factor is 0: a number from 1e-06 to 1000"),
        ({"rescale_factor": -1}, "rescale_factor is -1: a number from 1e-06 to 1000"),
        ({"image_std": [0.5, "a", 0.5]}, r"image_std\[1\] is 'a': a number is needed"),
        ({"resample": 9}, "resample is 9"),
        ({"do_pad": True}, "do_pad is True"),
    ],
)
def test_unsupported_settings_are_refused(settings: Mapping[str, object], message: str) -> None:
    with pytest.raises(ModelBroken, match=f"^preprocessor_config.json: {message}"):
        ImageProcessing.from_config(
            Config(settings, file="preprocessor_config.json"), "CLIPImageProcessor"
        )


def test_images_too_thin_to_resize_are_refused() -> None:
    processing = ImageProcessing.from_config(Config({}), "CLIPImageProcessor")
    assert processing.seen(1, 900, "items[2]") == (224, 224)
    with pytest.raises(InvalidInput, match="too thin: 1 x 50,000,000 pixels") as caught:
        processing.seen(50_000_000, 1, "items[2]")
    assert caught.value.field == "items[2]"
