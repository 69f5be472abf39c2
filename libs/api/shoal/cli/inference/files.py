"""Reads records from the files of `--input`, each in the format that its suffix names."""

from __future__ import annotations

import codecs
import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import typer

from shoal.bulk.matching import DELIMITERS
from shoal.cli.failures import InputError
from shoal.tasks import Document

LINES: Final = (".txt",)
JSON_LINES: Final = (".jsonl", ".ndjson")
PARQUET: Final = (".parquet",)
SUFFIXES: Final = (*LINES, *JSON_LINES, *DELIMITERS, *PARQUET)
IMAGES: Final = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
DOCUMENTS: Final = (".docx", ".eml", ".epub", ".htm", ".html", ".md", ".pdf", ".pptx", ".xlsx")
DEFAULT_FIELD: Final = "text"
MAX_CELL_CHARACTERS: Final = 64 << 20
"""The largest cell of a .csv or .tsv file; Python's default, 128 Ki, is shorter than long
documents.
"""


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A text, its source (`file:line`), and the object or row of which it is a field.

    Attributes:
        is_image: Whether the text is the path of an image file.
        is_document: Whether the text is the path of a document.
        pages: The first and the last page of a document; 0: that of the file.
        problem: Why the source has no text, where `--on-invalid skip` lets the command go on; else
            empty.
    """

    text: str
    where: str
    fields: dict[str, object] | None = None
    is_image: bool = False
    problem: str = ""
    is_document: bool = False
    pages: tuple[int, int] = (0, 0)

    @property
    def kind(self) -> str:
        """Return the noun for it in messages."""
        if self.is_document:
            return "document"
        return "image" if self.is_image else "text"

    @property
    def item(self) -> str | Path | Document:
        if self.is_document and self.text:
            return Document(Path(self.text), *self.pages)
        return Path(self.text) if self.is_image and self.text else self.text


@dataclass(frozen=True, slots=True)
class Selection:
    """The texts of a file to read.

    Attributes:
        field: The field of a line of JSON; None for the default.
        column: The column of a table; None for the default.
        skips_invalid: True if a line without a text becomes a record with a problem instead of an
            error.
    """

    field: str | None
    column: str | None
    skips_invalid: bool

    def checked(self, parse: Callable[[], TextRecord], where: str) -> TextRecord:
        """Return the record that `parse` returns, or one with the problem that it raises. Raises
        InputError unless those are skipped.
        """
        try:
            return parse()
        except InputError as error:
            if not self.skips_invalid:
                raise
            return TextRecord("", where, problem=str(error))


def read_records(source: Path, selection: Selection) -> list[TextRecord]:
    """Return the records of a file, or of stdin for `-`.

    Raises:
        BadParameter: The suffix names no format that is read, or an option does not fit it.
        InputError: The file cannot be read, or a line has no text.
    """
    if str(source) == "-" or _is_stream(source):
        _refuse_column(source, selection)
        return _read(source, lambda: _lines(source, selection, selection.field))
    suffix = source.suffix.lower()
    if suffix not in SUFFIXES:
        raise typer.BadParameter(_unread(source, suffix))
    if suffix in LINES or suffix in JSON_LINES:
        _refuse_column(source, selection)
        field = selection.field or (DEFAULT_FIELD if suffix in JSON_LINES else None)
        return _read(source, lambda: _lines(source, selection, field))
    if selection.field is not None:
        raise typer.BadParameter(
            f"--field names a field in lines of JSON; name a column of {source} with --column"
        )
    read = _parquet if suffix in PARQUET else _table
    return _read(source, lambda: read(source, selection))


def _unread(source: Path, suffix: str) -> str:
    """Return why a file is not read as texts, and what reads it."""
    if source.is_dir():
        return f"--input {source} is a folder: name a file"
    if suffix in IMAGES:
        return f"--input {source} is an image: name it as an argument, with --image"
    if suffix in DOCUMENTS:
        return (
            f"--input {source} is a document: `shoal encode MODEL --document {source} --chunk "
            f"sentences` encodes its text, and `shoal extract text {source}` prints it"
        )
    known = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
    return (
        f"--input {source} must end in {known}; send other texts to stdin, one per line: --input -"
    )


def _is_stream(source: Path) -> bool:
    """Return True for a pipe, as the shell's <(command) is."""
    return source.is_fifo() or source.is_char_device()


def _refuse_column(source: Path, selection: Selection) -> None:
    if selection.column is not None:
        advice = (
            f"; name a field of its lines with --field {selection.column}"
            if source.suffix.lower() in JSON_LINES
            else ""
        )
        raise typer.BadParameter(
            f"--column names a column of a .csv, .tsv or .parquet file, and --input is "
            f"{source}{advice}"
        )


def _read(source: Path, read: Callable[[], Iterable[TextRecord]]) -> list[TextRecord]:
    try:
        return list(read())
    except FileNotFoundError:
        raise InputError(f"the file {source} does not exist") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror or error}") from None


