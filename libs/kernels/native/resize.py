"""Resizing images by the native library, bit for bit as Pillow 13 does it: 22 bits of a weight,
bytes between the two passes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.kernels.native.library import Native, native

LANCZOS, BILINEAR, BICUBIC, BOX, HAMMING = 1, 2, 3, 4, 5
"""Filters by Pillow's numbers."""
_FILTERS: Final = (LANCZOS, BILINEAR, BICUBIC, BOX, HAMMING)


def resized(
    pixels: NDArray[np.uint8], size: tuple[int, int], resample: int, library: Native | None = None
) -> NDArray[np.uint8] | None:
    """[height, width, 3] or, with a fourth number that is left out, [height, width, 4] -> [*size,
    3]

    None where the library does not do it: there is none, another filter, no memory. `size`: height
    and width, at least 1. `resample`: Pillow's number of the filter. `library` None: the one that
    this process has chosen. The interpreter's lock is released meanwhile.
    """
    library = native() if library is None else library
    if library is None or resample not in _FILTERS or not pixels.size:
        return None
    pixels = np.ascontiguousarray(pixels)
    (height, width, step), (rows, columns) = pixels.shape, size
    out = np.empty((rows, columns, 3), dtype=np.uint8)
    failed = library.resize(
        pixels.ctypes.data, height, width, step, out.ctypes.data, rows, columns, resample
    )
    return None if failed else out
