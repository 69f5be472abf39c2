"""Image files to pixels: what every format and mode means, and files made to harm."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from libs.errors import InvalidInput, NoCapacity
from libs.models.images import decoding
from libs.models.images.decoding import LIMITS, ImageLimits, decode, header_size
from libs.models.images.memory import BYTES_A_PIXEL, WEBP_BYTES_A_PIXEL, reserving

FIELD = "items[3].image"
NUMBERS = np.random.default_rng(0)
PHOTO = Image.fromarray(NUMBERS.integers(0, 256, (37, 53, 3), np.uint8)).resize((53, 37))


def encode_image(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(
    width: int, height: int, body: bytes, *yield_point: bytes, bits: int = 8, colour: int = 2
) -> bytes:
    """A PNG of given header and decompressed body."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + b"".join(yield_point)
        + chunk(b"IDAT", zlib.compress(body, 9))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "AVIF", "MPO"])
def test_every_format(kind: str) -> None:
    data = encode_image(PHOTO, kind)
    pixels = decode(data, FIELD)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (37, 53, 3)
    np.testing.assert_array_equal(pixels, np.asarray(opened(data).convert("RGB")))
    assert header_size(data, FIELD) == (37, 53)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encode_image(PHOTO, kind, exif=exif)
    wanted = ImageOps.exif_transpose(opened(data)).convert("RGB")
    pixels = decode(data, FIELD)
    np.testing.assert_array_equal(pixels, np.asarray(wanted))
    assert header_size(data, FIELD) == pixels.shape[:2]


