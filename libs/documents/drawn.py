"""Images that are drawn when they are needed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""[height, width, 3], red, green and blue."""


class Drawn(bytes):
    """An image without a file, such as a page of a document. Its bytes are a digest by which it is
    known: two with the same bytes have the same pixels."""

    def size(self, field: str) -> tuple[int, int]:
        """Height and width, without drawing it. `field`: as of `decode`. Raises InvalidInput."""
        raise NotImplementedError

    def pixels(self, field: str) -> Pixels:
        """Draw it. Raises InvalidInput."""
        raise NotImplementedError
