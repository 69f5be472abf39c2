"""Images as arguments: the bytes sent for files, bytes, arrays and Pillow images, and errors that
name the item.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import shoal
from numpy.typing import NDArray
from PIL import ExifTags, Image
from shoal.errors import InvalidInput
from shoal.requests import items as images
from shoal.requests.extract import ExtractPlan
from shoal.requests.items import (
    item_lengths,
    item_list,
    item_message,
    item_messages,
    max_request_items,
)
from shoal.tasks import Entities, Item, Regions

PIXELS: NDArray[np.uint8] = np.random.default_rng(3).integers(0, 255, (31, 20, 3), dtype=np.uint8)


def sent(item: Item) -> NDArray[np.uint8]:
    """Return the pixels that are sent for an item."""
    return np.asarray(Image.open(BytesIO(item_message("items[0]", item).image.data)))


@pytest.mark.parametrize(
    "pixels",
    [
        PIXELS,
        PIXELS[:, :, 0],
        PIXELS[:, :, :1],
        np.dstack([PIXELS, PIXELS[:, :, 0]]),
        PIXELS[::2, ::-1],
    ],
)
def test_arrays_lose_nothing(pixels: NDArray[np.uint8]) -> None:
    assert (sent(pixels) == pixels.squeeze()).all()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "1", "P", "CMYK", "YCbCr"])
def test_images_of_pillow_lose_nothing(mode: str) -> None:
    image = Image.fromarray(PIXELS).convert(mode)
    found = Image.open(BytesIO(item_message("items[0]", image).image.data))
    assert (np.asarray(found.convert("RGB")) == np.asarray(image.convert("RGB"))).all()


def test_orientation_is_kept_with_the_image() -> None:
    image = Image.fromarray(PIXELS)
    image.getexif()[ExifTags.Base.Orientation] = 6
    found = Image.open(BytesIO(item_message("items[0]", image).image.data))
    assert found.getexif()[ExifTags.Base.Orientation] == 6


def test_files_and_bytes_are_sent_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    Image.fromarray(PIXELS).save(file, "JPEG")
    assert item_message("items[0]", file).image.data == file.read_bytes()
    assert item_message("items[0]", file.read_bytes()).image.data == file.read_bytes()
    assert item_lengths([file, b"12345", "123", shoal.Parts("12", b"345")]) == [
        file.stat().st_size,
        5,
        3,
        5,
    ]


def test_one_image_is_a_list_of_one() -> None:
    for one in (
        b"png",
        Path("a.png"),
        PIXELS,
        PIXELS[:, :, 0],
        Image.fromarray(PIXELS),
        shoal.Parts("a"),
        "text",
    ):
        assert len(item_list(one)) == 1
    assert len(item_list(np.stack([PIXELS, PIXELS, PIXELS]))) == 3
    assert item_list(np.array(["a", "b"])) == ["a", "b"]


PNG_URI = "data:image/png;base64," + base64.b64encode(b"png").decode()
PDF_URI = "data:application/pdf;base64," + base64.b64encode(b"%PDF-1.7").decode()


@pytest.mark.parametrize(
    "uri",
    [PNG_URI, PNG_URI.replace("data:image", "DATA:Image"), PNG_URI.replace(";", ";name=a.png;", 1)],
)
def test_text_that_is_an_image_in_base64_is_sent_as_the_image(uri: str) -> None:
    assert item_message("items[0]", uri).image.data == b"png"
    assert item_message("items[0]", shoal.Parts("what is", uri)).parts[1].image.data == b"png"


def test_text_that_is_a_pdf_in_base64_is_sent_as_the_document() -> None:
    assert item_message("items[0]", PDF_URI).parts[0].document.data == b"%PDF-1.7"
    assert max_request_items([PDF_URI]) == max_request_items([shoal.Document(b"%PDF-1.7")])


@pytest.mark.parametrize(
    "text",
    [
        "data: a word",
        "data:image/png is a media type",
        "see " + PNG_URI,
        "data:,a",
        "Data: 3; base64, 4",
    ],
)
def test_text_that_does_not_begin_with_a_file_stays_text(text: str) -> None:
    assert item_message("items[0]", text).text == text


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        (PNG_URI + " and a text", "is not base64 after that"),
        (
            "data:audio/wav;base64,AAAA",
            (
                r"file of the type audio/wav: data:image/…;base64, and "
                r"data:application/pdf;base64, "
                r"are read"
            ),
        ),
        ("data:;base64,AAAA", "file of the type text/plain"),
    ],
)
def test_file_in_text_that_cannot_be_read_is_refused(uri: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        item_messages("items", ["a", uri], [0, 1])
    assert caught.value.field == "items[1]"


class FakeFrame:
    """A DataFrame as far as the client looks at it: iterating it gives the names of its columns."""

    def __init__(self, columns: list[str]) -> None:
        self.columns = columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


class FakeSeries:
    """A Series as far as the client looks at it."""

    def __iter__(self) -> Iterator[str]:
        return iter(["a", "b"])


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (
            FakeFrame(["text", "id"]),
            (
                r"items is a FakeFrame, a table: name the column with the items, such as "
                r'df\["text"\]\..*text, id'
            ),
        ),
        (pyarrow.table({"words": ["a", "b"]}), r'items is a Table, a table: .* df\["words"\]'),
        ({"a": "first text", "b": "second text"}, r"items is a dict: send its values as a list"),
        ({"a", "b"}, "items is a set, which has no order"),
        (3, "items is a int; it must be a text, an image, a document, or a list of these"),
        (None, "items is a NoneType; it must be"),
    ],
)
def test_argument_that_does_not_iterate_over_items_is_refused(items: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        item_list(items)
    assert caught.value.field == "items"


def test_series_are_lists_of_items() -> None:
    series: Any = FakeSeries()
    assert item_list(series) == ["a", "b"]


@pytest.mark.parametrize("missing", [float("nan"), np.float32("nan"), None])
def test_missing_value_of_a_series_is_named_with_its_row(missing: Any) -> None:
    """Pandas marks missing texts by NaN or None."""
    with pytest.raises(InvalidInput, match=rf"items\[1\] is {missing}, a missing value; it must"):
        item_messages("items", ["a", "b", missing], [0, 2])


def test_one_label_is_not_split_into_characters() -> None:
    plan = ExtractPlan(["text"], Entities(labels="person"), "org/model", {})
    assert list(plan.whole().entities.labels) == ["person"]
    described: Any = {"person": "a human"}
    with pytest.raises(
        InvalidInput, match=r"entities.labels is a dict; it must be a list of labels"
    ):
        ExtractPlan(["text"], Entities(labels=described), "org/model", {})


def test_labels_of_regions_count_as_answers_that_may_be_generated() -> None:
    plan = ExtractPlan(["a"], Regions(labels=list(map(str, range(256)))), "org/model", {})
    assert 1 <= plan.max_items <= 1_048_576 // (256 * 256), "a router refuses more"


def test_parts_keep_their_order() -> None:
    message = item_message("items[0]", shoal.Parts("what is", b"png", "this?"))
    assert [part.WhichOneof("content") for part in message.parts] == ["text", "image", "text"]


@pytest.mark.parametrize(
    ("item", "field", "words"),
    [
        (Path("/nowhere/a.png"), "items[1]", "/nowhere/a.png does not exist"),
        (Path("/"), "items[1]", "cannot be read: Is a directory"),
        (np.zeros((2, 3, 5), np.uint8), "items[1]", r"array of shape \(2, 3, 5\)"),
        (np.zeros((4, 4, 3), np.float32), "items[1]", "is a ndarray; it must be"),
        (Image.new("F", (3, 3)), "items[1]", "mode F, 32 bits a pixel"),
        (
            shoal.Parts("a", Path("/nowhere/b.png")),
            "items[1].parts[1]",
            "/nowhere/b.png does not exist",
        ),
    ],
)
def test_errors_name_the_item(item: Item, field: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        item_messages("items", ["a", item], [0, 1])
    assert caught.value.field == field


def test_image_too_large_for_a_request_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 100)
    (tmp_path / "a.png").write_bytes(bytes(101))
    for item in (bytes(101), tmp_path / "a.png", PIXELS):
        with pytest.raises(InvalidInput, match="a request has at most 100") as caught:
            item_messages("items", ["a", item], [0, 1])
        assert caught.value.field == "items[1].image.data"
