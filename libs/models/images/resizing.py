"""Resize RGB bytes with the native kernel if possible, otherwise with Pillow; the results are
bit-identical.

Pillow's version determines which of the two passes is first, and so the last bit. The kernel is
used only if it equals the installed Pillow for small images of every kind.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from libs.kernels.native import resize
from libs.models.images.decoding import Pixels

_SIZES: Final = ((9, 14), (31, 6), (23, 40))
_RESIZED: Final = ((5, 9), (8, 5), (9, 17), (40, 7), (23, 9), (12, 14))

# Pillow then keeps an image in one block, which other code can read in place. Images beyond 16 MiB
# would be in several.
Image.core.set_use_block_allocator(1)  # type: ignore[attr-defined]


class _ArrowArray(ctypes.Structure):
    """The `struct ArrowArray` of Arrow's C data interface."""


_ArrowArray._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
    ("dictionary", ctypes.c_void_p),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]


def resized(image: Image.Image | Pixels, size: tuple[int, int], resample: int) -> Pixels:
    """Resize an array [height, width, 3] or, faster, an RGB image to [*size, 3]. The result is
    read-only.

    Args:
        size: Height and width.
        resample: The number of Pillow's filter.
    """
    if height_and_width(image) == size:
        return np.asarray(image)
    made = _natively(image, size, resample) if _is_exact() else None
    return _by_pillow(image, size, resample) if made is None else made


def height_and_width(image: Image.Image | Pixels) -> tuple[int, int]:
    """Return height and width."""
    return (
        (image.height, image.width)
        if isinstance(image, Image.Image)
        else (image.shape[0], image.shape[1])
    )


def _by_pillow(image: Image.Image | Pixels, size: tuple[int, int], resample: int) -> Pixels:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling(resample)))


def _natively(image: Image.Image | Pixels, size: tuple[int, int], resample: int) -> Pixels | None:
    """Resize with the kernel; None if it cannot be used."""
    if not isinstance(image, Image.Image):
        return resize.resized(image, size, resample)
    try:
        _, held = image.__arrow_c_array__()
    except (
        AttributeError,
        ValueError,
    ):  # another version of Pillow, or an image in several blocks
        return None
    return resize.resized(
        _capsule_pixels(held, image.height, image.width), size, resample
    )  # `held` keeps the pixels alive until here


def _capsule_pixels(held: object, height: int, width: int) -> NDArray[np.uint8]:
    """Return the bytes of an RGB image's capsule in place: [height, width, 4], valid as long as the
    capsule.
    """
    take = ctypes.pythonapi.PyCapsule_GetPointer
    take.argtypes, take.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    array = _ArrowArray.from_address(take(held, b"arrow_array"))
    # The array is one fixed-size list of four bytes per pixel; the second buffer of its only child
    # has the bytes.
    at = ctypes.cast(array.children[0].contents.buffers[1], ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(at, (height, width, 4))


@cache
def _is_exact() -> bool:
    """Return whether the kernel equals Pillow for all filters, with either pass first and with only
    one pass.
    """
    draw = np.random.default_rng(0)
    for height, width in _SIZES:
        image = Image.fromarray(draw.integers(0, 2, (height, width, 3), np.uint8) * np.uint8(255))
        for size in _RESIZED:
            for resample in (1, 2, 3, 4, 5):
                made = _natively(image, size, resample)
                if made is None or not np.array_equal(made, _by_pillow(image, size, resample)):
                    return False
    return True
