"""Images as items: convert files, bytes, arrays and Pillow images to the bytes of a request.

Bytes and files are sent as they are. Pixels become a PNG, which loses nothing; Pillow is needed
only for its own images.
"""

from __future__ import annotations

import struct
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any, Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InvalidInput
from shoal.tasks import Document, Item, PillowImage

MAX_IMAGE_BYTES: Final = 64 << 20
"""Maximum bytes of an image; a larger one fits into no request. Routers accept less still, and say
so.
"""
_COLOURS: Final = {1: 0, 3: 2, 4: 6}  # PNG's colour types by the number of channels
_PNG_MODES: Final = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_WIDE_MODES: Final = ("I", "F")
_LEVEL: Final = 1  # of zlib: others take several times as long for a few percent less


def is_image(item: object) -> bool:
    """Return True for one image, as opposed to a list of items."""
    return isinstance(item, (bytes, Path)) or is_pixels(item) or is_pillow(item)


def is_pixels(item: object) -> TypeGuard[NDArray[Any]]:
    return isinstance(item, np.ndarray) and item.ndim in (2, 3) and item.dtype == np.uint8


def is_pillow(item: object) -> TypeGuard[PillowImage]:
    """Without importing Pillow: whoever has such an image has imported it."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(item, pillow.Image)


def image_bytes(path: str, item: Item) -> bytes | None:
    """Return the file bytes of an image; None for any other item. Raises InvalidInput.

    Args:
        path: The position of the item in the arguments, for errors.
    """
    data: bytes | None = None
    if isinstance(item, bytes):
        data = item
    elif isinstance(item, Path):
        data = _read(path, item)
    elif is_pixels(item):
        data = _png(path, item)
    elif is_pillow(item):
        data = _saved(path, item)
    if data is not None and len(data) > MAX_IMAGE_BYTES:
        message = (
            f"{path} has {len(data):,} bytes; a request has at most {MAX_IMAGE_BYTES:,}. Send a "
            "smaller copy"
        )
        raise InvalidInput(message, field=f"{path}.image.data")
    return data


def document_bytes(path: str, document: Document) -> bytes:
    """Return the file's bytes. `path`: the item's place in the arguments. Raises InvalidInput."""
    file = document.file
    data = _read(path, file, "document") if isinstance(file, Path) else file
    if not isinstance(data, bytes):
        raise InvalidInput(
            f"{path} is a document of a {type(file).__name__}; it must be a Path or bytes",
            field=path,
        )
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidInput(
            f"{path} has {len(data):,} bytes; a request has at most {MAX_IMAGE_BYTES:,}",
            field=f"{path}.document.data",
        )
    return data


def image_length(item: Item) -> int:
    """Return about how many bytes the image will have; 0 for another item, or a file that does not
    exist.
    """
    if isinstance(item, bytes):
        return len(item)
    if is_pixels(item):
        return item.size
    if is_pillow(item):
        return item.width * item.height * 3
    try:
        return item.stat().st_size if isinstance(item, Path) else 0
    except OSError:
        return 0


def _read(path: str, file: Path, what: str = "image") -> bytes:
    try:
        if file.stat().st_size > MAX_IMAGE_BYTES:
            size = file.stat().st_size
            raise InvalidInput(
                f"{path}: {file} has {size:,} bytes; a request has at most {MAX_IMAGE_BYTES:,}",
                field=f"{path}.{what}.data",
            )
        return file.read_bytes()
    except FileNotFoundError:
        raise InvalidInput(f"{path}: the file {file} does not exist", field=path) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput(f"{path}: {file} cannot be read: {reason}", field=path) from None


def _saved(path: str, image: PillowImage) -> bytes:
    """Save the current frame of a Pillow image with its EXIF data, which holds a photo's
    orientation.
    """
    if image.mode in _WIDE_MODES:
        raise InvalidInput(
            f"{path} is an image of mode {image.mode}, 32 bits a pixel; 8 and 16 are served",
            field=path,
        )
    out = BytesIO()
    try:
        image = image if image.mode in _PNG_MODES else image.convert("RGB")
        image.save(out, "PNG", exif=image.getexif(), compress_level=_LEVEL)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInput(
            f"{path} is an image of Pillow that cannot be written as PNG: {error}", field=path
        ) from None
    return out.getvalue()


def _png(path: str, pixels: NDArray[Any]) -> bytes:
    """Encode uint8 pixels [height, width], or [height, width, 1, 3 or 4]."""
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    height, width, channels = pixels.shape
    if channels not in _COLOURS or not height or not width:
        shape = "height x width x 3 (colours), or 1 (grey), or 4 (with transparency)"
        raise InvalidInput(
            f"{path} is an array of shape {pixels.shape}; images have {shape}", field=path
        )
    rows = np.concatenate(
        [np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1
    )  # each begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), _LEVEL)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
