"""Sizes of images from their headers, their price, and refusals by size, without decoding."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, features
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from libs.errors import InvalidInput, TaskNotSupported
from libs.image_size import PixelSize, read_image_size
from services.router.admission.validation import image_price, limits
from services.router.admission.validation.requests import check_encode, check_extract, check_score
from tests.router.parts import MODEL, card

FIXED = models_pb2.ImageInput(height=224, width=224, patch=32, extra_tokens=1, max_tokens=50)
FREE = models_pb2.ImageInput(short_side=40, patch=10, extra_tokens=1, max_tokens=1000)
FORMATS = [
    "PNG",
    "JPEG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    *(["AVIF"] if features.check("avif") else []),
]


def make_image_file(
    height: int, width: int, kind: str, mode: str = "RGB", **options: object
) -> bytes:
    out = BytesIO()
    Image.new(mode, (width, height)).save(out, kind, **options)
    return out.getvalue()


def png_header(height: int, width: int) -> bytes:
    """A file of a few bytes that says that it is so large."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


def picture(data: bytes) -> pb.Item:
    return pb.Item(image=pb.Image(data=data))


BOTH = (models_pb2.INPUT_KIND_TEXT, models_pb2.INPUT_KIND_IMAGE)


def begin_pull(*, inputs: tuple[models_pb2.InputKind, ...] = BOTH) -> models_pb2.ModelCard:
    found = card(tasks=[models_pb2.TASK_ENCODE, models_pb2.TASK_SCORE, models_pb2.TASK_CLASSIFY])
    found.inputs.extend(inputs)
    found.images.CopyFrom(FIXED)
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_size_of_every_format(kind: str) -> None:
    assert read_image_size(make_image_file(33, 70, kind)) == PixelSize(33, 70)


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {"progressive": True, "comment": b"c" * 60_000}),
        ("JPEG", "CMYK", {}),
        ("JPEG", "L", {"icc_profile": b"i" * 200_000}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("WEBP", "RGB", {"exif": b"Exif\0\0" + b"0" * 50}),
        ("TIFF", "RGB", {"big_tiff": False, "compression": "tiff_lzw"}),
        ("BMP", "1", {}),
    ],
)
def test_size_of_variants(kind: str, mode: str, options: dict[str, object]) -> None:
    assert read_image_size(make_image_file(20, 31, kind, mode, **options)) == PixelSize(20, 31)


@given(
    st.binary(max_size=200),
    st.sampled_from([make_image_file(5, 6, kind) for kind in FORMATS]),
    st.integers(0, 80),
)
def test_random_bytes_never_raise(noise: bytes, file: bytes, kept: int) -> None:
    """Neither raised nor taken long for."""
    for data in (noise, file[:kept], file[:kept] + noise):
        size = read_image_size(data)
        assert size is None or min(size) > 0
        assert image_price.image_tokens(size, FREE) <= FREE.max_tokens


def test_tokens_by_the_size() -> None:
    assert image_price.image_tokens(PixelSize(3000, 2000), FIXED) == 50
    assert image_price.image_tokens(None, FIXED) == 50
    assert image_price.image_tokens(PixelSize(100, 200), FREE) == 4 * 8 + 1
    assert image_price.image_tokens(PixelSize(1, 100_000), FREE) == 1000
    assert image_price.image_tokens(None, FREE) == 1000
    assert image_price.image_tokens(PixelSize(100, 200), None) == image_price.UNKNOWN_TOKENS
    assert (
        image_price.image_tokens(PixelSize(100, 200), models_pb2.ImageInput())
        == image_price.UNKNOWN_TOKENS
    )


def test_tokens_of_several_maps() -> None:
    """Grounding DINO has a short side of 800, a long one of at most 1,333, and maps of 8, 16, 32
    and 64 pixels a position.
    """
    maps = models_pb2.ImageInput(short_side=800, long_side=1333, patch=8, maps=4, max_tokens=22_000)
    assert (
        image_price.image_tokens(PixelSize(400, 400), maps)
        == 100 * 100 + 50 * 50 + 25 * 25 + 13 * 13
    )
    assert (
        image_price.image_tokens(PixelSize(333, 3333), maps) == 17 * 167 + 9 * 84 + 5 * 42 + 3 * 21
    )
    assert image_price.image_tokens(PixelSize(1, 4000), maps) == 1
    assert image_price.image_tokens(None, maps) == 22_000


