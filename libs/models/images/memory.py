"""Memory for decoding an image: reserved before anything is decoded, by whatever the process has
set for the calling thread.

A worker's preparing threads reserve it from the worker's memory
(services/worker/memory/decoding.py). Elsewhere nothing is reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Final

BYTES_A_PIXEL: Final = 16
"""Memory that decoding takes for a pixel at its peak, until the image was resized. Measured with
50,000,000 pixels: 4 for PNG and JPEG, 8 if the image is turned upright or has transparency, 12 with
both or with CMYK, 16 for AVIF with both."""

WEBP_BYTES_A_PIXEL: Final = 21
"""As BYTES_A_PIXEL, of WebP: libwebp keeps two frames, and Pillow copies one of them twice.
Measured: 16, and 20.3 with both.
"""

Reserve = Callable[[int, str], AbstractContextManager[None]]
"""Called with bytes and the item's path. The context holds the memory. Raises NoCapacity where
there is none.
"""


def _unlimited(needed: int, field: str) -> AbstractContextManager[None]:
    return nullcontext()


_RESERVE: ContextVar[Reserve] = ContextVar("reserve", default=_unlimited)


@contextmanager
def reserving(reserve: Reserve) -> Iterator[None]:
    """Within the context, memory for what this thread decodes is reserved by `reserve`."""
    token = _RESERVE.set(reserve)
    try:
        yield
    finally:
        _RESERVE.reset(token)


def reserved(
    pixels: int, field: str, bytes_a_pixel: int = BYTES_A_PIXEL
) -> AbstractContextManager[None]:
    """Holds the memory for decoding an image of so many pixels. `field`: the item's path, for
    errors.

    Raises NoCapacity where there is none, and InvalidInput for an image that needs more than there
    can ever be.
    """
    return _RESERVE.get()(pixels * bytes_a_pixel, field)