# Pillow warns of damaged metadata that it skips, and tests turn warnings into errors.
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_damaged_exif_counts_as_none() -> None:
    data = encode_image(PHOTO, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\x01\x12" * 40)
    np.testing.assert_array_equal(decode(data, FIELD), np.asarray(opened(data).convert("RGB")))


@pytest.mark.parametrize("mode", ["LA", "PA", "P", "RGBA"])
def test_image_composited_in_strips_is_the_one_composited_whole(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_STRIP_PIXELS", 200)
    drawn = Image.fromarray(NUMBERS.integers(0, 256, (37, 53, 4), np.uint8), "RGBA")
    image = drawn.convert(mode) if mode != "P" else drawn.convert("RGB").quantize(17)
    options = {"transparency": bytes(range(0, 255, 15))} if mode == "P" else {}
    data = encode_image(image, "TIFF" if mode == "PA" else "PNG", **options)
    whole = opened(data).convert("RGBA")
    white = Image.new("RGBA", whole.size, "white")
    np.testing.assert_array_equal(
        decode(data, FIELD), np.asarray(Image.alpha_composite(white, whole).convert("RGB"))
    )


@pytest.mark.parametrize(
    ("kind", "bytes_a_pixel"), [("PNG", BYTES_A_PIXEL), ("WEBP", WEBP_BYTES_A_PIXEL)]
)
def test_memory_is_reserved_before_an_image_is_decoded_and_held_until_it_was_resized(
    kind: str, bytes_a_pixel: int
) -> None:
    held: list[int] = []

    @contextmanager
    def reserve(needed: int, field: str) -> Iterator[None]:
        assert field == FIELD
        held.append(needed)
        try:
            yield
        finally:
            held.pop()

    with reserving(reserve):
        with decoding.decoding(encode_image(PHOTO, kind), FIELD) as image:
            assert image.size == PHOTO.size
            assert held == [37 * 53 * bytes_a_pixel]
        assert not held
        with suppress(InvalidInput):
            decode(encode_image(PHOTO, kind)[:-40], FIELD)
        assert not held


def test_image_without_memory_is_not_decoded() -> None:
    def refuse(needed: int, field: str) -> AbstractContextManager[None]:
        raise NoCapacity("no memory", field=field)

    with reserving(refuse), pytest.raises(NoCapacity):
        decode(encode_image(PHOTO)[:60], FIELD)  # without pixels


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_modes_of_png(mode: str) -> None:
    data = encode_image(PHOTO.convert("RGBA").convert(mode))
    whole = opened(data).convert("RGBA")
    white = Image.new("RGBA", whole.size, "white")
    np.testing.assert_array_equal(
        decode(data, FIELD), np.asarray(Image.alpha_composite(white, whole).convert("RGB"))
    )


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_transparent_is_white(kind: str) -> None:
    """The colours of transparent pixels are hidden, half transparent ones are mixed with white."""
    pixels = np.zeros((4, 2, 4), np.uint8)
    pixels[:2] = (200, 10, 30, 0)
    pixels[2:] = (100, 50, 0, 51)
    got = decode(encode_image(Image.fromarray(pixels), kind, lossless=True), FIELD)
    assert (got[:2] == 255).all()
    assert (got[2:] == (224, 214, 204)).all()


def test_transparent_colours_of_palette_grey_and_rgb() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert decode(encode_image(palette, transparency=0), FIELD).tolist() == [
        [[255, 255, 255], [40, 50, 60]]
    ]
    assert decode(encode_image(palette, transparency=bytes((255, 51))), FIELD).tolist() == [
        [[10, 20, 30], [212, 214, 216]]
    ]
    grey = Image.fromarray(np.array([[7, 9]], np.uint8))
    assert decode(encode_image(grey, transparency=7), FIELD)[0, :, 0].tolist() == [255, 9]
    colours = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    assert decode(encode_image(colours, transparency=(1, 2, 3)), FIELD).tolist() == [
        [[255, 255, 255], [4, 5, 6]]
    ]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_of_grey(kind: str) -> None:
    values = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    pixels = decode(encode_image(Image.fromarray(values), kind), FIELD)
    np.testing.assert_array_equal(
        pixels, np.repeat((values >> 8).astype(np.uint8)[..., None], 3, axis=2)
    )


def test_16_bits_with_a_transparent_value() -> None:
    values = np.array([[0x1234, 0x1235, 0xFF00]], ">u2")
    grey = png(3, 1, b"\0" + values.tobytes(), chunk(b"tRNS", b"\x12\x34"), bits=16, colour=0)
    assert decode(grey, FIELD)[0, :, 0].tolist() == [255, 0x12, 0xFF]


def test_16_bits_of_colour() -> None:
    values = NUMBERS.integers(0, 65536, (3, 5, 3)).astype(">u2")
    data = png(5, 3, b"".join(b"\0" + row.tobytes() for row in values), bits=16)
    np.testing.assert_array_equal(decode(data, FIELD), (values >> 8).astype(np.uint8))


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk(kind: str) -> None:
    data = encode_image(PHOTO.convert("CMYK"), kind)
    pixels = decode(data, FIELD)
    np.testing.assert_array_equal(pixels, np.asarray(opened(data).convert("RGB")))
    assert np.abs(pixels.astype(int) - np.asarray(PHOTO)).mean() < 60, (
        "an inverted picture would be far off"
    )


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_image_of_several(kind: str) -> None:
    frames = [Image.new("RGB", (9, 7), colour) for colour in ("red", "blue", "green")]
    pixels = decode(encode_image(frames[0], kind, save_all=True, append_images=frames[1:]), FIELD)
    assert pixels.shape == (7, 9, 3)
    assert np.abs(pixels.astype(int) - (255, 0, 0)).max() < 5


@pytest.mark.parametrize("size", [(1, 300), (300, 1), (1, 1)])
def test_thin_images(size: tuple[int, int]) -> None:
    assert decode(encode_image(Image.new("RGB", size)), FIELD).shape == (size[1], size[0], 3)


def refused(data: bytes, *, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(InvalidInput) as caught:
        decode(data, FIELD, limits)
    assert caught.value.field == FIELD
    return str(caught.value)


def test_limits_are_checked_from_the_header() -> None:
    limits = ImageLimits(bytes=1 << 20, pixels=37 * 53)
    whole = encode_image(PHOTO)
    assert decode(whole, FIELD, limits).shape == (37, 53, 3)
    assert "the image has 54 x 37 pixels; at most 1,961 are allowed" in refused(
        encode_image(Image.new("RGB", (54, 37))), limits=limits
    )
    assert "bytes; at most 100 are allowed" in refused(whole, limits=ImageLimits(bytes=100))
    for check in (decode, header_size):
        with pytest.raises(InvalidInput, match="pixels; at most 1,961") as caught:
            check(encode_image(Image.new("RGB", (54, 37))), FIELD, limits)
        assert caught.value.field == FIELD


# Pillow warns of images from 89 million pixels on, which is an error in these tests, and refuses
# those of twice as many.
@pytest.mark.parametrize(
    "size",
    [(50_000, 50_000), (10_000, 10_000), (7_100, 7_100), (2**31 - 1, 1), (2**31 - 1, 2**31 - 1)],
)
@pytest.mark.filterwarnings("default::PIL.Image.DecompressionBombWarning")
def test_bombs(size: tuple[int, int]) -> None:
    """A few bytes that promise gigabytes; refused before any memory is taken for them."""
    body = zlib.compress(b"\0" * 100_000)
    bombs = [png(*size, body)]
    if max(size) < 1 << 16:
        bombs.append(
            b"GIF89a"
            + struct.pack("<HHBBB", *size, 0, 0, 0)
            + b","
            + struct.pack("<HHHHB", 0, 0, *size, 0)
            + b"\x08\0;"
        )
        bombs.append(
            b"BM"
            + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, *size, 1, 24, 0, 0, 0, 0, 0, 0)
            + bytes(46)
        )
    for data in bombs:
        tracemalloc.start()
        message = refused(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert "pixels; at most 50,000,000 are allowed" in message
        assert peak < 4 << 20


@pytest.mark.parametrize("size", [(131_073, 1), (1, 131_073)])
def test_side_that_is_too_long(size: tuple[int, int]) -> None:
    """Weights of a resize are as many as the side has pixels, several times over: 20,000,000 x 1
    took Pillow 0.6 GiB.
    """
    data = encode_image(Image.new("RGB", size))
    for check in (decode, header_size):
        with pytest.raises(InvalidInput, match="a side may have at most 131,072") as caught:
            check(data, FIELD)
        assert caught.value.field == FIELD
    assert decode(encode_image(Image.new("RGB", (131_072, 1))), FIELD).shape == (1, 131_072, 3)


def test_compressed_text_in_a_png_is_bounded() -> None:
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(8 << 20), 9))
    message = refused(png(1, 1, b"\0\1\2\3", text))
    assert "truncated or damaged" in message


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "AVIF"])
def test_truncated_and_damaged_files(kind: str) -> None:
    """Whatever is cut off or overwritten, the answer is pixels or InvalidInput."""
    noise = Image.fromarray(NUMBERS.integers(0, 256, (40, 40, 3), np.uint8))
    data = encode_image(noise, kind)
    for kept in (0, 1, 4, 12, 30, len(data) // 2, len(data) * 9 // 10):
        refused(data[:kept])
    for _ in range(150):
        broken = bytearray(data)
        for place in NUMBERS.integers(0, min(len(data), 600), 4):
            broken[place] = NUMBERS.integers(256)
        for check in (decode, header_size):
            with suppress(InvalidInput):
                check(bytes(broken), FIELD, ImageLimits(pixels=100_000))


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("picture.png", encode_image(PHOTO))
    return out.getvalue()


OTHERS: dict[str, Callable[[], bytes]] = {
    "nothing": bytes,
    "text": lambda: b"no image at all",
    "zip": zipped,
    "svg": lambda: (
        b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    ),
    "eps": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n",
    "pdf": lambda: b"%PDF-1.7\n",
    "ppm": lambda: encode_image(PHOTO, "PPM"),
    "ico": lambda: encode_image(PHOTO, "ICO"),
    "jpeg 2000": lambda: encode_image(PHOTO, "JPEG2000"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_formats_that_are_not_served(name: str) -> None:
    assert "not an image in a supported format: PNG, JPEG, WEBP" in refused(OTHERS[name]())


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_32_bits_a_channel_are_refused(kind: type[np.generic]) -> None:
    values: NDArray[np.generic] = np.ones((4, 4), kind)
    assert "32 bits a channel; 8 and 16 are supported" in refused(
        encode_image(Image.fromarray(values), "TIFF")
    )
