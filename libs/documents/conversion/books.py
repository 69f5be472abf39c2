"""EPUB to Markdown: the chapters in reading order."""

from __future__ import annotations

import posixpath
from typing import Final
from urllib.parse import unquote

from . import markup
from .archive import ZipArchive, local, resolved
from .limits import ConversionLimits, ConversionRefused
from .paging import DocumentPages

CONTAINER: Final = "META-INF/container.xml"
_RIGHTS: Final = frozenset({"META-INF/rights.xml", "META-INF/license.lcpl"})
_ENCRYPTION: Final = "META-INF/encryption.xml"
"""Names encrypted files. Fonts may be among them in books that can be read."""


def convert(archive: ZipArchive, limits: ConversionLimits, pages: DocumentPages) -> None:
    """Add a page for each file of the book's spine, or more if it is long."""
    if not archive.names.isdisjoint(_RIGHTS):
        raise ConversionRefused("it is protected by digital rights management")
    package = next(
        (
            one.get("full-path", "")
            for one in archive.xml(CONTAINER).iter()
            if _is(one.tag, "rootfile")
        ),
        "",
    )
    tree, folder = archive.xml(package, has_doctype=True), posixpath.dirname(package)
    files = {
        one.get("id", ""): resolved(folder, unquote(one.get("href", "")))
        for one in tree.iter()
        if _is(one.tag, "item")
    }
    order = [files.get(one.get("idref", ""), "") for one in tree.iter() if _is(one.tag, "itemref")]
    if not _encrypted(archive).isdisjoint(order):
        raise ConversionRefused(
            "it is protected by digital rights management: its chapters are encrypted"
        )
    # A file that the spine names again is not read again.
    for name in dict.fromkeys(order):
        if name in archive.names and name.lower().endswith((".xhtml", ".html", ".htm", ".xml")):
            text = markup.xhtml(markup.decoded(archive.read(name)))
            pages.add(markup.from_html(text, name[:80], limits))


def _encrypted(archive: ZipArchive) -> frozenset[str]:
    """Return the names of encrypted files."""
    if _ENCRYPTION not in archive.names:
        return frozenset()
    return frozenset(
        resolved("", unquote(one.get("URI", "")))
        for one in archive.xml(_ENCRYPTION).iter()
        if _is(one.tag, "CipherReference")
    )


def _is(tag: str, name: str) -> bool:
    return local(tag) == name
