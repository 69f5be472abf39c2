"""Files declared as images: every format with false fields, through decoding and a model's
preparation.
"""

from __future__ import annotations

import resource
import struct
import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from io import BytesIO
from typing import Final

import numpy as np
from PIL import ExifTags, Image

from libs.errors import InvalidInput
from libs.models.images.decoding import FORMATS, ImageLimits, decode, header_size
from libs.models.images.patches import ImageInput, PatchSpec
from libs.models.images.processing import ImageProcessing
from libs.models.layers.spec import Config
from tests.fuzz import mutate
from tests.fuzz.target import Broken, Random, Target, plain

_LIMITS: Final = ImageLimits(bytes=1 << 20, pixels=1 << 20)
_FIELD: Final = "items[0].image"
# Memory for the maximum number of pixels: in 16 bits or with alpha, composited, rotated, resized,
# and the overhead of libraries.
_MAX_MEMORY: Final = 256 << 20

_MODES: Final = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F", "I")
_WIDE: Final = ("I;16", "F", "I")
_SIZES: Final = ((1, 1), (7, 5), (16, 16), (33, 20), (1, 60), (64, 1))
_WORDS: Final = (
    b"\x89PNG\r\n\x1a\n", b"IHDR", b"IDAT", b"IEND", b"PLTE", b"tRNS", b"acTL", b"fcTL", b"fdAT",
    b"zTXt", b"iTXt", b"iCCP",
    b"eXIf", b"\xff\xd8", b"\xff\xd9", b"\xff\xda", b"\xff\xc0", b"\xff\xc2", b"\xff\xc4",
    b"\xff\xdb", b"\xff\xdd",
    b"\xff\xe1", b"\xff\xe2MPF\0", b"Exif\0\0", b"ICC_PROFILE\0", b"Adobe\0", b"RIFF", b"WEBP",
    b"VP8 ", b"VP8L", b"VP8X",
    b"ANIM", b"ANMF", b"ALPH", b"II*\0", b"MM\0*", b"II+\0", b"GIF87a", b"GIF89a",
    b"\x21\xff\x0bNETSCAPE2.0", b"\x21\xf9\x04",
    b"BM", b"\x28\0\0\0", b"ftypavif", b"ftypheic", b"meta", b"iloc", b"ispe", b"iprp", b"av01",
    b"PK\x03\x04", b"%!PS", b"%PDF",
    b"<svg", b"P6\n", b"qoif", b"\0\0\1\0",
)  # fmt: skip


@cache
def _good() -> tuple[bytes, ...]:
    """Return a file of each format and mode that Pillow writes."""
    numbers = np.random.default_rng(7)
    found: list[bytes] = []
    for kind in FORMATS:
        for mode in _MODES:
            for number, size in enumerate(_SIZES):
                if (number + len(found)) % 3 and size != (33, 20):
                    continue
                noise = Image.fromarray(numbers.integers(0, 256, (size[1], size[0], 4), np.uint8))
                exif = Image.Exif()
                exif[ExifTags.Base.Orientation] = 1 + len(found) % 8
                out = BytesIO()
                picture = (
                    noise
                    if mode == "RGBA"
                    else noise.convert("L").convert(mode)
                    if mode in _WIDE
                    else noise.convert(mode)
                )
                options = (
                    {"save_all": True, "append_images": [noise]} if number == 2 else {"exif": exif}
                )
                try:
                    picture.save(out, kind, **options)
                except (OSError, ValueError, KeyError, TypeError):
                    continue
                found.append(out.getvalue())
    return tuple(found)


