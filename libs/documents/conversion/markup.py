"""HTML to Markdown, and text from bytes of an unknown encoding."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

from .limits import Limits, Refused

_DECLARED: Final = re.compile(
    rb"""(?:charset|encoding)\s*=\s*["']?\s*([A-Za-z0-9_.:-]{1,40})""", re.IGNORECASE
)
_DECLARED_WITHIN: Final = 1024
_LATIN: Final = frozenset({"iso-8859-1", "latin-1", "latin1", "us-ascii", "ascii"})
"""Browsers read these as Windows-1252."""
_CODECS: Final = (
    "cp437", "cp1252", "utf-16", "utf-8-sig", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255",
    "cp1256", "cp1257", "cp1258", "cp874", "iso8859-2", "iso8859-5", "iso8859-7", "iso8859-8",
    "iso8859-9", "iso8859-15", "koi8-r", "koi8-u", "shift_jis", "cp932", "euc_jp", "iso2022_jp",
    "gbk", "gb18030", "big5", "euc_kr", "mac-roman", "latin-1", "ascii",
)  # fmt: skip


def load() -> None:
    """Load all modules that a conversion needs, while files can still be opened."""
    for name in _CODECS:
        codecs.lookup(name)
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


def from_html(html: str, what: str, limits: Limits) -> str:
    """Return a web page as Markdown. Raises Refused.

    Args:
        what: What has the HTML, for messages, such as "it".
    """
    import html_to_markdown

    size = len(html.encode("utf-8", "replace"))
    if size > limits.html_bytes:
        raise Refused(f"{what} has {size:,} bytes of HTML; at most {limits.html_bytes:,} are read")
    result = html_to_markdown.convert(html, _options(limits.depth))
    for warning in result.warnings or ():
        if warning.kind == html_to_markdown.WarningKind.DEPTH_LIMIT_EXCEEDED:
            raise Refused(f"{what} has more than {limits.depth:,} elements inside one another")
    return result.content or ""


def decoded(data: bytes) -> str:
    """Return the text of bytes: by the byte order mark, as UTF-8, by the encoding that an HTML or
    XML head declares, or as Windows-1252.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    found = _DECLARED.search(data[:_DECLARED_WITHIN])
    name = found[1].decode("ascii").lower() if found else "cp1252"
    return decoded_as(data, name)


def decoded_as(data: bytes, name: str) -> str:
    """Return the text of bytes in a named encoding; as Windows-1252 where it is not known."""
    try:
        codec = codecs.lookup("cp1252" if name.lower() in _LATIN else name)
        text = codec.decode(data, "replace")[0]
        return text if isinstance(text, str) else data.decode("cp1252", "replace")
    except (LookupError, ValueError, TypeError, OSError):
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
