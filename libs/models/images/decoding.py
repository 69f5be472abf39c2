"""Decode image files safely: an allow-list of formats, and limits that are checked before decoding.

Runs on the worker's prepare threads; Pillow releases the GIL while it decodes. Files are
interpreted like in transformers' `load_image` and its `pil` image processors: the EXIF orientation
is applied, transparency is composited on white, colour profiles are ignored. One difference: a
16-bit grey image keeps its high bytes, as Pillow does for 16-bit RGB, whereas `convert("RGB")`
would turn nearly all of it white.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from libs.documents.drawn import Drawn
from libs.errors import InvalidInput
from libs.models.images.memory import BYTES_A_PIXEL, WEBP_BYTES_A_PIXEL, reserved

Pixels = NDArray[np.uint8]
"""[height, width, 3], red, green and blue."""

FORMATS: Final = ("PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "AVIF")
"""Pillow's names. AVIF is refused if Pillow was built without it."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of an image file.

    Attributes:
        bytes: Size of the file.
        pixels: Height times width, read from the header.
        side: Longer side. Resizing takes memory by the side: 0.6 GiB for 20,000,000 x 1 pixels with
            Pillow, 1.2 GiB with the kernel.
    """

    bytes: int = 32 << 20
    pixels: int = 50_000_000
    side: int = 1 << 17


LIMITS: Final = ImageLimits()

_STRIP_PIXELS: Final = 1 << 20
"""Number of pixels that are composited on white at a time."""

_WIDE_GREY = ("I;16", "I;16L", "I;16B", "I;16N")
_UNDEFINED = ("I", "F")  # 32 bits a pixel, without a defined range

# Transposition that turns a stored image upright, by EXIF orientation. From 5 on, height and width
# are swapped.
_UPRIGHT: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Pillow's readers trust their input: malformed files raise Python's errors for wrong offsets,
# lengths and numbers.
_READER_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)


def header_size(data: bytes, field: str, limits: ImageLimits = LIMITS) -> tuple[int, int]:
    """Return height and width of the image that `decode` would return, from the file's header.

    Raises as `decode`. A PNG with its orientation after its pixels is measured as it is stored.
    """
    if isinstance(data, Drawn):
        return data.size(field)
    with _opened(data, field, limits) as image:
        height, width = image.height, image.width
        return (width, height) if _orientation(image) >= 5 else (height, width)


def decode(data: bytes, field: str, limits: ImageLimits = LIMITS) -> Pixels:
    """Decode the first image of a file. `field`: the item's path in the request, for errors.

    Raises InvalidInput for a file that is too large, truncated, damaged or not in FORMATS.
    """
    with decoding(data, field, limits) as image:
        return np.asarray(image)


@contextmanager
def decoding(data: bytes, field: str, limits: ImageLimits = LIMITS) -> Iterator[Image.Image]:
    """Decode like `decode`, but to an RGB image for a resizer: each copy to an array or back takes
    0.7 ms a megapixel.

    The context holds the image's memory (`memory.py`) and reserves it before decoding. Raises as
    `memory.reserved` too.
    """
    if isinstance(data, Drawn):
        # Render before memory is reserved: the rendering process may take seconds, and other
        # threads would wait for that memory.
        pixels = data.pixels(field)
        with reserved(pixels.shape[0] * pixels.shape[1], field):
            yield Image.fromarray(pixels)
        return
    with ExitStack() as stack:
        with _opened(data, field, limits) as image:
            each = WEBP_BYTES_A_PIXEL if image.format == "WEBP" else BYTES_A_PIXEL
            stack.enter_context(reserved(image.height * image.width, field, each))
            image.load()
            made = _upright(_rgb(image), _orientation(image))
        del image
        yield made


@contextmanager
def _opened(data: bytes, field: str, limits: ImageLimits) -> Iterator[Image.Image]:
    """Open an image, read its header and check the limits. Errors of its reader become
    InvalidInput.
    """
    if len(data) > limits.bytes:
        raise InvalidInput(
            f"the image has {len(data):,} bytes; at most {limits.bytes:,} are allowed", field=field
        )
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > limits.pixels:
                raise _too_many(f"{image.width:,} x {image.height:,}", field, limits)
            if max(image.size) > limits.side:
                size = f"{image.width:,} x {image.height:,}"
                text = f"the image has {size} pixels; a side may have at most {limits.side:,}"
                raise InvalidInput(text, field=field)
            if image.mode in _UNDEFINED:
                raise InvalidInput(
                    "the image has 32 bits a channel; 8 and 16 are supported", field=field
                )
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many("far too many", field, limits) from error
    except UnidentifiedImageError as error:
        raise InvalidInput(
            f"the file is not an image in a supported format: {', '.join(FORMATS)}", field=field
        ) from error
    except _READER_ERRORS as error:
        raise InvalidInput(
            f"the image is truncated or damaged: {str(error)[:200] or type(error).__name__}",
            field=field,
        ) from error


def _too_many(found: str, field: str, limits: ImageLimits) -> InvalidInput:
    return InvalidInput(
        f"the image has {found} pixels; at most {limits.pixels:,} are allowed. Send a smaller copy",
        field=field,
    )


def _orientation(image: Image.Image) -> int:
    """Return the orientation, 1 to 8; 1 (upright) if the EXIF data is missing or damaged, and for
    TIFF, which Pillow already returns upright.
    """
    if image.format == "TIFF":
        return 1
    try:
        # PngImageFile.getexif would decode the image to read data after it.
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except _READER_ERRORS:
        return 1
    return value if isinstance(value, int) and value in _UPRIGHT else 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    method = _UPRIGHT.get(orientation)
    return image if method is None else image.transpose(method)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in _WIDE_GREY:
        grey = np.asarray(image)
        high = (grey >> 8).astype(np.uint8)
        clear = image.info.get("transparency")
        return Image.fromarray(
            high if clear is None else np.where(grey == clear, np.uint8(255), high)
        ).convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")  # convert would copy it
    # Work in strips: an image with transparency would be in memory four times.
    made = Image.new("RGB", image.size)
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        strip = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        made.paste(Image.alpha_composite(white, strip).convert("RGB"), box)
    return made
