"""Reads texts from arguments, files and stdin, each with its source for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from shoal.cli.failures import InputError
from shoal.cli.inference.files import Selection, TextRecord, read_records
from shoal.errors import ShoalError


def read(
    texts: Sequence[str] | None,
    source: Path | None,
    selection: Selection,
    *,
    argument: str = "TEXT",
) -> list[TextRecord]:
    """Return all texts of a command, arguments first; `-` alone is stdin.

    Raises InputError, and BadParameter if there are none. `argument`: the name of the texts'
    argument in messages.
    """
    if source is None and list(texts or ()) == ["-"]:
        texts, source = (), Path("-")
    records = [
        TextRecord(text, f"argument {index}") for index, text in enumerate(texts or (), start=1)
    ]
    if source is not None:
        records += read_records(source, selection)
    elif selection.field is not None:
        raise typer.BadParameter("--field names a field in the lines of --input FILE; add --input")
    elif selection.column is not None:
        raise typer.BadParameter("--column names a column of --input FILE; add --input")
    if not records:
        if source is None:
            raise typer.BadParameter(
                f"no texts given: pass {argument} arguments, - for stdin, or --input FILE"
            )
        raise typer.BadParameter(f"{'stdin' if str(source) == '-' else source} is empty")
    return records


def given_entities(records: Sequence[TextRecord], field: str) -> list[list[tuple[int, int, str]]]:
    """Return the entities in a field of each record, as `shoal extract entities --output` writes
    them. Raises InputError.
    """
    return [_entities(record, field) for record in records]


def _entities(record: TextRecord, field: str) -> list[tuple[int, int, str]]:
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
    raise InputError(
        f"{where}: {value!r} in the field {field!r} is not an object with the numbers start and end"
    )


@contextmanager
def located(records: Sequence[TextRecord], name: str) -> Iterator[None]:
    """Add the source of the record to an error about `name[i]`."""
    try:
        yield
    except ShoalError as error:
        match = re.match(rf"{name}\[(\d+)\]", error.field)
        if match is not None and int(match.group(1)) < len(records):
            error.add_note(f"at {records[int(match.group(1))].where}")
        raise
