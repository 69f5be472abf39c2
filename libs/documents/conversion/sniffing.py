"""Recognize the format of a document by its bytes. File names and media types are not used."""

from __future__ import annotations

import codecs
import re
from typing import Final, Literal

Family = Literal["pdf", "archive", "text"]
TextKind = Literal["e-mail", "HTML file", "text file"]

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
_PDF_END: Final = (b"%%EOF", b"startxref")
_PDF_END_BYTES: Final = 2048
"""Bytes at a file's end in which readers look for the reference to a PDF file's directory."""
_ARCHIVE: Final = (b"PK\x03\x04", b"PK\x05\x06")
_COMPOUND_FILE: Final = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_UTF_16: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
"""Bytes that no text has. 0x1B is part of ISO-2022-JP."""
_HTML: Final = re.compile(r"<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_COMMENT, _COMMENT_END = "<!--", "-->"
_FOREIGN: Final = (
    (re.compile(rb"\{\\rtf"), "an RTF file"),
    (re.compile(rb"%!PS"), "a PostScript file"),
    (re.compile(rb"<svg[\s>]", re.IGNORECASE), "an SVG image"),
    (re.compile(rb"JVBERi0"), "a PDF file that is encoded in base64 twice"),
    (re.compile(rb"UEsDB"), "a ZIP archive that is encoded in base64 twice"),
    (re.compile(rb"data:[\w.+-]{1,40}/[\w.+-]{1,80}[;,]", re.IGNORECASE), "a data URL"),
)
"""The beginnings of text files that are not plain text but would be read as such."""
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
    if head.startswith(_ARCHIVE):
        return "archive"
    if _is_pdf(data):
        return "pdf"
    if _foreign_text(head):
        return None
    if head and (head.startswith(_UTF_16) or not _CONTROL.search(head)):
        return "text"
    return None


def _is_pdf(data: bytes) -> bool:
    """Return whether a file is a PDF file. The signature may follow other bytes; a text or an
    e-mail that only mentions it is not a PDF file.
    """
    at = data.find(_PDF, 0, _PDF_HEAD_BYTES)
    if at < 0:
        return False
    before = data[:at].removeprefix(codecs.BOM_UTF8)
    if not before.strip():
        return True
    if before.endswith((b"\n", b"\r")) and _CONTROL.search(before):
        return True
    end = data[max(at, len(data) - _PDF_END_BYTES) :]
    return any(word in end for word in _PDF_END)


def _foreign_text(head: bytes) -> str:
    """Return which format without a reader a file of text has; empty if it is not known."""
    begin = head.removeprefix(codecs.BOM_UTF8).lstrip()[:100]
    return next((what for found, what in _FOREIGN if found.match(begin)), "")


def refusal(data: bytes) -> str:
    """Return why a file without a family is refused."""
    if what := _foreign_text(data[:HEAD_BYTES]):
        return f"the file is {what}, not a document of a supported format: {READ_FORMATS}"
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
    if name.lower() in _HTML_NAMES:
        return is_html(_text_head(data))
    return name.lower() not in _MAIL_NAMES or is_mail(_text_head(data))


def text_kind(text: str) -> TextKind:
    """Return the format that a file of the family `text` is read as."""
    return "e-mail" if is_mail(text) else "HTML file" if is_html(text) else "text file"


def recognized_text(data: bytes) -> TextKind | None:
    """Return the format that a file of the family `text` is read as; None for another family. It
    takes up to 10 ms.
    """
    return text_kind(_text_head(data)) if family(data) == "text" else None


def min_utf8_bytes(data: bytes) -> int:
    """Return the fewest bytes that a file of text has as UTF-8."""
    return len(data) // (2 if data.startswith(_UTF_16) else 1)


def _text_head(data: bytes) -> str:
    if data.startswith(_UTF_16):
        return data[: 16 * HEAD_BYTES].decode("utf-16", "replace")
    return data[: 16 * HEAD_BYTES].decode("latin-1").removeprefix("\xef\xbb\xbf")


def is_html(text: str) -> bool:
    """Return whether a text is a web page: it begins with a document type or an html, head or body
    element. A text that begins with another element may be Markdown.
    """
    head = text[:HEAD_BYTES].lstrip()
    if head[:5].lower() == "<?xml":
        head = head.partition(">")[2].lstrip()
    at = 0
    while head.startswith(_COMMENT, at):
        end = head.find(_COMMENT_END, at + len(_COMMENT))
        if end < 0:
            return False
        at = end + len(_COMMENT_END)
        while head[at : at + 1].isspace():
            at += 1
    return _HTML.match(head, at) is not None


def is_mail(text: str) -> bool:
    """Return whether a text is an e-mail: it begins with headers, with From and another usual
    one.
    """
    names: set[str] = set()
    # Only line feeds and carriage returns end a header: UTF-8 that is read as Latin-1 has others.
    head = text[: 16 * HEAD_BYTES].replace("\r\n", "\n").replace("\r", "\n")
    for line in head.split("\n"):
        if not line:
            break
        found = _HEADER.match(f"{line} ")
        if found:
            names.add(found[1].lower())
        elif not (names and line[0] in " \t"):
            return False
    return "from" in names and not names.isdisjoint(_MAIL_HEADERS)
