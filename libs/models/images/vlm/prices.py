"""The tokens of an image, by the way in which a model converts images."""

from __future__ import annotations

import math

from libs.catalog.card import ImageSize
from libs.models.images.vlm.families.lighton import LongestSide
from libs.models.images.vlm.image_converter import OneSize
from libs.models.images.vlm.parts import PartsInput
from libs.models.images.vlm.smart import SmartResize
from libs.models.images.vlm.tiles import Tiles


def image_size(given: PartsInput, most: int) -> ImageSize:
    """Return the rule for an image's tokens, including the prompt around it. `most`: tokens of an
    item.

    The estimate is an upper bound, except for images so thin that they are enlarged. Tiles are
    priced for a square image, which are at most `longest / side` times those of a thin one. For
    images that keep their size, the model's minimum is added.
    """
    frame, image_converter = given.frame_tokens(), given.image_converter
    if isinstance(image_converter, OneSize):
        return _square(math.isqrt(image_converter.rows), frame, most)
    if isinstance(image_converter, Tiles):
        tile = image_converter.rows + _TILE_MARKERS
        if (
            image_converter.splits and image_converter.longest is None
        ):  # the original image is split
            return ImageSize(
                0, 0, 0, max(1, image_converter.side // math.isqrt(tile)), frame + tile, most
            )
        across = (
            math.ceil(image_converter.longest / image_converter.side)
            if image_converter.splits and image_converter.longest
            else 1
        )
        return _square(1, (across**2 + 1 if across > 1 else 1) * tile + frame, most)
    if isinstance(image_converter, SmartResize):
        area, around = image_converter.square**2, frame + _IMAGE_MARKERS
        return ImageSize(
            0,
            0,
            0,
            image_converter.square,
            around + image_converter.least // area,
            min(most, image_converter.most // area + around),
        )
    if isinstance(image_converter, LongestSide):
        rows = math.ceil(image_converter.longest / image_converter.square) ** 2
        return ImageSize(0, 0, 0, image_converter.square, frame + 1, min(most, rows + frame))
    return ImageSize(0, 0, 0, 1, 0, most)


def max_tower_tokens(given: PartsInput) -> int:
    """Return the most tower tokens of one of its inputs."""
    image_converter = given.image_converter
    if isinstance(image_converter, OneSize):
        return image_converter.patches.most
    if isinstance(image_converter, Tiles):
        return image_converter.patches
    if isinstance(image_converter, LongestSide):
        return (
            math.ceil(image_converter.longest / image_converter.square)
            * image_converter.square
            // image_converter.patches.patch
        ) ** 2
    return (
        image_converter.most // image_converter.patches.patch**2
        if isinstance(image_converter, SmartResize)
        else 0
    )


_IMAGE_MARKERS = 2
"""Tokens around an image's rows: begin and end of the image."""

_TILE_MARKERS = 3
"""Tokens before a tile's rows: begin of the image, row and column, end of a line."""


def _square(side: int, extra: int, most: int) -> ImageSize:
    """Return `side * side` tokens for every image, plus `extra`."""
    return ImageSize(side, side, 0, 1, extra, min(most, side * side + extra))
