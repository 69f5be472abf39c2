"""DOCX to Markdown: mammoth reads the file, html-to-markdown writes."""

from __future__ import annotations

import io
import zipfile
from typing import Any, Final

from . import markup
from .archive import Archive
from .limits import Limits
from .paging import Pages

_STYLES: Final = """
p[style-name='Title'] => h1:fresh
p[style-name='Subtitle'] => h2:fresh
"""


_SMALLEST: Final = {
    "[Content_Types].xml": (
        '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>'
    ),
    "word/document.xml": (
        '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
        "<w:body><w:p><w:r><w:t>a</w:t></w:r></w:p></w:body></w:document>"
    ),
}


def load() -> None:
    """Load all modules that a conversion needs, by a conversion."""
    import mammoth

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        for name, xml in _SMALLEST.items():
            packed.writestr(name, xml)
    mammoth.convert_to_html(out)


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
