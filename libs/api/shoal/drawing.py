"""Regions drawn into their picture. Needs Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from shoal.results import Region

if TYPE_CHECKING:
    from PIL.Image import Image

# Told apart by people who see red and green alike, too (Okabe and Ito).
_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")


def drawn(image: bytes | Image, regions: Sequence[Region]) -> bytes:
    """A PNG of the picture with a box for each region, its label and its score; the best lie on
    top.

    `image`: the file that was sent, or what Pillow opened of it. Like the mesh, it is turned
    upright by its EXIF orientation first. Labels have a colour each, in their order among
    `regions`. Raises ImportError without Pillow, and what Pillow raises for a file that it cannot
    read.
    """
    from PIL import Image, ImageDraw, ImageFont, ImageOps

    opened = Image.open(BytesIO(image)) if isinstance(image, bytes) else image
    canvas = ImageOps.exif_transpose(opened).convert("RGB")
    draw = ImageDraw.Draw(canvas)
    line = max(2, min(canvas.size) // 200)
    font = ImageFont.load_default(size=max(12, min(canvas.size) // 40))
    names = list(dict.fromkeys(region.label for region in regions))
    for region in sorted(regions, key=lambda one: one.score):
        colour = _COLOURS[names.index(region.label) % len(_COLOURS)]
        draw.rectangle(
            (region.left, region.top, region.right, region.bottom), outline=colour, width=line
        )
        text = f"{region.label} {region.score:.2f}"
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        width, height = right - left + 2 * line, bottom - top + 2 * line
        # Above the box, or within it where there is no room; never beyond the right edge.
        x = max(0.0, min(region.left, canvas.width - width))
        y = region.top - height if region.top >= height else region.top
        draw.rectangle((x, y, x + width, y + height), fill=colour)
        draw.text((x + line - left, y + line - top), text, fill="black", font=font)
    out = BytesIO()
    canvas.save(out, "PNG")
    return out.getvalue()
