"""Draw regions into their image. Needs Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from shoal.extractions import Region

if TYPE_CHECKING:
    from PIL.Image import Image

# These colours can be distinguished with red-green colour blindness (Okabe and Ito).
_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")


def drawn(image: bytes | Image, regions: Sequence[Region]) -> bytes:
    """Return a PNG of the image with a box for each region, its label and its score; the best are
    drawn last.

    Like the mesh, it turns the image upright by its EXIF orientation first. Each label has its
    colour, in the order of `regions`. Raises ImportError without Pillow, and Pillow's errors for a
    file that it cannot read.

    Args:
        image: The file that was sent, or Pillow's image of it.
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
        # Above the box, or within it where the space is too small; never beyond the right edge.
        x = max(0.0, min(region.left, canvas.width - width))
        y = region.top - height if region.top >= height else region.top
        draw.rectangle((x, y, x + width, y + height), fill=colour)
        draw.text((x + line - left, y + line - top), text, fill="black", font=font)
    out = BytesIO()
    canvas.save(out, "PNG")
    return out.getvalue()
