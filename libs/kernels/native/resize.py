"""Resize images with the native library, bit for bit like Pillow 13: 22 bits of a weight, bytes
between the two passes.
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
    """Resize [height, width, 3], or [height, width, 4] ignoring the fourth channel, to [*size, 3].
    Releases the GIL.

    None if the library cannot do it: it is missing, another filter, out of memory.

    Args:
        size: Height and width, at least 1.
        resample: Pillow's number of the filter.
        library: None for this process's choice.
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
