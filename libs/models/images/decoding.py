"""Bytes of an image file to pixels, safely: an allow-list of formats, and limits that are checked
before anything is decoded.

Runs on the worker's prepare threads; Pillow releases the interpreter's lock while it decodes. What
a file means is as in transformers' `load_image` and its `pil` image processors: the EXIF
orientation is applied, transparency is composited on white, colour profiles are ignored. One thing
differs: a grey picture of 16 bits keeps its high bytes, as Pillow does for 16 bits of red, green
and blue, where `convert("RGB")` would make nearly all of it white.
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
"""By Pillow's names. AVIF is refused where Pillow was built without it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`bytes`: of the file. `pixels`: height × width, as the file's header has them. `side`: of the
    longer one; resizing takes memory by the side: 0.6 GiB for 20,000,000 × 1 pixels by Pillow, 1.2
    GiB by the kernel."""

    bytes: int = 32 << 20
    pixels: int = 50_000_000
    side: int = 1 << 17


LIMITS: Final = Limits()

_STRIP_PIXELS: Final = 1 << 20
"""Pixels that are composited on white at a time."""

_WIDE_GREY = ("I;16", "I;16L", "I;16B", "I;16N")
_UNDEFINED = ("I", "F")  # 32 bits a pixel: no range is agreed on

# What turns a stored picture upright, by its EXIF orientation. From 5 on, height and width change
# places.
_UPRIGHT: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Pillow's readers are written for honest files: for others they raise what Python raises for wrong
# offsets, lengths and numbers.
_READERS_RAISE = (
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


def header_size(data: bytes, field: str, limits: Limits = LIMITS) -> tuple[int, int]:
    """Height and width of the picture that `decode` makes of a file, from its header: nothing is
    decoded.

    Raises as `decode`. A PNG whose orientation comes after its pixels is measured as it is stored.
    """
    if isinstance(data, Drawn):
        return data.size(field)
    with _opened(data, field, limits) as image:
        height, width = image.height, image.width
        return (width, height) if _orientation(image) >= 5 else (height, width)


def decode(data: bytes, field: str, limits: Limits = LIMITS) -> Pixels:
    """The first picture of a file. `field`: the item's path in the request, for errors.

    Raises InvalidInput for a file that is too large, of no format of FORMATS, truncated or damaged.
    """
    with decoding(data, field, limits) as image:
        return np.asarray(image)


@contextmanager
def decoding(data: bytes, field: str, limits: Limits = LIMITS) -> Iterator[Image.Image]:
    """As `decode`, an image of mode RGB: for whoever resizes it, since each copy to an array or
    back takes 0.7 ms a megapixel.

    The context holds the memory for it (`memory.py`), and is entered before anything is decoded.
    Raises as `memory.reserved` too.
    """
    if isinstance(data, Drawn):
        # Drawn before the memory is reserved: the process that draws may take seconds, and others
        # would wait for that memory.
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
def _opened(data: bytes, field: str, limits: Limits) -> Iterator[Image.Image]:
    """The image with its header read and within the limits. What its reader raises becomes
    InvalidInput.
    """
    if len(data) > limits.bytes:
        raise InvalidInput(
            f"the image has {len(data):,} bytes; at most {limits.bytes:,} are taken", field=field
        )
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > limits.pixels:
                raise _too_many(f"{image.width:,} x {image.height:,}", field, limits)
            if max(image.size) > limits.side:
                text = f"the image has {image.width:,} x {image.height:,} pixels; a side may have at most {limits.side:,}"
                raise InvalidInput(text, field=field)
            if image.mode in _UNDEFINED:
                raise InvalidInput(
                    "the image has 32 bits a channel; 8 and 16 are served", field=field
                )
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many("far too many", field, limits) from error
    except UnidentifiedImageError as error:
        raise InvalidInput(
            f"the bytes are no image of a format that is served: {', '.join(FORMATS)}", field=field
        ) from error
    except _READERS_RAISE as error:
        raise InvalidInput(
            f"the image is truncated or damaged: {str(error)[:200] or type(error).__name__}",
            field=field,
        ) from error


def _too_many(found: str, field: str, limits: Limits) -> InvalidInput:
    return InvalidInput(
        f"the image has {found} pixels; at most {limits.pixels:,} are taken. Send a smaller copy",
        field=field,
    )


def _orientation(image: Image.Image) -> int:
    """1 to 8; 1, upright, where the EXIF data has none or is damaged, and for TIFF, which Pillow's
    reader turns itself.
    """
    if image.format == "TIFF":
        return 1
    try:
        # Not PngImageFile.getexif, which decodes the picture to look behind it.
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except _READERS_RAISE:
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
        return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it
    # In strips: an image with transparency would be in memory four times.
    made = Image.new("RGB", image.size)
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        strip = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        made.paste(Image.alpha_composite(white, strip).convert("RGB"), box)
    return made
