"""Idefics3's images: resized to a multiple of the tower's size and split into tiles, followed by
the whole image, scaled down.

Equal to transformers' Idefics3ImageProcessorPil bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image

from libs.errors import InvalidInput
from libs.models.images.decoding import Pixels
from libs.models.images.processing import ImageProcessing
from libs.models.images.resizing import height_and_width, resized
from libs.models.images.vlm.image_converter import ImageTokens
from libs.models.layers.spec import Config

_MAX_SIDE: Final = 4096
_MAX_TILES: Final = 256

MARK: Final = "<image>"
_FAKE: Final = "<fake_token_around_image>"
_GLOBAL: Final = "<global-img>"


@dataclass(frozen=True, slots=True)
class Tiles:
    """Splitting rules.

    Attributes:
        longest: Long side to which an image is resized first; None to keep it.
        side: Side of a tile.
        splits: Whether images are split.
        patches: Tower tokens of a tile.
        rows: Tokens of a tile in the text encoder's sequence.
    """

    processing: ImageProcessing
    longest: int | None
    side: int
    splits: bool
    patches: int
    rows: int

    @staticmethod
    def from_config(config: Config, patches: int, rows: int) -> Tiles:
        """Read a preprocessor_config.json. Raises ModelBroken for an unsupported key."""
        size = config.part("size")
        return Tiles(
            processing=ImageProcessing.unsized(
                config, "SiglipImageProcessor", Image.Resampling.LANCZOS
            ),
            longest=size.size("longest_edge", 4 * 364) if config.flag("do_resize", True) else None,
            side=config.part("max_image_size").size("longest_edge", 364),
            splits=config.flag("do_image_splitting", True),
            patches=patches,
            rows=rows,
        )

    def tokens_of_size(self, height: int, width: int, field: str) -> ImageTokens:
        down, across = self._grid(*self._whole(height, width), field)
        if not down:
            text, count = f"{_FAKE}{_GLOBAL}{MARK}{_FAKE}", 1
        else:
            tiles = (
                "".join(
                    f"{_FAKE}<row_{row + 1}_col_{column + 1}>{MARK}" for column in range(across)
                )
                for row in range(down)
            )
            text, count = (
                "".join(f"{line}\n" for line in tiles) + f"\n{_FAKE}{_GLOBAL}{MARK}{_FAKE}",
                down * across + 1,
            )
        return ImageTokens(text, (self.rows,) * count, self.patches * count)

    def apply(self, image: Image.Image | Pixels, field: str) -> tuple[Pixels, ...]:
        height, width = self._whole(*height_and_width(image))
        down, across = self._grid(height, width, field)
        if self.longest is not None:
            image = self._resized(image, *_within(*height_and_width(image), self.longest))
        if not self.splits:
            return (self._resized(image, self.side, self.side),)
        whole = self._resized(image, height, width)
        if not down:
            return (whole,)
        side = self.side
        tiles = [
            np.ascontiguousarray(
                whole[row * side : (row + 1) * side, column * side : (column + 1) * side]
            )
            for row in range(down)
            for column in range(across)
        ]
        return (*tiles, self._resized(whole, side, side))

    def _whole(self, height: int, width: int) -> tuple[int, int]:
        """Return the size to resize an image to before splitting: a multiple of the tile's."""
        if not self.splits:
            return self.side, self.side
        if self.longest is not None:
            height, width = _within(height, width, self.longest)
        ratio, side = width / height, self.side
        if width >= height:
            width = math.ceil(width / side) * side
            return math.ceil(int(width / ratio) / side) * side, width
        height = math.ceil(height / side) * side
        return height, math.ceil(int(height * ratio) / side) * side

    def _grid(self, height: int, width: int, field: str) -> tuple[int, int]:
        """Return tiles down and across; (0, 0) for an image that is not split."""
        down, across = height // self.side, width // self.side
        if down * across > _MAX_TILES:
            raise InvalidInput(
                f"the image has {down * across:,} tiles; at most {_MAX_TILES} are allowed",
                field=field,
            )
        if not down or not across:
            raise InvalidInput(
                f"the image is too thin: its tiles have {width:,} x {height:,} pixels",
                field=field,
            )
        return (0, 0) if down == across == 1 else (down, across)

    def _resized(self, image: Image.Image | Pixels, height: int, width: int) -> Pixels:
        return resized(image, (height, width), self.processing.resample)


def _within(height: int, width: int, longest: int) -> tuple[int, int]:
    """Scale the long side to `longest`, at most 4,096, and make the short one even and at least
    1.
    """
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _MAX_SIDE:
        width, height = _MAX_SIDE, int(_MAX_SIDE / ratio)
    elif height > width and height > _MAX_SIDE:
        height, width = _MAX_SIDE, int(_MAX_SIDE * ratio)
    return max(height, 1), max(width, 1)
