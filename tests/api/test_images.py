"""Pictures as arguments: what is sent for files, bytes, arrays and images of Pillow, and errors that name the item."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import shoal
from numpy.typing import NDArray
from PIL import ExifTags, Image
from shoal.errors import InvalidInput
from shoal.requests import images
from shoal.requests.arguments import item_lengths, item_list, item_message, item_messages
from shoal.tasks import Item

PIXELS: NDArray[np.uint8] = np.random.default_rng(3).integers(0, 255, (31, 20, 3), dtype=np.uint8)


def sent(item: Item) -> NDArray[np.uint8]:
    """The pixels of what is sent for an item."""
    return np.asarray(Image.open(BytesIO(item_message("items[0]", item).image.data)))


@pytest.mark.parametrize(
    "pixels", [PIXELS, PIXELS[:, :, 0], PIXELS[:, :, :1], np.dstack([PIXELS, PIXELS[:, :, 0]]), PIXELS[::2, ::-1]]
)
def test_arrays_lose_nothing(pixels: NDArray[np.uint8]) -> None:
    assert (sent(pixels) == pixels.squeeze()).all()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "1", "P", "CMYK", "YCbCr"])
def test_images_of_pillow_lose_nothing(mode: str) -> None:
    image = Image.fromarray(PIXELS).convert(mode)
    found = Image.open(BytesIO(item_message("items[0]", image).image.data))
    assert (np.asarray(found.convert("RGB")) == np.asarray(image.convert("RGB"))).all()


def test_an_orientation_goes_with_the_picture() -> None:
    image = Image.fromarray(PIXELS)
    image.getexif()[ExifTags.Base.Orientation] = 6
    found = Image.open(BytesIO(item_message("items[0]", image).image.data))
    assert found.getexif()[ExifTags.Base.Orientation] == 6


def test_files_and_bytes_are_sent_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    Image.fromarray(PIXELS).save(file, "JPEG")
    assert item_message("items[0]", file).image.data == file.read_bytes()
    assert item_message("items[0]", file.read_bytes()).image.data == file.read_bytes()
    assert item_lengths([file, b"12345", "123", shoal.Parts("12", b"345")]) == [file.stat().st_size, 5, 3, 5]


def test_one_picture_is_a_list_of_one() -> None:
    for one in (b"png", Path("a.png"), PIXELS, PIXELS[:, :, 0], Image.fromarray(PIXELS), shoal.Parts("a"), "text"):
        assert len(item_list(one)) == 1
    assert len(item_list(np.stack([PIXELS, PIXELS, PIXELS]))) == 3
    assert item_list(np.array(["a", "b"])) == ["a", "b"]


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
        (shoal.Parts("a", Path("/nowhere/b.png")), "items[1].parts[1]", "/nowhere/b.png does not exist"),
    ],
)
def test_errors_name_the_item(item: Item, field: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        item_messages("items", ["a", item], [0, 1])
    assert caught.value.field == field


def test_what_fits_into_no_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    (tmp_path / "a.png").write_bytes(bytes(101))
    for item in (bytes(101), tmp_path / "a.png", PIXELS):
        with pytest.raises(InvalidInput, match="a request has at most 100") as caught:
            item_messages("items", ["a", item], [0, 1])
        assert caught.value.field == "items[1].image.data"
