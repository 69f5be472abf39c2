"""Join the texts of a document's pages, and find the page of a position in the joined text.

The form is part of the API (`Chunking` in protos/shoal/v1/inference.proto), because the offsets of
chunks count in it:

1. Lines of a page end with LF. A page has no white space at its beginning and end.
2. A word that a PDF file hyphenates at the end of a line is whole.
3. A blank line, which is two LF, is between two pages.
4. Pages without text are left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

SEPARATOR: Final = "\n\n"
_HYPHEN: Final = "\x02"
"""PDFium's replacement of a hyphen at the end of a line and of the line's end."""


@dataclass(frozen=True, slots=True)
class PageStarts:
    """The pages of a joined text that have text, in order.

    Attributes:
        numbers: Number of each page in its document, from 1.
        starts: First code point of each page in the joined text; the first is 0.
    """

    numbers: tuple[int, ...]
    starts: tuple[int, ...]

    def page_at(self, position: int) -> int:
        """Return the page that has the code point at `position`. The blank line after a page
        belongs to it.
        """
        return self.numbers[bisect_right(self.starts, position) - 1]


@dataclass(slots=True)
class JoinedText:
    """The text of the pages that were added so far.

    Attributes:
        size: Its bytes as UTF-8.
    """

    size: int = 0
    _texts: list[str] = field(default_factory=list)
    _numbers: list[int] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    _length: int = 0

    def add(self, number: int, text: str) -> None:
        """Append the text of a page as its reader returned it. Pages are added in order."""
        own = text.replace("\r\n", "\n").replace("\r", "\n").replace(_HYPHEN, "").strip()
        if not own:
            return
        if self._texts:
            self._length += len(SEPARATOR)
            self.size += len(SEPARATOR)
        self._texts.append(own)
        self._numbers.append(number)
        self._starts.append(self._length)
        self._length += len(own)
        self.size += len(own.encode())

    @property
    def length(self) -> int:
        """Return its code points."""
        return self._length

    @property
    def text(self) -> str:
        return SEPARATOR.join(self._texts)

    @property
    def pages(self) -> PageStarts:
        return PageStarts(tuple(self._numbers), tuple(self._starts))


class PagedText:
    """A joined text of which pages are read when they are needed, in order.

    Text that was read once does not change when further pages are read.

    Args:
        add_pages: Adds the pages to a joined text. It is resumed after each one, and may raise.
    """

    def __init__(self, add_pages: Callable[[JoinedText], Iterator[None]]) -> None:
        self._joined = JoinedText()
        self._text = ""
        self._rest: Iterator[None] | None = add_pages(self._joined)

    @property
    def is_whole(self) -> bool:
        """Return whether all pages have been read."""
        return self._rest is None

    @property
    def pages(self) -> PageStarts:
        """Return the pages that have been read and have text."""
        return self._joined.pages

    def read(self, characters: int) -> str:
        """Return the text, after reading pages until it has this many characters or is whole."""
        while self._rest is not None and self._joined.length < characters:
            try:
                next(self._rest)
            except StopIteration:
                self._rest = None
        if len(self._text) < self._joined.length:
            self._text = self._joined.text
        return self._text
