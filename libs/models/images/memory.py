"""Reserve memory before an image is decoded, with the function set for the calling thread.

A worker's preparing threads reserve it from the worker's memory
(services/worker/memory/decoding.py). Other processes reserve nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Final

BYTES_A_PIXEL: Final = 16
"""Peak memory of decoding per pixel, until the image is resized. Measured with 50,000,000 pixels: 4
for PNG and JPEG, 8 if the image is turned upright or has transparency, 12 with both or with CMYK,
16 for AVIF with both.
"""

WEBP_BYTES_A_PIXEL: Final = 21
"""Peak memory of decoding WebP per pixel: libwebp keeps two frames, and Pillow copies one of them
twice. Measured: 16, and 20.3 with both.
"""

Reserve = Callable[[int, str], AbstractContextManager[None]]
"""Takes bytes and the item's path, and returns a context that holds the memory. Raises NoCapacity
if memory is short.
"""


def _unlimited(needed: int, field: str) -> AbstractContextManager[None]:
    return nullcontext()


_RESERVE: ContextVar[Reserve] = ContextVar("reserve", default=_unlimited)


@contextmanager
def reserving(reserve: Reserve) -> Iterator[None]:
    """Reserve memory for decoding on this thread by `reserve` within the context."""
    token = _RESERVE.set(reserve)
    try:
        yield
    finally:
        _RESERVE.reset(token)


def reserved(
    pixels: int, field: str, bytes_a_pixel: int = BYTES_A_PIXEL
) -> AbstractContextManager[None]:
    """Hold the memory for decoding an image of `pixels` pixels. `field`: the item's path, for
    errors.

    Raises NoCapacity if memory is short, and InvalidInput for an image that can never fit.
    """
    return _RESERVE.get()(pixels * bytes_a_pixel, field)
