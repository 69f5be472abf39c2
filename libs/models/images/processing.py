"""Resize and crop images as preprocessor_config.json defines, as uint8 pixels.

Results equal transformers' `pil` image processors bit for bit. DINOv3 has none: its pixels are
float32, as torchvision resizes them. The device rescales and normalises later (`patches.py`), with
the constants kept here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from libs.errors import InvalidInput
from libs.models.images.decoding import Pixels
from libs.models.images.resizing import height_and_width, resized
from libs.models.layers.spec import Config

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_HALF = (0.5, 0.5, 0.5)

_MAX_SIDE: Final = 1 << 14
_MAX_PIXELS: Final = 50_000_000
_FILTERS: Final = 6
_MAX_PATCHES: Final = 1 << 14
_FINEST: Final = 1e-5
MIN_SCALE: Final = 1e-6
MAX_SCALE: Final = 1e3
"""Limit of the factor on pixels; published models have 1/255, 1/127.5 or 1."""
MAX_COLOUR: Final = 1e4
"""Limit of the means and deviations of colours, which are below 256 if pixels are not rescaled."""

Numbers = tuple[float, ...]
"""One number for each of red, green and blue."""


@dataclass(frozen=True, slots=True)
class PatchBudget:
    """A size that depends on the image (SigLIP 2's NaFlex): at most `most` square patches of `side`
    pixels, with the proportions kept.

    Height and width are rounded up to whole patches.
    """

    side: int
    most: int

    def fit_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width. The scale is found by bisection, since another search would give
        other sizes than transformers.
        """
        low, high = _FINEST / 10, 100.0
        while high - low >= _FINEST:
            scale = (low + high) / 2
            rows, columns = self._patches(height, scale), self._patches(width, scale)
            low, high = (scale, high) if rows * columns <= self.most else (low, scale)
        return self._patches(height, low) * self.side, self._patches(width, low) * self.side

    def _patches(self, pixels: int, scale: float) -> int:
        return max(1, math.ceil(pixels * scale / self.side))


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Defaults of a class of transformers. `size`: the short side, or both sides with `square`."""

    mean: Numbers = _HALF
    std: Numbers = _HALF
    resample: int = Image.Resampling.BICUBIC
    square: bool = True
    crop: bool = False
    squares_numbers: bool = False  # a size of one number is a square
    budget: bool = False  # the size is a budget of patches
    rounded: bool = True  # resized pixels are integers


# Keyed by `image_processor_type` without its suffix.
_CLASSES: Final = {
    "BitImageProcessor": _Defaults(_CLIP_MEAN, _CLIP_STD, square=False, crop=True),
    "CLIPImageProcessor": _Defaults(_CLIP_MEAN, _CLIP_STD, square=False, crop=True),
    "DeiTImageProcessor": _Defaults(crop=True, squares_numbers=True),
    "DINOv3ViTImageProcessor": _Defaults(
        _IMAGENET_MEAN, _IMAGENET_STD, resample=Image.Resampling.BILINEAR, rounded=False
    ),
    "Siglip2ImageProcessor": _Defaults(resample=Image.Resampling.BILINEAR, budget=True),
    "SiglipImageProcessor": _Defaults(),
    "ViTImageProcessor": _Defaults(resample=Image.Resampling.BILINEAR, squares_numbers=True),
}
_OLD_NAMES: Final = {
    f"{name}FeatureExtractor": f"{name}ImageProcessor" for name in ("CLIP", "DeiT", "ViT")
}  # before transformers 4.26

# Steps of other processors that are not supported.
_NOT_SERVED = (
    "do_pad",
    "do_flip_channel_order",
    "do_reduce_labels",
    "do_thumbnail",
    "do_align_long_axis",
)


@dataclass(frozen=True, slots=True)
class ImageProcessing:
    """Processing of a model's images. Sizes are (height, width).

    Attributes:
        size: Target size, short side (with the proportions kept) or patch budget; None to keep the
            size.
        resample: Number of Pillow's filter.
        crop: Size of the central crop; smaller images get black borders.
        scale: With `mean` and `std`, the device computes (pixel * scale - mean) / std in float32.
        rounded: Resized pixels are uint8; otherwise float32.
    """

    size: tuple[int, int] | int | PatchBudget | None
    resample: int
    crop: tuple[int, int] | None
    scale: float
    mean: Numbers
    std: Numbers
    rounded: bool = True

    @staticmethod
    def from_config(config: Config, default: str) -> ImageProcessing:
        """Read a preprocessor_config.json. `default`: the class if the file names none.

        Raises ModelBroken with the unsupported key.
        """
        key = (
            "image_processor_type"
            if config.has("image_processor_type")
            else "feature_extractor_type"
        )
        name = config.text(key, default).removesuffix("Fast").removesuffix("Pil")
        known = _CLASSES.get(_OLD_NAMES.get(name, name))
        if known is None:
            raise config.unsupported(key, f"supported are {', '.join(_CLASSES)}")
        for flag in _NOT_SERVED:
            if config.has(flag):
                config.require(flag, False)
        plain = ImageProcessing._plain(config, known, known.resample)
        return ImageProcessing(
            size=_size(config, known) if config.flag("do_resize", True) else None,
            resample=plain.resample,
            crop=_crop(config) if config.flag("do_center_crop", known.crop) else None,
            scale=plain.scale,
            mean=plain.mean,
            std=plain.std,
            rounded=known.rounded,
        )

    @staticmethod
    def unsized(config: Config, like: str, resample: int) -> ImageProcessing:
        """Read only the normalisation and the filter, for images that the caller resizes.

        Args:
            like: The class with the default normalisation.
            resample: The default filter.
        """
        return ImageProcessing._plain(config, _CLASSES[like], resample)

    @staticmethod
    def _plain(config: Config, known: _Defaults, resample: int) -> ImageProcessing:
        mean: Numbers = (0.0, 0.0, 0.0)
        std: Numbers = (1.0, 1.0, 1.0)
        if config.flag("do_normalize", True):
            mean = config.numbers("image_mean", known.mean, least=-MAX_COLOUR, most=MAX_COLOUR)
            std = config.numbers("image_std", known.std, least=MIN_SCALE, most=MAX_COLOUR)
        scale = (
            config.number("rescale_factor", 1 / 255, least=MIN_SCALE, most=MAX_SCALE)
            if config.flag("do_rescale", True)
            else 1.0
        )
        return ImageProcessing(
            size=None,
            resample=_filter(config, resample),
            crop=None,
            scale=scale,
            mean=mean,
            std=std,
        )

    def seen(self, height: int, width: int, field: str) -> tuple[int, int]:
        """Return the size of `apply`'s result, so an image can be priced before it is decoded.

        Raises InvalidInput, with the item's path `field`, for an image so thin that resizing would
        exceed 50 million pixels.
        """
        resized = self._resized(height, width, field)
        return self.crop or resized

    def apply(self, given: Pixels | Image.Image, field: str) -> NDArray[np.generic]:
        """Resize and crop an array [height, width, 3] or, faster, an RGB image, to the size of
        `seen`.

        Raises as `seen`. Returns uint8, or float32 of 0 to 255 if pixels are not rounded.
        """
        pixels = self._pixels(given, self._resized(*height_and_width(given), field))
        return np.ascontiguousarray(pixels if self.crop is None else _cropped(pixels, *self.crop))

    def _pixels(self, given: Pixels | Image.Image, size: tuple[int, int]) -> NDArray[np.generic]:
        if self.rounded:
            return resized(given, size, self.resample)
        image = given if isinstance(given, Image.Image) else Image.fromarray(given)
        wide = (size[1], size[0]), Image.Resampling(self.resample)
        # Pillow resizes one float32 colour at a time, like torch's antialiased interpolate.
        return np.stack(
            [np.asarray(one.convert("F").resize(*wide)) for one in image.split()], axis=-1
        )

    def _resized(self, height: int, width: int, field: str) -> tuple[int, int]:
        if self.size is None:
            return height, width
        if isinstance(self.size, tuple):
            return self.size
        if isinstance(self.size, PatchBudget):
            return self.size.fit_size(height, width)
        long = int(self.size * max(height, width) / min(height, width))
        if long * self.size > _MAX_PIXELS:
            raise InvalidInput(f"the image is too thin: {width:,} x {height:,} pixels", field=field)
        return (long, self.size) if width <= height else (self.size, long)


def _cropped(pixels: NDArray[np.generic], height: int, width: int) -> NDArray[np.generic]:
    """Return the central crop. An odd extra row is cut at the end; missing rows are black, an odd
    one at the beginning.
    """
    for axis, wanted in enumerate((height, width)):
        spare = pixels.shape[axis] - wanted
        if spare < 0:
            edges = [(0, 0)] * 3
            edges[axis] = (-(spare // 2), -spare + spare // 2)
            pixels = np.pad(pixels, edges)
        else:
            pixels = pixels.take(range(spare // 2, spare // 2 + wanted), axis=axis)
    return pixels


def _size(config: Config, known: _Defaults) -> tuple[int, int] | int | PatchBudget:
    if known.budget:
        most = config.size("max_num_patches", 256)
        if most > _MAX_PATCHES:
            raise config.unsupported("max_num_patches", f"at most {_MAX_PATCHES:,} is supported")
        return PatchBudget(_side(config, "patch_size", 16), most)
    if config.is_number("size"):
        side = _side(config, "size")
        return (side, side) if known.squares_numbers else side
    if not config.has("size"):
        return (224, 224) if known.square else 224
    size = config.part("size")
    if size.has("shortest_edge") and not size.has("longest_edge"):
        return _side(size, "shortest_edge")
    if size.has("height") and size.has("width"):
        return _side(size, "height"), _side(size, "width")
    raise config.unsupported("size", "it needs height and width, or only shortest_edge")


def _crop(config: Config) -> tuple[int, int]:
    if config.is_number("crop_size"):
        return _side(config, "crop_size"), _side(config, "crop_size")
    crop = config.part("crop_size")
    return _side(crop, "height", 224), _side(crop, "width", 224)


def _side(config: Config, key: str, default: int | None = None) -> int:
    side = config.size(key, default)
    if side > _MAX_SIDE:
        raise config.unsupported(key, f"at most {_MAX_SIDE:,} is supported")
    return side


def _filter(config: Config, default: int) -> int:
    resample = config.integer("resample", default)
    if not 0 <= resample < _FILTERS:
        raise config.unsupported("resample", "it must be the number of a Pillow filter, 0 to 5")
    return resample