def _lines(source: Path, selection: Selection, field: str | None) -> Iterator[TextRecord]:
    """Yield the records of lines. `field`: the field of JSON lines; None if a line is a text."""
    if str(source) == "-":
        yield from _numbered(sys.stdin.buffer, "stdin", selection, field)
        return
    with source.open("rb") as file:
        yield from _numbered(file, str(source), selection, field)


def _numbered(
    lines: Iterable[bytes], name: str, selection: Selection, field: str | None
) -> Iterator[TextRecord]:
    for number, line in enumerate(lines, start=1):
        where = f"{name}:{number}"
        data = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        yield selection.checked(
            lambda data=data, where=where: _line(data, where, field, selection),  # type: ignore[misc]
            where,
        )


def _line(data: bytes, where: str, field: str | None, selection: Selection) -> TextRecord:
    try:
        line = data.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 text: {error}") from None
    if not line.strip():
        if selection.skips_invalid:
            return TextRecord("", where)
        raise InputError(
            f"{where} is blank; every line must be a text, unless --on-invalid is skip"
        )
    return TextRecord(line, where) if field is None else _object(line, where, field)


def _object(line: str, where: str, field: str) -> TextRecord:
    """Return a line of JSON: a string, or an object with the text under `field`."""
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    if isinstance(value, str):
        return TextRecord(value, where)
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        found = f"; its fields are {', '.join(value)}" if isinstance(value, dict) else ""
        raise InputError(
            f"{where} has no text in the field {field!r}{found}; name the field with --field"
        )
    return TextRecord(value[field], where, value)


def _table(source: Path, selection: Selection) -> Iterator[TextRecord]:
    """Yield the rows below the header of a .csv or .tsv file."""
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    with source.open(encoding="utf-8-sig", newline="") as file:
        try:
            yield from _rows(file, source, selection)
        except csv.Error as error:
            raise InputError(f"{source} is not a table: {error}") from None


def _rows(file: TextIO, source: Path, selection: Selection) -> Iterator[TextRecord]:
    reader = csv.reader(file, delimiter=DELIMITERS[source.suffix.lower()], strict=True)
    names = next(reader, None)
    if names is None:
        return
    column = _column(source, names, selection)
    for row in reader:
        where = f"{source}:{reader.line_num}"
        if row:
            yield selection.checked(
                lambda row=row, where=where: _row(row, names, column, where),  # type: ignore[misc]
                where,
            )


def _row(row: list[str], names: Sequence[str], column: str, where: str) -> TextRecord:
    if len(row) != len(names):
        raise InputError(f"{where} has {len(row)} columns; the header has {len(names)}")
    return _cell(dict(zip(names, row, strict=True)), column, where)


def _parquet(source: Path, selection: Selection) -> Iterator[TextRecord]:
    """Yield the rows of a Parquet file, with those of its columns that JSON can hold."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{source} needs pyarrow: pip install 'shoal[parquet]'") from None
    try:
        with parquet.ParquetFile(source) as file:
            kinds = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=False))
            column = _column(source, file.schema_arrow.names, selection)
            number = 0
            for batch in file.iter_batches(
                columns=[name for name, kind in kinds.items() if name == column or _is_json(kind)]
            ):
                for row in batch.to_pylist():
                    number += 1
                    where = f"{source}:{number}"
                    yield selection.checked(
                        lambda row=row, where=where: _cell(row, column, where),  # type: ignore[misc]
                        where,
                    )
    except pyarrow.ArrowException as error:
        raise InputError(f"{source} is not a Parquet file that can be read: {error}") from None


def _is_json(kind: Any) -> bool:
    from pyarrow import types

    is_text = types.is_string(kind) or types.is_large_string(kind)
    return bool(
        is_text or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    )


def _column(source: Path, names: Sequence[str], selection: Selection) -> str:
    column = selection.column or DEFAULT_FIELD
    if names.count(column) != 1:
        found = "no column" if column not in names else "several columns"
        raise InputError(
            f"{source} has {found} {column!r}; its columns are {', '.join(names)}: name one "
            "with "
            "--column"
        )
    return column


def _cell(row: dict[str, object], column: str, where: str) -> TextRecord:
    text = row[column]
    if text is None or text == "":
        raise InputError(
            f"{where} has no text in the column {column!r}; every row must have one, unless "
            "--on-invalid is skip"
        )
    if not isinstance(text, str):
        raise InputError(
            f"{where} has {type(text).__name__} {text!r:.40} in the column {column!r}; a "
            "text is "
            "needed: name another with --column"
        )
    return TextRecord(text, where, row)


def page_range(asked: str) -> tuple[int, int]:
    """Return the first and the last page of `--pages`; 0: to the end. Raises BadParameter."""
    match = re.fullmatch(r"(\d{1,9})(-(\d{1,9})?)?", asked.replace(" ", "")) if asked else None
    if not asked:
        return 1, 0
    if match is None:
        raise typer.BadParameter(f"--pages {asked} must be a page or a range, such as 3 or 1-5")
    first = int(match[1])
    last = first if match[2] is None else int(match[3] or 0)
    if first < 1 or 0 < last < first:
        raise typer.BadParameter(
            f"--pages {asked}: pages count from 1, and the last is not before the first"
        )
    return first, last
