"""Price images and pages in tokens, from the size in the file's header. Pure.

`requests.py` refuses and prices by it. A file without a known size (`libs/image_size.py`) is priced
as the largest image that its model takes; the worker has a reader for each format, and refuses or
reads it.
"""

from __future__ import annotations

from typing import Final

from shoal.v1 import models_pb2

from libs.documents import limits
from libs.image_size import PixelSize

UNKNOWN_TOKENS: Final = 256
"""Price of an image for a model that no worker has read yet: CLIP makes 50 to 577 tokens of one, a
page reader about 1,000.
"""

PIXELS_PER_TOKEN: Final = 1 << 16
"""Pixels of a file that cost one token for decoding, whatever the model's image size. A core
decodes 50 to 200 million pixels a second, and computes some 2,000 tokens of a small encoder in that
time.
"""

_PAGE_SQUARE_INCHES: Final = 97
"""The area of A4. Only a parser knows the size of a document's pages."""

_MAX_MAPS: Final = 16


def decoding_tokens(size: PixelSize | None, most_pixels: int) -> int:
    """Price the decoding of an image. `most_pixels`: for an image without a known size."""
    pixels = most_pixels if size is None else size.height * size.width
    return pixels // PIXELS_PER_TOKEN


def page_tokens(dots_per_inch: int, images: models_pb2.ImageInput | None) -> int:
    """Price a document's page: rendering it, and reading it as the model's largest image. 0 dots:
    the default.
    """
    dots = dots_per_inch or limits.DPI
    pixels = min(_PAGE_SQUARE_INCHES * dots * dots, limits.PIXELS)
    return image_tokens(None, images) + pixels // PIXELS_PER_TOKEN


def image_tokens(size: PixelSize | None, images: models_pb2.ImageInput | None) -> int:
    """Return the tokens that a model makes of an image. `images`: from its card."""
    if images is None or not images.patch or not images.max_tokens:
        return UNKNOWN_TOKENS
    if images.height and images.width:
        size = PixelSize(images.height, images.width)
    elif size is None:
        return images.max_tokens
    elif images.short_side:
        scale = images.short_side / min(size)
        if images.long_side:
            scale = min(scale, images.long_side / max(size))
        size = PixelSize(int(size.height * scale), int(size.width * scale))
    else:
        # Models that keep an image's size round it up to whole patches, so that thin images have a
        # price too.
        size = PixelSize(_round_up(size.height, images.patch), _round_up(size.width, images.patch))
    patches = (size.height // images.patch) * (size.width // images.patch)
    if images.maps:
        patches = sum(
            -(-size.height // side) * -(-size.width // side)
            for side in (images.patch << level for level in range(min(images.maps, _MAX_MAPS)))
        )
    return min(max(patches, 1) + images.extra_tokens, images.max_tokens)


def _round_up(pixels: int, patch: int) -> int:
    return -(-pixels // patch) * patch
