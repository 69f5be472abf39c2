"""Recognize the format of a document by its bytes. File names and media types are not used."""

from __future__ import annotations

import codecs
import re
from typing import Final, Literal

Family = Literal["pdf", "archive", "text"]

MODULES: Final[dict[Family, tuple[str, ...]]] = {
    "pdf": ("pypdfium2",),
    "archive": ("html_to_markdown", "mammoth", "python_calamine"),
    "text": ("html_to_markdown",),
}
"""The third-party modules that read a family of formats."""
READ_FORMATS: Final = "PDF, DOCX, XLSX, PPTX, EPUB, HTML, e-mail, Markdown and plain text"
HEAD_BYTES: Final = 4096
"""The part of a file that decides its family."""
_PDF: Final = b"%PDF-"
_PDF_HEAD_BYTES: Final = 1024
"""Bytes at a file's beginning in which readers look for the PDF signature."""
_ARCHIVE: Final = (b"PK\x03\x04", b"PK\x05\x06")
_COMPOUND_FILE: Final = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_UTF_16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
"""Bytes that no text has. 0x1B is part of ISO-2022-JP."""
_HTML: Final = re.compile(
    r"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)\b",
    re.IGNORECASE | re.DOTALL,
)
_HEADER: Final = re.compile(r"([!-9;-~]{1,80}):[ \t]")
_MAIL_HEADERS: Final = frozenset(
    {"date", "subject", "to", "message-id", "mime-version", "received", "return-path"}
)

_OFFICE: Final = "application/vnd.openxmlformats-officedocument."
FORMATS: Final[dict[str, tuple[Family, bytes]]] = {
    "pdf": ("pdf", b""),
    "docx": ("archive", b"word/"),
    "xlsx": ("archive", b"xl/"),
    "pptx": ("archive", b"ppt/"),
    "epub": ("archive", b"META-INF/container.xml"),
    "html": ("text", b""),
    "eml": ("text", b""),
    "md": ("text", b""),
    "txt": ("text", b""),
    "application/pdf": ("pdf", b""),
    f"{_OFFICE}wordprocessingml.document": ("archive", b"word/"),
    f"{_OFFICE}spreadsheetml.sheet": ("archive", b"xl/"),
    f"{_OFFICE}presentationml.presentation": ("archive", b"ppt/"),
    "application/epub+zip": ("archive", b"META-INF/container.xml"),
    "text/html": ("text", b""),
    "application/xhtml+xml": ("text", b""),
    "message/rfc822": ("text", b""),
    "text/markdown": ("text", b""),
    "text/plain": ("text", b""),
}
"""The formats that a client may name, with their family and, of archives, a part of the name of a
file in each.
"""
_HTML_NAMES: Final = frozenset({"html", "text/html", "application/xhtml+xml"})
_MAIL_NAMES: Final = frozenset({"eml", "message/rfc822"})


def family(data: bytes) -> Family | None:
    """Return the family of formats that a file belongs to; None if no reader exists for it."""
    head = data[:HEAD_BYTES]
    if _PDF in head[:_PDF_HEAD_BYTES]:
        return "pdf"
    if head.startswith(_ARCHIVE):
        return "archive"
    if head and (head.startswith(_UTF_16) or not _CONTROL.search(head)):
        return "text"
    return None


def refusal(data: bytes) -> str:
    """Return why a file without a family is refused."""
    if data.startswith(_COMPOUND_FILE):
        return (
            "the file is an old binary or an encrypted Office file (.doc, .xls, .ppt, .msg): save "
            "it as DOCX, XLSX or PPTX without a password"
        )
    return f"the bytes are not a document of a supported format: {READ_FORMATS}"


def has_format(data: bytes, name: str) -> bool:
    """Return whether a file can have the format that a client named, one of FORMATS. Whether it is
    a valid file, only its reader finds out.
    """
    reads, part = FORMATS[name.lower()]
    if family(data) != reads or part not in data:
        return False
    head = data[: 16 * HEAD_BYTES].decode("latin-1").removeprefix("\xef\xbb\xbf")
    if data.startswith(_UTF_16):
        head = data[: 16 * HEAD_BYTES].decode("utf-16", "replace")
    if name.lower() in _HTML_NAMES:
        return is_html(head)
    return name.lower() not in _MAIL_NAMES or is_mail(head)


def is_html(text: str) -> bool:
    """Return whether a text is a web page: it begins with a document type or an html, head or body
    element. A text that begins with another element may be Markdown.
    """
    return _HTML.match(text[:HEAD_BYTES]) is not None


def is_mail(text: str) -> bool:
    """Return whether a text is an e-mail: it begins with headers, with From and another usual
    one.
    """
    names: set[str] = set()
    for line in text[: 16 * HEAD_BYTES].splitlines():
        if not line:
            break
        found = _HEADER.match(f"{line} ")
        if found:
            names.add(found[1].lower())
        elif not (names and line[0] in " \t"):
            return False
    return "from" in names and not names.isdisjoint(_MAIL_HEADERS)
