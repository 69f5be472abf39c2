"""The pictures that vision-language models see against transformers' `pil` image processors: the same pixels, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import transformers
from PIL import Image

from libs.errors import InvalidInput
from libs.models.images.vlm.tiles import Tiles
from libs.models.layers.spec import Config

SIZES = ((1, 300), (300, 1), (60, 30), (61, 133), (7, 5), (364, 364), (365, 364))
TILES: tuple[Mapping[str, object], ...] = (
    {},
    {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}},
    {"size": {"longest_edge": 90}, "max_image_size": {"longest_edge": 40}, "do_image_splitting": False},
    {"max_image_size": {"longest_edge": 33}, "do_resize": False},
    {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 128}, "resample": 3},
)


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height * 7 + width).integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", TILES)
def test_tiles_equal_transformers(settings: Mapping[str, object]) -> None:
    theirs = transformers.Idefics3ImageProcessorPil(**settings)
    ours = Tiles.of(Config(settings), 16, 4)
    sizes = (*SIZES, (300, 200)) if settings else ((3000, 2000), (1, 300))
    for size in sizes:
        image = noise(*size)
        found = theirs(image, do_rescale=False, do_normalize=False, return_row_col_info=True, input_data_format=None)
        raw = found["pixel_values"][0]
        got = ours.apply(np.asarray(image), "items[0]")
        laid = ours.lay(*size, "items[0]")
        assert len(got) == len(raw) == len(laid.rows)
        assert laid.patches == 16 * len(raw)
        (down,), (across,) = found["rows"][0], found["cols"][0]
        assert laid.text.count("\n<fake") == (down if down else 0)
        assert laid.text.count(f"_col_{across}>") == (down if across else 0)
        for mine, other in zip(got, raw, strict=True):
            np.testing.assert_array_equal(mine, other.transpose(1, 2, 0))


def test_images_that_make_no_tiles() -> None:
    few = Tiles.of(Config({"do_resize": False, "max_image_size": {"longest_edge": 10}}), 16, 4)
    with pytest.raises(InvalidInput, match="makes 10,000 tiles") as caught:
        few.lay(1000, 1000, "items[3]")
    assert caught.value.field == "items[3]"
