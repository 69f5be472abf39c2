"""Image processing of vision-language models against transformers' `pil` image processors: equal
pixels, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import transformers
from PIL import Image

from libs.errors import InvalidInput
from libs.models.images.patches import PatchSpec
from libs.models.images.vlm.smart import SmartResize
from libs.models.images.vlm.tiles import Tiles
from libs.models.layers.spec import Config

SIZES = ((1, 300), (300, 1), (60, 30), (61, 133), (7, 5), (364, 364), (365, 364))
TILES: tuple[Mapping[str, object], ...] = (
    {},
    {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}},
    {
        "size": {"longest_edge": 90},
        "max_image_size": {"longest_edge": 40},
        "do_image_splitting": False,
    },
    {"max_image_size": {"longest_edge": 33}, "do_resize": False},
    {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 128}, "resample": 3},
)


def noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(height * 7 + width).integers(0, 256, (height, width, 3), np.uint8)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", TILES)
def test_tiles_equal_transformers(settings: Mapping[str, object]) -> None:
    theirs = transformers.Idefics3ImageProcessorPil(**settings)
    ours = Tiles.from_config(Config(settings), 16, 4)
    sizes = (*SIZES, (300, 200)) if settings else ((3000, 2000), (1, 300))
    for size in sizes:
        image = noise(*size)
        found = theirs(
            image,
            do_rescale=False,
            do_normalize=False,
            return_row_col_info=True,
            input_data_format=None,
        )
        raw = found["pixel_values"][0]
        got = ours.apply(np.asarray(image), "items[0]")
        tokens = ours.tokens_of_size(*size, "items[0]")
        assert len(got) == len(raw) == len(tokens.rows)
        assert tokens.patches == 16 * len(raw)
        (down,), (across,) = found["rows"][0], found["cols"][0]
        assert tokens.text.count("\n<fake") == (down if down else 0)
        assert tokens.text.count(f"_col_{across}>") == (down if across else 0)
        for mine, other in zip(got, raw, strict=True):
            np.testing.assert_array_equal(mine, other.transpose(1, 2, 0))


SMART: tuple[Mapping[str, object], ...] = (
    {},
    {"size": {"shortest_edge": 16 * 64, "longest_edge": 200 * 64}, "patch_size": 4},
    {
        "min_pixels": 3000,
        "max_pixels": 40_000,
        "patch_size": 16,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", SMART)
def test_squares_equal_transformers(settings: Mapping[str, object]) -> None:
    """The patches are compared in order, for the two frames of which the model sees one."""
    theirs = transformers.Qwen2VLImageProcessorPil(**settings)
    side = int(str(settings.get("patch_size", 14)))
    spec = PatchSpec(8, side, (0, 0), class_token=False, resampled=True)
    ours = SmartResize.from_config(Config(settings), spec, 2, plain=False)
    for size in (
        (60, 30),
        (61, 133),
        (7, 5),
        (150, 1),
        (3000, 2000) if not settings else (300, 200),
    ):
        image = noise(*size)
        found = theirs(image, do_rescale=False, do_normalize=False)
        (got,) = ours.apply(np.asarray(image), "items[0]")
        tokens = ours.tokens_of_size(*size, "items[0]")
        rows, columns = got.shape[0] // side, got.shape[1] // side
        assert [1, rows, columns] == found["image_grid_thw"][0].tolist()
        assert tokens.patches == rows * columns == 4 * tokens.rows[0]
        assert tokens.grid == (rows // 2, columns // 2)
        squares = got.reshape(rows // 2, 2, side, columns // 2, 2, side, 3).transpose(
            0, 3, 1, 4, 6, 2, 5
        )
        wanted = found["pixel_values"].reshape(-1, 3, 2, side, side)
        np.testing.assert_array_equal(squares.reshape(-1, 3, side, side), wanted[:, :, 0])
    with pytest.raises(InvalidInput, match="too thin") as caught:
        ours.tokens_of_size(1, 300, "items[4]")
    assert caught.value.field == "items[4]"


def test_images_without_tiles_equal_transformers() -> None:
    few = Tiles.from_config(
        Config({"do_resize": False, "max_image_size": {"longest_edge": 10}}), 16, 4
    )
    with pytest.raises(InvalidInput, match="has 10,000 tiles; at most") as caught:
        few.tokens_of_size(1000, 1000, "items[3]")
    assert caught.value.field == "items[3]"
