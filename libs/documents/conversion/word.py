"""DOCX to Markdown: mammoth reads the file, html-to-markdown writes."""

from __future__ import annotations

import io
from typing import Any, Final

from . import markup
from .archive import Archive
from .limits import Limits
from .paging import Pages

_STYLES: Final = """
p[style-name='Title'] => h1:fresh
p[style-name='Subtitle'] => h2:fresh
"""


def load() -> None:
    """Load all modules that a conversion needs."""
    import mammoth.docx  # noqa: F401


def convert(archive: Archive, limits: Limits, pages: Pages) -> None:
    """Add the document as one page, or more if it is long. Images are their descriptions."""
    import mammoth

    html = mammoth.convert_to_html(
        io.BytesIO(archive.repacked({})), style_map=_STYLES, convert_image=_description
    ).value
    pages.add(markup.from_html(html, "it", limits))


def _description(image: Any) -> list[Any]:
    import mammoth.html

    return [mammoth.html.text(image.alt_text)] if image.alt_text else []