def test_decompression_bomb_is_refused_by_header() -> None:
    item = pb.Item(
        parts=[pb.Part(text="a"), pb.Part(image=pb.Image(data=png_header(50_000, 50_000)))]
    )
    for items, field in (
        ([picture(png_header(50_000, 50_000))], "items[1].image.data"),
        ([item], "items[1].parts[1].image.data"),
    ):
        with pytest.raises(
            InvalidInput, match="2,500,000,000 pixels; at most 50,000,000 are allowed"
        ) as caught:
            check_encode(pb.EncodeRequest(model=MODEL, items=[pb.Item(text="a"), *items]), None)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (pb.Item(parts=[pb.Part()]), "items[0].parts[0]"),
        (pb.Item(parts=[pb.Part(text="a"), pb.Part(text="")]), "items[0].parts[1].text"),
        (pb.Item(parts=[pb.Part(image=pb.Image())]), "items[0].parts[0].image.data"),
        (pb.Item(parts=[pb.Part(text="a")] * 65), "items[0].parts"),
        (pb.Item(parts=[pb.Part(text="a" * (1 << 22))]), "items[0].parts"),
        (pb.Item(text="a", parts=[pb.Part(text="a")]), "items[0].parts"),
        (pb.Item(parts=[pb.Part(text="a")], entities=[pb.Entity(end=1)]), "items[0].entities"),
    ],
)
def test_invalid_parts_are_refused(item: pb.Item, field: str) -> None:
    request = pb.ExtractRequest(
        model=MODEL, items=[item], relations=pb.RelationsTask(labels=["a"], entity_labels=["b"])
    )
    with pytest.raises(InvalidInput) as caught:
        check_extract(request, None)
    assert caught.value.field == field


def test_unsupported_inputs_are_refused() -> None:
    shown, text = picture(make_image_file(9, 9, "PNG")), pb.Item(text="a")
    only_pictures = begin_pull(inputs=(models_pb2.INPUT_KIND_IMAGE,))
    check_encode(pb.EncodeRequest(model=MODEL, items=[shown]), only_pictures)
    with pytest.raises(TaskNotSupported, match="takes no texts") as caught:
        check_encode(pb.EncodeRequest(model=MODEL, items=[shown, text]), only_pictures)
    assert caught.value.field == "items[1].text"
    with pytest.raises(TaskNotSupported, match="takes no images, and the item is one") as caught:
        check_encode(pb.EncodeRequest(model=MODEL, items=[text, shown]), card())
    assert caught.value.field == "items[1].image"


def test_file_in_base64_that_is_sent_as_text_is_refused_with_the_cure() -> None:
    """No model may embed base64 as words, whatever its card says, and before a card is known."""
    items = [pb.Item(text="a"), pb.Item(text="data:image/png;base64,AAAA")]
    for known in (None, card(), begin_pull()):
        with pytest.raises(
            InvalidInput, match=r"send the bytes of an image as image\.data"
        ) as caught:
            check_encode(pb.EncodeRequest(model=MODEL, items=items), known)
        assert caught.value.field == "items[1].text"
    part = pb.Item(parts=[pb.Part(text="DATA:image/jpeg;BASE64,AAAA")])
    with pytest.raises(InvalidInput, match="is a file in base64"):
        check_score(
            pb.ScoreRequest(model=MODEL, query=part, documents=[pb.Item(text="a")]), begin_pull()
        )
    check_encode(
        pb.EncodeRequest(model=MODEL, items=[pb.Item(text="data:image/png is a media type")]),
        card(),
    )


def test_limit_is_the_workers() -> None:
    from libs.models.images.decoding import LIMITS

    assert limits.IMAGE_PIXELS.most == LIMITS.pixels
    assert limits.IMAGE.most <= LIMITS.bytes
