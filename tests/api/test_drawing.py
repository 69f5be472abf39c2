"""Regions drawn into their image: boxes in the upright image, the best on top, labels within the
image.
"""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image
from shoal.drawing import drawn
from shoal.extractions import Region


def picture(orientation: int = 1) -> bytes:
    """200 across, 100 down, white."""
    out = BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (200, 100), "white").save(out, "PNG", exif=exif)
    return out.getvalue()


def pixels(data: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    with Image.open(BytesIO(data)) as image:
        assert image.format == "PNG"
        return np.asarray(image)


def test_boxes_and_labels() -> None:
    found = pixels(
        drawn(picture(), [Region(50, 60, 90, 95, "cat", 0.9), Region(120, 60, 150, 95, "dog", 0.4)])
    )
    assert found.shape == (100, 200, 3)
    cat, dog = found[80, 50], found[80, 120]
    assert not (cat == 255).all()
    assert not (cat == dog).all()
    assert (found[80, 90] == cat).all()
    assert (found[80, 70] == 255).all()
    assert (found[60:95, 100:115] == 255).all()


def test_image_is_upright() -> None:
    found = pixels(drawn(picture(orientation=6), [Region(10, 150, 90, 190, "cat", 0.5)]))
    assert found.shape == (200, 100, 3)
    assert not (found[170, 10] == 255).all()


def test_best_lies_on_top() -> None:
    boxes = [Region(50, 50, 100, 90, "cat", 0.9), Region(50, 50, 100, 90, "dog", 0.8)]
    both, one = pixels(drawn(picture(), boxes)), pixels(drawn(picture(), boxes[:1]))
    assert (both[70, 50] == one[70, 50]).all()


def test_labels_stay_within_the_image_and_modes_are_turned_to_colours() -> None:
    edges = [
        Region(0, 0, 200, 100, "a rather long label", 1.0),
        Region(199, 99, 200, 100, "Straße", 0.1),
    ]
    for mode in ("L", "P", "RGBA", "1"):
        assert pixels(drawn(Image.new(mode, (200, 100)), edges)).shape == (100, 200, 3)
    assert pixels(drawn(picture(), [])).min() == 255
