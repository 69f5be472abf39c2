"""The size of an image from its file's header, in pure Python, without decoding anything. Pure.

Routers refuse and price images by it, and workers decide by it how to prepare a job. A header that
is not understood here has no size; the worker's decoder, which has a reader for each format, then
refuses or reads the image.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

_SEGMENTS: Final = 512
"""Maximum segments of a JPEG before its frame: metadata is divided into pieces of 64 KiB."""
_ENTRIES: Final = 512
"""Maximum number of entries of a TIFF's directory."""
_BOXES_BYTES: Final = 64 << 10
"""Beginning of an AVIF's file in which its size is looked for."""

# Markers of JPEG that begin a frame; C4, C8 and CC between them mean something else.
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BARE: Final = frozenset((0x01, *range(0xD0, 0xD9)))
_WIDTH, _HEIGHT, _SHORT = 256, 257, 3  # tags and a type of TIFF


class PixelSize(NamedTuple):
    """Width and height in pixels, as the file is stored: an EXIF orientation is not applied."""

    height: int
    width: int


def read_image_size(data: bytes) -> PixelSize | None:
    """Return the size that a file's header names; None where it is of no known format, truncated,
    or names none.
    """
    try:
        found = _read(data)
    except (struct.error, IndexError):
        return None
    return found if found is not None and found.height > 0 and found.width > 0 else None


def _read(data: bytes) -> PixelSize | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
        width, height = struct.unpack_from(">II", data, 16)
        return PixelSize(height, width)
    if data.startswith(b"\xff\xd8"):
        return _jpeg(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    if data[:6] in (b"GIF87a", b"GIF89a"):
        width, height = struct.unpack_from("<HH", data, 6)
        return PixelSize(height, width)
    if data[:2] == b"BM":
        return _bmp(data)
    if data[:4] in (b"II*\0", b"MM\0*"):
        return _tiff(data, "<" if data[:1] == b"I" else ">")
    if data[4:12] in (b"ftypavif", b"ftypavis"):
        return _avif(data[:_BOXES_BYTES])
    return None


def _jpeg(data: bytes) -> PixelSize | None:
    at = 2
    for _ in range(_SEGMENTS):
        if data[at] != 0xFF:
            return None
        while data[at] == 0xFF:
            at += 1
        marker = data[at]
        at += 1
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 3)
            return PixelSize(height, width)
        if marker not in _BARE:
            (length,) = struct.unpack_from(">H", data, at)
            at += length
    return None


def _webp(data: bytes) -> PixelSize | None:
    kind = data[12:16]
    if kind == b"VP8X":
        return PixelSize(_24(data, 27) + 1, _24(data, 24) + 1)
    if kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return PixelSize((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return PixelSize(height & 0x3FFF, width & 0x3FFF)
    return None


def _24(data: bytes, at: int) -> int:
    return data[at] | data[at + 1] << 8 | data[at + 2] << 16


def _bmp(data: bytes) -> PixelSize:
    (header,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if header == 12 else "<ii", data, 18)
    return PixelSize(abs(height), width)  # Negative: rows are stored top down.


def _tiff(data: bytes, order: str) -> PixelSize | None:
    """Return the size in the first directory."""
    (at,) = struct.unpack_from(f"{order}I", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, at)
    found: dict[int, int] = {}
    for number in range(min(count, _ENTRIES)):
        tag, kind = struct.unpack_from(f"{order}HH", data, at + 2 + 12 * number)
        if tag in (_WIDTH, _HEIGHT):
            (found[tag],) = struct.unpack_from(
                f"{order}{'H' if kind == _SHORT else 'I'}", data, at + 2 + 12 * number + 8
            )
    return PixelSize(found[_HEIGHT], found[_WIDTH]) if len(found) == 2 else None


def _avif(data: bytes) -> PixelSize | None:
    """Return the largest of its images: transparency is one, too."""
    sizes, at = [], data.find(b"ispe")
    while at >= 0:
        width, height = struct.unpack_from(">II", data, at + 8)
        sizes.append(PixelSize(height, width))
        at = data.find(b"ispe", at + 4)
    return max(sizes, key=lambda size: size.height * size.width, default=None)
