"""Reads texts from arguments, files and stdin, each with its source for error messages."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import typer

from shoal.cli.failures import InputError
from shoal.errors import ShoalError

JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Record:
    """A text, its source (`file:line`), and the JSON object of which it is a field. `is_image`: it is the path of an image file."""

    text: str
    where: str
    fields: dict[str, object] | None = None
    is_image: bool = False

    @property
    def item(self) -> str | Path:
        return Path(self.text) if self.is_image else self.text


def read(
    texts: Sequence[str] | None, source: Path | None, field: str | None, *, what: str = "TEXT", allow_blank: bool = False
) -> list[Record]:
    """All texts of a command, arguments first; `-` alone is stdin. `allow_blank`: a blank line is an empty text, not an error.

    Raises InputError, and BadParameter if there are none.
    """
    if source is None and list(texts or ()) == ["-"]:
        texts, source = (), Path("-")
    records = [Record(text, f"argument {index}") for index, text in enumerate(texts or (), start=1)]
    if source is not None:
        records += _file(source, field, allow_blank)
    elif field is not None:
        raise typer.BadParameter("--field names a field in the lines of --input FILE; add --input")
    if not records:
        if source is None:
            raise typer.BadParameter(f"there are no texts: give {what} arguments, - for stdin, or --input FILE")
        raise typer.BadParameter(f"{'stdin' if str(source) == '-' else source} is empty")
    return records


def _file(source: Path, field: str | None, allow_blank: bool) -> list[Record]:
    if str(source) == "-":
        return list(_lines(sys.stdin, "stdin", field, allow_blank))
    try:
        with source.open(encoding="utf-8") as file:
            wanted = field or ("text" if source.suffix in JSON_LINES else None)
            return list(_lines(file, str(source), wanted, allow_blank))
    except FileNotFoundError:
        raise InputError(f"the file {source} does not exist") from None
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}") from None


def _lines(file: TextIO | Iterable[str], name: str, field: str | None, allow_blank: bool) -> Iterator[Record]:
    try:
        for number, line in enumerate(file, start=1):
            where = f"{name}:{number}"
            if not line.strip():
                if not allow_blank:
                    raise InputError(f"{where} is blank; every line must be a text, unless --on-invalid is skip")
                yield Record("", where)
                continue
            yield Record(line.rstrip("\r\n"), where) if field is None else _object(line, where, field)
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text: {error}") from None


def _object(line: str, where: str, field: str) -> Record:
    """A line of JSON: a string, or an object with the text under `field`."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    if isinstance(value, str):
        return Record(value, where)
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        found = f"; its fields are {', '.join(value)}" if isinstance(value, dict) else ""
        raise InputError(f"{where} has no text in the field {field!r}{found}; name the field with --field")
    return Record(value[field], where, value)


def given_entities(records: Sequence[Record], field: str) -> list[list[tuple[int, int, str]]]:
    """The entities in a field of each record, as `shoal extract entities --output` writes them. Raises InputError."""
    return [_entities(record, field) for record in records]


def _entities(record: Record, field: str) -> list[tuple[int, int, str]]:
    values = None if record.fields is None else record.fields.get(field)
    if not isinstance(values, list):
        raise InputError(f"{record.where} has no list of entities in the field {field!r}")
    return [_entity(value, record.where, field) for value in values]


def _entity(value: object, where: str, field: str) -> tuple[int, int, str]:
    match value:
        case {"start": int(start), "end": int(end), "label": str(label)}:
            return start, end, label
        case {"start": int(start), "end": int(end)}:
            return start, end, ""
    raise InputError(f"{where}: {value!r} in the field {field!r} is not an object with the numbers start and end")


@contextmanager
def located(records: Sequence[Record], name: str) -> Iterator[None]:
    """Adds the source of the record to an error about `name[i]`."""
    try:
        yield
    except ShoalError as error:
        match = re.match(rf"{name}\[(\d+)\]", error.field)
        if match is not None and int(match.group(1)) < len(records):
            error.add_note(f"at {records[int(match.group(1))].where}")
        raise
