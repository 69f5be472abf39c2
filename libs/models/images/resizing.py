"""Resizing bytes of red, green and blue: by the native kernel where there is one, else by Pillow,
with the same result bit for bit.

Which of the two passes comes first, and so the last bit, depends on Pillow's version: the kernel is
used only if it gives what the Pillow that is installed gives for small images of every kind.
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

# Pillow then keeps an image in one piece, which it lets others read in place. Beyond 16 MiB it
# would be in several.
Image.core.set_use_block_allocator(1)  # type: ignore[attr-defined]


class _ArrowArray(ctypes.Structure):
    """`struct ArrowArray` of Arrow's C data interface."""


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
    """[height, width, 3], or an image of mode RGB -> [*size, 3], not to be written to.

    `size`: height and width. `resample`: the number of Pillow's filter. An image takes less time
    than its array.
    """
    if size_of(image) == size:
        return np.asarray(image)
    made = _natively(image, size, resample) if _is_exact() else None
    return _by_pillow(image, size, resample) if made is None else made


def size_of(image: Image.Image | Pixels) -> tuple[int, int]:
    """Height and width."""
    return (
        (image.height, image.width)
        if isinstance(image, Image.Image)
        else (image.shape[0], image.shape[1])
    )


def _by_pillow(image: Image.Image | Pixels, size: tuple[int, int], resample: int) -> Pixels:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling(resample)))


def _natively(image: Image.Image | Pixels, size: tuple[int, int], resample: int) -> Pixels | None:
    """None where that cannot be done."""
    if not isinstance(image, Image.Image):
        return resize.resized(image, size, resample)
    try:
        _, held = image.__arrow_c_array__()
    except (
        AttributeError,
        ValueError,
    ):  # another version of Pillow; an image that is not in one piece
        return None
    return resize.resized(
        _pixels_of(held, image.height, image.width), size, resample
    )  # `held` keeps the pixels until here


def _pixels_of(held: object, height: int, width: int) -> NDArray[np.uint8]:
    """The bytes that a capsule of an image of mode RGB holds, in place: [height, width, 4], valid
    as long as the capsule.
    """
    take = ctypes.pythonapi.PyCapsule_GetPointer
    take.argtypes, take.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    array = _ArrowArray.from_address(take(held, b"arrow_array"))
    # One fixed-size list of four bytes for each pixel; the second buffer of its only child are the
    # bytes.
    at = ctypes.cast(array.children[0].contents.buffers[1], ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(at, (height, width, 4))


@cache
def _is_exact() -> bool:
    """Whether the kernel gives what Pillow gives, for all filters, with either pass first and with
    one alone.
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
