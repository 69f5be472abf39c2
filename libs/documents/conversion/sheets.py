"""XLSX to Markdown: python-calamine reads the values, each sheet is a table."""

from __future__ import annotations

import datetime
import io
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final
from xml.parsers import expat

from .archive import XmlCheck, ZipArchive, local
from .limits import ConversionLimits, ConversionRefused
from .paging import DocumentPages

_REFERENCE: Final = re.compile(r"\$?([A-Z]{1,3})\$?([0-9]{1,7})")
_STRINGS: Final = "xl/sharedstrings.xml"
_OUTSIDE: Final = frozenset({"[content_types].xml", "_rels/.rels"})
_FOLDER: Final = "xl/"
_XML: Final = (".xml", ".rels")
_UNREAD: Final = (
    "xl/activex/", "xl/charts/", "xl/ctrlprops/", "xl/diagrams/", "xl/drawings/",
    "xl/embeddings/", "xl/externallinks/", "xl/media/", "xl/pivotcache/", "xl/theme/",
)  # fmt: skip
"""Folders that python-calamine reads nothing from for values."""
_VALUES: Final = frozenset({"v", "is", "f"})


def load() -> None:
    """Load all modules that a conversion needs."""
    import python_calamine  # noqa: F401


def convert(archive: ZipArchive, limits: ConversionLimits, pages: DocumentPages) -> None:
    """Add a page for each sheet, or more if it is long."""
    import python_calamine

    lengths: list[int] = []
    if strings := next((name for name in archive.names if name.lower() == _STRINGS), None):
        _StringLengths(strings, limits, lengths).check(archive.read(strings))
    checked = archive.repacked(partial(_check, limits=limits, lengths=lengths))
    try:
        book = python_calamine.load_workbook(io.BytesIO(checked))
        names = [one.name for one in book.sheets_metadata]
        for name in names:
            pages.add_table(f"## {' '.join(name.split())}", _rows(book, name))
    except python_calamine.PasswordError:
        raise ConversionRefused("it is encrypted: send a copy without a password") from None
    except python_calamine.CalamineError as error:
        raise ConversionRefused(f"it is damaged: {str(error)[:150]}") from None


def _check(name: str, limits: ConversionLimits, lengths: Sequence[int]) -> XmlCheck | None:
    """Return the check of a file. Any XML file in the folder `xl` can be a sheet."""
    if name in _OUTSIDE or name == _STRINGS:
        return XmlCheck(name, limits)
    if name.startswith(_FOLDER) and name.endswith(_XML) and not name.startswith(_UNREAD):
        return _SheetCheck(name, limits, lengths)
    return None


def _rows(book: Any, name: str) -> Iterator[Sequence[str]]:
    """Yield the rows that have a value, without empty columns at the right."""
    rows = [[_text(value) for value in row] for row in book.get_sheet_by_name(name).to_python()]
    width = max((1 + index for row in rows for index, text in enumerate(row) if text), default=0)
    for row in rows:
        if any(row):
            yield row[:width]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat(" ")
    return "" if value is None else str(value)


class _StringLengths(XmlCheck):
    """Checks the table of strings, and notes the length of each."""

    def __init__(self, name: str, limits: ConversionLimits, lengths: list[int]) -> None:
        super().__init__(name, limits)
        self._lengths = lengths

    def prepare(self, parser: expat.XMLParserType) -> None:
        parser.buffer_text = True
        parser.CharacterDataHandler = self._add

    def start(self, element: str, attributes: dict[str, str]) -> None:
        super().start(element, attributes)
        if _tag(element) == "si":
            self._lengths.append(0)

    def _add(self, text: str) -> None:
        if self._lengths:
            self._lengths[-1] += len(text)


class _SheetCheck(XmlCheck):
    """Checks a sheet: the area of its values, which the reader allocates even if most cells are
    empty, and the length of the strings that its cells refer to, which the reader copies.
    """

    def __init__(self, name: str, limits: ConversionLimits, lengths: Sequence[int]) -> None:
        super().__init__(name, limits)
        self._lengths = lengths
        self._row = self._column = 0
        self._is_shared = self._is_value = False
        self._index = ""
        self._characters = 0
        self._first, self._last = [1 << 30, 1 << 30], [0, 0]

    def prepare(self, parser: expat.XMLParserType) -> None:
        parser.buffer_text = True
        parser.CharacterDataHandler = self._add

    def start(self, element: str, attributes: dict[str, str]) -> None:
        super().start(element, attributes)
        tag = _tag(element)
        if tag == "c":
            self._start_cell(attributes)
        elif tag == "row":
            self._start_row(attributes)
        elif tag in _VALUES:
            self._grow()
            self._is_value, self._index = tag == "v" and self._is_shared, ""

    def end(self, element: str) -> None:
        super().end(element)
        if self._is_value and _tag(element) == "v":
            self._is_value = False
            index = int(self._index) if self._index.strip().isdecimal() else -1
            if not 0 <= index < len(self._lengths):
                raise ConversionRefused(
                    f"{self.name} refers to a string that the file does not have"
                )
            self._characters += self._lengths[index]
            if self._characters > self.limits.bytes:
                raise ConversionRefused(
                    f"{self.name} has more than {self.limits.bytes:,} characters"
                )

    def _start_row(self, attributes: dict[str, str]) -> None:
        number = attributes.get("r", "")
        if number and not (number.isdecimal() and len(number) <= 7):
            raise ConversionRefused(f"{self.name} has a row with the number {number[:20]!r}")
        self._row, self._column = int(number) if number else self._row + 1, 0

    def _start_cell(self, attributes: dict[str, str]) -> None:
        self._is_shared = attributes.get("t") == "s"
        reference = attributes.get("r", "")
        if not reference:
            self._column += 1
            return
        found = _REFERENCE.fullmatch(reference)
        if found is None:
            raise ConversionRefused(f"{self.name} has a cell with the reference {reference[:20]!r}")
        self._row, self._column = int(found[2]), 0
        for letter in found[1]:
            self._column = 26 * self._column + ord(letter) - 64

    def _grow(self) -> None:
        at = (self._row, self._column)
        if self._first[0] <= at[0] <= self._last[0] and self._first[1] <= at[1] <= self._last[1]:
            return
        self._first = [min(pair) for pair in zip(self._first, at, strict=True)]
        self._last = [max(pair) for pair in zip(self._last, at, strict=True)]
        rows, columns = (
            last - first + 1 for first, last in zip(self._first, self._last, strict=True)
        )
        if rows * columns > self.limits.cells:
            raise ConversionRefused(
                f"{self.name} covers {rows:,} rows and {columns:,} columns; at most "
                f"{self.limits.cells:,} cells are read"
            )

    def _add(self, text: str) -> None:
        if self._is_value and len(self._index) < 20:
            self._index += text


def _tag(element: str) -> str:
    """Return an element's name without its prefix."""
    return local(element).rpartition(":")[2]
