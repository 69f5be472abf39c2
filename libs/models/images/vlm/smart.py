"""Qwen-VL's images: resized to sides that are multiples of a square, and to an area between two
limits.

Equal to transformers' Qwen2VLImageProcessorPil bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from PIL import Image

from libs.errors import InvalidInput
from libs.models.images.decoding import Pixels
from libs.models.images.patches import PatchSpec
from libs.models.images.processing import ImageProcessing
from libs.models.images.resizing import height_and_width, resized
from libs.models.images.vlm.image_converter import ImageTokens
from libs.models.layers.spec import Config

_THINNEST: Final = 200
MARK: Final = "<|image_pad|>"
_BEGIN: Final = "<|vision_start|>"
_END: Final = "<|vision_end|>"


@dataclass(frozen=True, slots=True)
class SmartResize:
    """Resizing rules.

    Attributes:
        square: Pixels of which sides are multiples.
        least: Minimum pixels of an image.
        most: Maximum pixels of an image.
        plain: An image's tokens have positions in one dimension, like texts.
        text: Text for an image in a prompt.
        enlarges: An image smaller than a square is enlarged first with its proportions kept: "each"
            side in turn, or "both" by one factor.
    """

    processing: ImageProcessing
    patches: PatchSpec
    square: int
    least: int
    most: int
    plain: bool = False
    text: str = f"{_BEGIN}{MARK}{_END}"
    enlarges: Literal["", "each", "both"] = ""

    @staticmethod
    def from_config(
        config: Config,
        patches: PatchSpec,
        side: int,
        *,
        plain: bool,
        mark: str = f"{_BEGIN}{MARK}{_END}",
        pixels: tuple[int, int] = (56 * 56, 28 * 28 * 1280),
        enlarges: Literal["", "each", "both"] = "",
    ) -> SmartResize:
        """Read a preprocessor_config.json. `pixels`: default minimum and maximum. Raises
        ModelBroken for an unsupported key.
        """
        if config.size("patch_size", 14) != patches.patch:
            raise config.unsupported(
                "patch_size",
                f"the image encoder of config.json has patches of {patches.patch} pixels",
            )
        if config.size("merge_size", 2) != side:
            raise config.unsupported(
                "merge_size", f"the image encoder of config.json merges {side} x {side} patches"
            )
        config.require("do_resize", True)
        size = config.part("size")
        least = size.size("min_pixels", size.size("shortest_edge", pixels[0]))
        most = size.size("max_pixels", size.size("longest_edge", pixels[1]))
        return SmartResize(
            processing=ImageProcessing.unsized(
                config, "CLIPImageProcessor", Image.Resampling.BICUBIC
            ),
            patches=patches,
            square=patches.patch * side,
            least=config.size("min_pixels", least),
            most=config.size("max_pixels", most),
            plain=plain,
            text=mark,
            enlarges=enlarges,
        )

    def tokens_of_size(self, height: int, width: int, field: str) -> ImageTokens:
        height, width = self._size(height, width, field)
        rows, columns = height // self.square, width // self.square
        patches = self.patches.count_tokens(height, width)
        return ImageTokens(
            self.text, (rows * columns,), patches, None if self.plain else (rows, columns)
        )

    def apply(self, image: Image.Image | Pixels, field: str) -> tuple[Pixels, ...]:
        pixels = resized(
            image, self._size(*height_and_width(image), field), self.processing.resample
        )
        return (np.ascontiguousarray(pixels),)

    def _size(self, height: int, width: int, field: str) -> tuple[int, int]:
        if self.enlarges:
            enlarged = _enlarged_by_sides if self.enlarges == "each" else _enlarged
            height, width = enlarged(height, width, self.square)
        if max(height, width) / min(height, width) > _THINNEST:
            raise InvalidInput(f"the image is too thin: {width:,} x {height:,} pixels", field=field)
        square = self.square
        down, across = round(height / square) * square, round(width / square) * square
        if down * across > self.most:
            share = math.sqrt((height * width) / self.most)
            down = max(square, math.floor(height / share / square) * square)
            across = max(square, math.floor(width / share / square) * square)
        elif down * across < self.least:
            share = math.sqrt(self.least / (height * width))
            down = math.ceil(height * share / square) * square
            across = math.ceil(width * share / square) * square
        return down, across


def _enlarged(height: int, width: int, side: int) -> tuple[int, int]:
    scale = max(side / height, side / width)
    return (int(height * scale), int(width * scale)) if scale > 1 else (height, width)


def _enlarged_by_sides(height: int, width: int, side: int) -> tuple[int, int]:
    if height < side:
        height, width = side, round(width * side / height)
    if width < side:
        height, width = round(height * side / width), side
    return height, width
