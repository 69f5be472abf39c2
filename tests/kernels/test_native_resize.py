"""Resizing by the native library gives the bytes of the Pillow that is pinned, by every instruction
set.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from libs.kernels.native import resize
from libs.kernels.native.library import Native, instruction_sets, load

FILTERS = (resize.LANCZOS, resize.BILINEAR, resize.BICUBIC, resize.BOX, resize.HAMMING)
sides = st.integers(1, 70) | st.integers(1, 400)


@pytest.fixture(scope="module", name="natives")
def natives_of_this_cpu(library: Path) -> list[Native]:
    """One of each instruction set that this CPU has."""
    return [load(library, name) for name in instruction_sets(library)]


def drawn(height: int, width: int, seed: int, *, is_harsh: bool) -> NDArray[np.uint8]:
    """Return an image with a fourth byte, which must be ignored.

    Harsh: 0 and 255, so sums leave the range of a byte between the passes.
    """
    draw = np.random.default_rng(seed)
    if is_harsh:
        return draw.integers(0, 2, (height, width, 4), np.uint8) * np.uint8(255)
    return draw.integers(0, 256, (height, width, 4), np.uint8)


@settings(max_examples=400, deadline=None)
@given(sides, sides, sides, sides, st.sampled_from(FILTERS), st.booleans(), st.integers(0, 1000))
def test_bytes_are_pillows(
    natives: list[Native],
    height: int,
    width: int,
    rows: int,
    columns: int,
    resample: int,
    is_harsh: bool,
    seed: int,
) -> None:
    pixels = drawn(height, width, seed, is_harsh=is_harsh)
    plain = np.ascontiguousarray(pixels[..., :3])
    wanted = np.asarray(Image.fromarray(plain).resize((columns, rows), Image.Resampling(resample)))
    for native in natives:
        for given_pixels in (pixels, plain):
            made = resize.resized(given_pixels, (rows, columns), resample, native)
            assert made is not None
            np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize(
    "size", [(40, 30), (40, 17), (19, 30)], ids=["both stay", "the height stays", "the width stays"]
)
@pytest.mark.parametrize("step", [3, 4])
def test_side_that_stays(natives: list[Native], size: tuple[int, int], step: int) -> None:
    pixels = drawn(40, 30, 1, is_harsh=False)[..., :step]
    wanted = np.asarray(
        Image.fromarray(np.ascontiguousarray(pixels[..., :3])).resize(
            size[::-1], Image.Resampling.BICUBIC
        )
    )
    for native in natives:
        np.testing.assert_array_equal(resize.resized(pixels, size, resize.BICUBIC, native), wanted)


def test_unsupported_resizes_return_none(natives: list[Native]) -> None:
    pixels = drawn(4, 4, 1, is_harsh=False)
    assert resize.resized(pixels, (2, 2), Image.Resampling.NEAREST, natives[0]) is None
    assert resize.resized(pixels[:0], (2, 2), resize.BICUBIC, natives[0]) is None
    assert (
        resize.resized(pixels, (2, 2), resize.BICUBIC, Native("avx2", lambda packed, kind: 1))
        is None
    )
