"""DOCX to Markdown: mammoth reads the file, html-to-markdown writes."""

from __future__ import annotations

import io
import posixpath
import zipfile
from typing import Any, Final

from . import markup
from .archive import XmlCheck, ZipArchive
from .limits import ConversionLimits
from .paging import DocumentPages

_STYLES: Final = """
p[style-name='Title'] => h1:fresh
p[style-name='Subtitle'] => h2:fresh
"""


_DOCUMENT: Final = "word/document.xml"
_PARTS: Final = frozenset({"comments", "endnotes", "footnotes", "numbering", "styles"})
"""Parts of a document that mammoth reads, by the last word of their relations' type."""
_SMALLEST: Final = {
    "[Content_Types].xml": (
        '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>'
    ),
    _DOCUMENT: (
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


def convert(archive: ZipArchive, part: str, limits: ConversionLimits, pages: DocumentPages) -> None:
    """Add the document as one page, or more if it is long. Images are their descriptions.

    Args:
        part: The name of the document's main part.
    """
    import mammoth

    read = _read_parts(archive, part)
    checked = archive.repacked(lambda name: XmlCheck(name, limits) if name in read else None)
    html = mammoth.convert_to_html(
        io.BytesIO(checked), style_map=_STYLES, convert_image=_description
    ).value
    pages.add(markup.from_html(html, "it", limits))


def _read_parts(archive: ZipArchive, part: str) -> frozenset[str]:
    """Return the names, in lower case, of the files that mammoth reads as XML."""
    parts = {part, _DOCUMENT, *(f"word/{name}.xml" for name in _PARTS)}
    parts |= {to for kind, to in archive.relations(part).values() if kind in _PARTS}
    relations = {
        posixpath.join(folder, "_rels", f"{base}.rels")
        for folder, base in map(posixpath.split, parts)
    }
    names = {"[Content_Types].xml", "_rels/.rels", *parts, *relations}
    return frozenset(name.lower() for name in names)


def _description(image: Any) -> list[Any]:
    import mammoth.html

    return [mammoth.html.text(image.alt_text)] if image.alt_text else []
