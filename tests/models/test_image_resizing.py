"""Images are resized in place of Pillow's own memory, and by Pillow where the kernel would give
something else.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from libs.kernels.native import library, resize
from libs.models.images import resizing

PIXELS = np.random.default_rng(3).integers(0, 256, (61, 83, 3), np.uint8)


def wanted(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    return np.asarray(Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BICUBIC))


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    resizing._is_exact.cache_clear()


@pytest.mark.parametrize("size", [(20, 27), (61, 83), (150, 10), (5, 83)])
def test_image_and_its_array_give_pillows_bytes(size: tuple[int, int]) -> None:
    image = Image.fromarray(PIXELS)
    for given in (PIXELS, image):
        np.testing.assert_array_equal(
            resizing.resized(given, size, Image.Resampling.BICUBIC), wanted(PIXELS, size)
        )
    np.testing.assert_array_equal(np.asarray(image), PIXELS)  # nothing was written to it


def test_image_beyond_sixteen_mebibytes_is_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    if library.native() is None:
        pytest.skip("native kernels are missing")
    pixels = np.random.default_rng(4).integers(0, 256, (2100, 2100, 3), np.uint8)
    image, answer = Image.fromarray(pixels), wanted(pixels, (60, 70))
    assert resizing._is_exact()
    monkeypatch.setattr(Image.Image, "resize", None)
    np.testing.assert_array_equal(
        resizing.resized(image, (60, 70), Image.Resampling.BICUBIC), answer
    )


def test_kernel_that_gives_other_bytes_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(
        pixels: NDArray[np.uint8], size: tuple[int, int], resample: int
    ) -> NDArray[np.uint8]:
        made = wanted(pixels[..., :3].copy(), size).copy()
        made[0, 0, 0] ^= 1
        return made

    monkeypatch.setattr(resize, "resized", off_by_one)
    np.testing.assert_array_equal(
        resizing.resized(PIXELS, (20, 27), Image.Resampling.BICUBIC), wanted(PIXELS, (20, 27))
    )


def test_without_the_kernel_pillow_resizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "choice", lambda: "none: for this test")
    np.testing.assert_array_equal(
        resizing.resized(PIXELS, (20, 27), Image.Resampling.BICUBIC), wanted(PIXELS, (20, 27))
    )
