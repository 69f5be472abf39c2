"""Estimate the text of a document before it is read, from its bytes and the requested pages. Pure.

Routers price the documents of Encode with `chunking` by it, and workers limit their pulls. Neither
has a parser, so the worker counts exactly once it has read the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from libs.documents import limits
from libs.documents.conversion.sniffing import family, min_utf8_bytes, recognized_text

PDF_PAGE_BYTES: Final = 4096
"""Estimated text of a PDF page: one full of text has 3 to 5 KB."""
ARCHIVE_EXPANSION: Final = 4
"""Estimated bytes of text for each byte of a ZIP archive. The text of DOCX, XLSX, PPTX and EPUB
files is compressed; images in them make them larger.
"""
TEXT_FACTOR: Final = 8
"""Text that documents may have for each byte of the estimate. More is refused: the request was
priced for far less.
"""


@dataclass(frozen=True, slots=True)
class TextBudget:
    """The pages and text that documents may have together."""

    pages: int
    bytes: int

    def __add__(self, other: TextBudget) -> TextBudget:
        return TextBudget(self.pages + other.pages, self.bytes + other.bytes)


NO_TEXT: Final = TextBudget(0, 0)


def text_budget(data: bytes, pages: int, documents: int) -> TextBudget:
    """Return the share of one document in the budget of all documents of a request.

    All documents may have at least 1 MiB together, so a document of less text that is sent alone
    is never refused by its estimate.

    Args:
        pages: Pages that may be read of it.
        documents: Number of documents in the request.
    """
    most = max(
        TEXT_FACTOR * estimated_text_bytes(data, pages), -(-limits.CHUNKED_BYTES // documents)
    )
    return TextBudget(pages, min(most, limits.DIVIDED_BYTES))


def min_text_bytes(data: bytes, first: int, last: int) -> int:
    """Return the fewest bytes that pages `first` to `last` (0: the last) of plain text or Markdown
    have as UTF-8. Line ends and blanks around pages count as they were sent.

    It is 0 for other formats, and for text that can be divided into chunks.
    """
    found = min_utf8_bytes(data) - (first - 1) * limits.TEXT_BYTES
    if last:  # A page ends at a boundary in the second half of the bytes that it may have.
        found = min(found, (last - first + 1) * limits.TEXT_BYTES // 2)
    # The format is recognized last, because that takes longest.
    is_read = found <= limits.DIVIDED_BYTES or recognized_text(data) != "text file"
    return 0 if is_read else found


def estimated_text_bytes(data: bytes, pages: int) -> int:
    """Return the estimated UTF-8 bytes of the text of a document's first `pages` requested pages.

    It is at most 1 MiB for formats that may be mostly images, and otherwise as much as a document
    may have.
    """
    most = limits.CHUNKED_BYTES
    match family(data):
        case "pdf":
            found = min(len(data), pages * PDF_PAGE_BYTES)
        case "archive":
            found = min(ARCHIVE_EXPANSION * len(data), pages * limits.TEXT_BYTES)
        case _:
            found, most = min(len(data), pages * limits.TEXT_BYTES), limits.DIVIDED_BYTES
    return max(1, min(found, most))
