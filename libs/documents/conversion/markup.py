"""HTML to Markdown, and text from bytes of an unknown encoding."""

from __future__ import annotations

import codecs
import encodings
import encodings.aliases
import pkgutil
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

from .limits import ConversionLimits, ConversionRefused

_DECLARED: Final = re.compile(
    rb"""(?:charset|encoding)\s*+=\s*+["']?+\s*+([A-Za-z0-9_.:-]{1,40})""", re.IGNORECASE
)
_DECLARED_WITHIN: Final = 1024
_READ_AS: Final = {
    "iso-8859-1": "cp1252", "latin-1": "cp1252", "latin1": "cp1252", "us-ascii": "cp1252",
    "ascii": "cp1252", "gb2312": "gb18030", "gb-2312": "gb18030", "gbk": "gb18030",
}  # fmt: skip
"""Encodings that browsers read as a larger one."""
_NOT_ENCODINGS: Final = frozenset(
    {"idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape"}
)
"""Python's codecs of texts in which no document is written."""
_ESCAPE: Final = b"\x1b"
_XHTML: Final = "http://www.w3.org/1999/xhtml"
_XHTML_WITHIN: Final = 4096
_RAW: Final = re.compile(
    "<(iframe|noembed|noframes|noscript|plaintext|script|style|textarea|title|xmp)(?=[ \t\r\n/])",
    re.IGNORECASE,
)
"""Elements with text only. HTML parsers read what follows `<title/>` as the title."""


def load() -> None:
    """Load all modules that a conversion needs, while files can still be opened."""
    modules = {module.name for module in pkgutil.iter_modules(encodings.__path__)}
    for name in sorted(modules | set(encodings.aliases.aliases.values())):
        try:
            codecs.lookup(name)
        except LookupError:  # of another operating system
            continue
    _options(1)
    import html_to_markdown

    html_to_markdown.convert("<p>a</p>", _options(1))


@cache
def _options(depth: int) -> Any:
    from html_to_markdown import ConversionOptions, PreprocessingOptions

    return ConversionOptions(
        # Nothing is left out that a reader may look for: navigation and forms are kept.
        preprocessing=PreprocessingOptions(enabled=False),
        extract_metadata=False,
        bullets="-",
        compact_tables=True,
        inline_data_media="alt_text_only",
        max_depth=depth,
    )


def from_html(html: str, what: str, limits: ConversionLimits) -> str:
    """Return a web page as Markdown. Raises ConversionRefused.

    Args:
        what: What has the HTML, for messages, such as "it".
    """
    import html_to_markdown

    size = len(html.encode("utf-8", "replace"))
    if size > limits.html_bytes:
        raise ConversionRefused(
            f"{what} has {size:,} bytes of HTML; at most {limits.html_bytes:,} are read"
        )
    if is_xhtml(html):
        html = xhtml(html)
    result = html_to_markdown.convert(html, _options(limits.depth))
    for warning in result.warnings or ():
        if warning.kind == html_to_markdown.WarningKind.DEPTH_LIMIT_EXCEEDED:
            raise ConversionRefused(
                f"{what} has more than {limits.depth:,} elements inside one another"
            )
    return result.content or ""


def xhtml(text: str) -> str:
    """Return XHTML with end tags for empty elements that HTML parsers do not read as empty."""
    parts, start = [], 0
    while found := _RAW.search(text, start):
        end = text.find(">", found.end())
        if end < 0:
            break
        parts.append(text[start:end])
        if text[end - 1] == "/":
            parts[-1] = f"{parts[-1][:-1]}></{found[1]}"
        start = end
    return "".join([*parts, text[start:]])


def is_xhtml(text: str) -> bool:
    return text[:100].lstrip("\ufeff \t\r\n").startswith("<?xml") or _XHTML in text[:_XHTML_WITHIN]


def decoded(data: bytes) -> str:
    """Return the text of bytes: by the byte order mark, as UTF-8, by the encoding that an HTML or
    XML head declares, or as Windows-1252. Raises ConversionRefused for a byte order mark of UTF-16
    before other bytes.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            text = data.decode("utf-16")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise ConversionRefused("it begins as UTF-16 and is not UTF-16 text")
        return text
    found = _DECLARED.search(data[:_DECLARED_WITHIN])
    codec = _codec(found[1].decode("ascii")) if found else None
    # ISO-2022 encodings have only bytes that are UTF-8 too.
    is_shifted = codec is not None and codec.name.startswith("iso2022") and _ESCAPE in data
    return _text(data, codec) if is_shifted else _guessed(data, codec)


def decoded_as(data: bytes, name: str) -> str:
    """Return the text of bytes in a named encoding; if it is not known, as `decoded` does."""
    codec = _codec(name)
    return decoded(data) if codec is None else _text(data, codec)


def _codec(name: str) -> codecs.CodecInfo | None:
    """Return an encoding; None if it is not known."""
    name = name.strip().lower().replace("_", "-")
    try:
        codec = codecs.lookup(_READ_AS.get(name, name))
    except (LookupError, ValueError, OSError):
        return None
    is_text = codec._is_text_encoding and codec.name.replace("_", "-") not in _NOT_ENCODINGS
    return codec if is_text else None


def _guessed(data: bytes, codec: codecs.CodecInfo | None) -> str:
    """Return the text of bytes as UTF-8, or else by a codec or as Windows-1252."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return _text(data, codec)


def _text(data: bytes, codec: codecs.CodecInfo | None) -> str:
    try:
        return (codec or codecs.lookup("cp1252")).decode(data, "replace")[0]
    except ValueError:
        return data.decode("cp1252", "replace")


def table(rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table, of which the first row is the header."""
    lines = [row_line(row) for row in rows]
    if lines:
        # Lines of cells have a bar between cells and at both ends, and escape other bars.
        cells = len(re.findall(r"(?<!\\)\|", lines[0])) - 1
        lines.insert(1, separator(cells))
    return lines


def row_line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell(text) for text in cells) + " |"


def separator(cells: int) -> str:
    return "|" + " --- |" * cells


def cell(text: str) -> str:
    """Return a text as a cell of a table: in one line, without bars."""
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").split())