def _png(random: Random) -> bytes:
    """Return complete chunks with valid checksums and arbitrary fields."""
    width, height, body = (
        random.choice((1, 2, 9, 300, 4000, mutate.edge(random))) % (1 << 32) for _ in range(3)
    )
    header = struct.pack(
        ">IIBBBBB",
        width,
        height,
        random.choice((1, 2, 4, 8, 16, 3)),
        *(random.choice(row) for row in _PNG_BYTES),
    )
    chunks = [(b"IHDR", header)]
    for _ in range(random.randrange(4)):
        name = random.choice(
            (
                b"PLTE",
                b"tRNS",
                b"gAMA",
                b"acTL",
                b"fcTL",
                b"fdAT",
                b"zTXt",
                b"iTXt",
                b"iCCP",
                b"eXIf",
                b"IDAT",
            )
        )
        data = random.randbytes(random.choice((0, 1, 4, 8, 26, 768)))
        if name in (b"zTXt", b"iCCP"):
            data = b"name\0\0" + zlib.compress(bytes(random.choice((10, 1 << 10, 1 << 22))), 9)
        chunks.append((name, data))
    chunks.append((b"IDAT", zlib.compress(bytes(min(body, 1 << 22)), 9)))
    chunks.append((b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


_PNG_BYTES: Final = ((0, 2, 3, 4, 6, 1), (0, 0, 0, 1), (0, 0, 0, 1), (0, 0, 1, 2))


def _bmp(random: Random) -> bytes:
    width, height = (
        random.choice((1, 3, 40, -40, 70_000, mutate.edge(random, signed=True))) for _ in range(2)
    )
    bits, compression = (
        random.choice((1, 4, 8, 16, 24, 32, 0, 7)),
        random.choice((0, 1, 2, 3, 6, 9)),
    )
    numbers = [number % (1 << 32) for number in (width, height)]
    tail = struct.pack(
        "<IIiiII", random.choice((0, 100)), 0, 0, 0, mutate.edge(random) % (1 << 32), 0
    )
    head = (
        struct.pack(
            "<IIIHHI", random.choice((40, 40, 12, 64, 124, 3)), *numbers, 1, bits, compression
        )
        + tail
    )
    offset = random.choice((54, 14, 0, 1 << 31))
    return (
        b"BM"
        + struct.pack("<IHHI", 0, 0, 0, offset)
        + head
        + random.randbytes(random.randrange(2000))
    )


def _gif(random: Random) -> bytes:
    sides = [random.choice((0, 1, 20, 65_535, random.randrange(1 << 16))) for _ in range(6)]
    screen = b"GIF89a" + struct.pack(
        "<HHBBB", *sides[:2], random.choice((0, 0x80, 0x87, 0xF7)), 0, 0
    )
    place = struct.pack(
        "<HHHHB",
        *(random.choice((0, sides[2])), random.choice((0, sides[3]))),
        *sides[4:],
        random.choice((0, 0x40, 0x87)),
    )
    blocks = b"".join(
        bytes([len(one)]) + one
        for one in (random.randbytes(random.randrange(1, 255)) for _ in range(3))
    )
    return (
        screen
        + random.randbytes(random.choice((0, 6, 768)))
        + b","
        + place
        + bytes([random.randrange(13)])
        + blocks
        + b"\0;"
    )


def _tiff(random: Random) -> bytes:
    """Return a directory of tags with random counts, types and offsets."""
    order = random.choice("<>")
    tags = []
    for tag in (
        256,
        257,
        258,
        259,
        262,
        273,
        277,
        278,
        279,
        274,
        317,
        320,
        322,
        323,
        324,
        325,
        338,
        339,
        347,
        34675,
        700,
    ):
        if random.random() < 0.75:
            kind, count = (
                random.choice((1, 3, 4, 4, 5, 7, 12, 13, 99)),
                random.choice((1, 1, 3, 4, mutate.edge(random) % (1 << 32))),
            )
            value = random.choice(
                (
                    0,
                    1,
                    2,
                    5,
                    6,
                    7,
                    8,
                    9,
                    16,
                    32,
                    100,
                    32773,
                    34712,
                    50001,
                    mutate.edge(random) % (1 << 32),
                )
            )
            tags.append(
                struct.pack(
                    f"{order}HHII",
                    random.choice((tag, tag, tag, random.randrange(1 << 16))),
                    kind,
                    count,
                    value,
                )
            )
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8)
    after = struct.pack(f"{order}I", random.choice((0, 8, mutate.edge(random) % (1 << 32))))
    return (
        head
        + struct.pack(f"{order}H", len(tags))
        + b"".join(tags)
        + after
        + random.randbytes(random.randrange(1000))
    )


_LIARS: Final[Sequence[Callable[[Random], bytes]]] = (_png, _bmp, _gif, _tiff)


def _make(random: Random, known: Sequence[bytes]) -> bytes:
    if random.random() < 0.35:
        data = random.choice(_LIARS)(random)
        return data if random.random() < 0.7 else mutate.mutated(random, data, _WORDS)
    good = _good()
    data = random.choice(known) if known and random.random() < 0.2 else random.choice(good)
    return mutate.mutated(random, data, _WORDS, good)


def _input(size: dict[str, object], patches: PatchSpec, kind: str) -> ImageInput:
    return ImageInput(ImageProcessing.from_config(Config(size), kind), patches, _LIMITS)


_INPUTS: Final = (
    _input({"size": {"height": 32, "width": 32}}, PatchSpec(8, 16, (2, 2)), "SiglipImageProcessor"),
    _input(
        {"size": {"shortest_edge": 28}, "do_center_crop": False},
        PatchSpec(8, 14, (2, 2), resampled=True, registers=4),
        "BitImageProcessor",
    ),
    _input(
        {"max_num_patches": 64},
        PatchSpec(8, 16, (4, 4), class_token=False, resampled=True),
        "Siglip2ImageProcessor",
    ),
    _input(
        {"do_resize": False, "do_center_crop": False},
        PatchSpec(8, 14, (2, 2), resampled=True),
        "BitImageProcessor",
    ),
)


def _try(data: bytes) -> None:
    """Raise InvalidInput, or check that the size from the header, the pixels and the priced tokens
    agree.
    """
    before = _peak()
    with warnings.catch_warnings():
        # Pillow warns about damaged metadata that it skips, and about bombs as the worker detects
        # them.
        warnings.simplefilter("ignore")
        found = _decoded(data)
        for model in _INPUTS:
            _prepared(model, data, found)
    if (grown := _peak() - before) > _MAX_MEMORY:
        raise Broken(f"memory grew by {grown >> 20} MiB for a file of {len(data)} bytes")


def _decoded(data: bytes) -> tuple[int, int] | None:
    """Return height and width if the file is accepted."""
    try:
        size = header_size(data, _FIELD, _LIMITS)
    except InvalidInput as refused:
        _check(refused)
        size = None
    try:
        pixels = decode(data, _FIELD, _LIMITS)
    except InvalidInput as refused:
        _check(refused)
        return None
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise Broken(f"the pixels are {pixels.dtype} {pixels.shape}")
    if size is None:
        raise Broken("a file is decoded whose header is refused")
    height, width = pixels.shape[:2]
    if height * width > _LIMITS.pixels:
        raise Broken("more pixels than the limits allow")
    return height, width


def _prepared(model: ImageInput, data: bytes, found: tuple[int, int] | None) -> None:
    try:
        sequence = model.sequence(data, _FIELD)
    except InvalidInput as refused:
        _check(refused)
        return
    if found is None or sequence.rows is None:
        raise Broken("a file is prepared that is not decoded")
    height, width = sequence.rows.values.shape[:2]
    if (
        sequence.tokens != model.patches.count_tokens(height, width)
        or len(sequence.rows.places) != sequence.tokens - model.patches.before
    ):
        raise Broken("tokens and patches differ")
    if sequence.tokens > model.patches.most:
        raise Broken("more tokens than the model takes")


def _check(refused: InvalidInput) -> None:
    if refused.field != _FIELD or not str(refused) or len(str(refused)) > 1000:
        raise Broken(f"refused as {refused.field!r}: {str(refused)[:100]!r}")


def _peak() -> int:
    """Return the peak memory of this process in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


TARGETS: Final = (Target("images", _make, plain(_try), hang_seconds=10.0),)
