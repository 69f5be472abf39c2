"""Divide Markdown into pages of limited size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from . import markup
from .limits import ConversionLimits, ConversionRefused

_BOUNDARIES: Final = (b"\n\n", b"\n", b" ")
"""Boundaries at which a text is divided, best first."""


class DocumentPages:
    """The pages of a document, as UTF-8. Methods raise ConversionRefused beyond a limit."""

    def __init__(self, limits: ConversionLimits) -> None:
        self.texts: list[bytes] = []
        self._limits, self._bytes = limits, 0

    def add(self, text: str) -> None:
        """Add a page, or several if the text is too long for one."""
        lines = text.replace("\r\n", "\n").replace("\r", "\n").strip()
        for part in divide(lines.encode("utf-8", "replace"), self._limits.page_bytes):
            self._append(part)

    def add_table(self, heading: str, rows: Iterable[Sequence[str]]) -> None:
        """Add a page with a heading and a table. A table that is too long goes on on further pages,
        which repeat heading and header.
        """
        top, top_bytes = [heading, ""], 0
        lines: list[str] = []
        size = 0
        for row in rows:
            line = markup.row_line(row)
            if not top_bytes:
                top += [line, markup.separator(len(row))]
                top_bytes = sum(map(_line_bytes, top))
                continue
            needed = _line_bytes(line)
            if lines and top_bytes + size + needed > self._limits.page_bytes:
                self.add("\n".join([*top, *lines]))
                lines, size = [], 0
            lines.append(line)
            size += needed
        self.add("\n".join([*top, *lines]))

    def _append(self, text: bytes) -> None:
        self._bytes += len(text)
        if self._bytes > self._limits.bytes:
            raise ConversionRefused(
                f"the document has more than {self._limits.bytes:,} bytes of text"
            )
        if len(self.texts) == self._limits.pages:
            raise ConversionRefused(f"the document has more than {self._limits.pages:,} pages")
        self.texts.append(text)


def _line_bytes(line: str) -> int:
    return len(line.encode("utf-8", "replace")) + 1


def divide(text: bytes, most: int) -> list[bytes]:
    """Return the parts of a text, each of at most `most` bytes. It is divided between blocks, else
    between lines, words or characters. An empty text is one part.
    """
    parts, start = [], 0
    while len(text) - start > most:
        end = _end(text, start, most)
        parts.append(text[start:end].strip(b"\n"))
        start = end
    parts.append(text[start:].strip(b"\n"))
    return [part for part in parts if part] or [b""]


def _end(text: bytes, start: int, most: int) -> int:
    for boundary in _BOUNDARIES:
        found = text.rfind(boundary, start + most // 2, start + most)
        if found >= 0:
            return found + len(boundary)
    end = start + most
    while text[end] & 0xC0 == 0x80:  # within a character
        end -= 1
    return end
