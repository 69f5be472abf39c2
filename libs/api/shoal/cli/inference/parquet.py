"""Writes vectors to a Parquet file, a row group for each answer, so that memory does not grow with
the file.

Vectors are fixed-size lists, which pandas, polars, DuckDB and LanceDB read as vectors. The file
appears under its name once it is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from shoal.bulk.columns import SKIPPED, EncodedRows, fit_to_schema, writer_options
from shoal.cli.failures import InputError
from shoal.cli.inference.files import TextRecord
from shoal.requests.merging import merged_embedding_id
from shoal.results import EncodeResult

SUFFIX: Final = ".parquet"
_OWN: Final = frozenset(
    (
        *("dense", "scale", "offset", "sparse", "multi_vector", SKIPPED),
        *("chunk_start", "chunk_end", "chunk_tokens", "chunk_text", "chunk_page"),
    )
)
"""Columns of results, which replace columns of the same name of the input."""

Write = Callable[[EncodeResult, Sequence[TextRecord]], None]


@contextmanager
def writing(output: Path, model: str, records: Sequence[TextRecord]) -> Iterator[Write]:
    """Yield a function that appends the rows of a result and its records, which must be passed in
    the order of `records`.

    A row is an item, or one of its chunks. It has the fields that the item's text was read with,
    its vectors in the forms of the result, and in `skipped` the reason of an item without a result.
    If the block raises, the file is not written.

    Args:
        model: Written to the file's metadata as `shoal.model`, next to `shoal.revision` and
            `shoal.embedding_id`.
        records: All records of the file. The types of their columns are chosen from all values.

    Raises:
        InputError: pyarrow is not installed.
    """
    pyarrow, parquet = _pyarrow(output)
    sources = {name: _column(pyarrow, values) for name, values in _columns(records).items()}
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    writer: Any = None
    begin = 0
    ids: list[str] = []
    # Answers without any vector do not show the types of the columns, and wait for one that does.
    waiting: list[Any] = []

    def write(result: EncodeResult, part: Sequence[TextRecord]) -> None:
        nonlocal begin
        rows = EncodedRows(pyarrow, result, len(part))
        columns = {
            name: rows.source(values.slice(begin, len(part))) for name, values in sources.items()
        }
        waiting.append(pyarrow.table(columns | rows.results()))
        begin += len(part)
        if rows.has_vectors:
            ids.append(result.embedding_id)
        if writer is not None or rows.has_vectors:
            flush({"shoal.model": model, "shoal.revision": result.revision})

    def flush(noted: dict[str, str]) -> None:
        nonlocal writer
        if writer is None:
            schema = waiting[-1].schema.with_metadata(noted)
            writer = parquet.ParquetWriter(temporary, schema, **writer_options(pyarrow, schema))
        for table in waiting:
            writer.write_table(fit_to_schema(pyarrow, table, writer.schema))
        waiting.clear()

    try:
        yield write
        if waiting:
            flush({"shoal.model": model})
        if writer is not None:
            writer.add_key_value_metadata({"shoal.embedding_id": merged_embedding_id(ids)})
            writer.close()
            temporary.replace(output)
    except pyarrow.ArrowException as error:
        raise InputError(f"{output} cannot hold the columns of the input: {error}") from None
    finally:
        try:
            if writer is not None:
                writer.close()
        finally:
            temporary.unlink(missing_ok=True)


def _pyarrow(output: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{output} needs pyarrow: pip install 'shoal[parquet]'") from None
    return pyarrow, parquet


def _columns(records: Sequence[TextRecord]) -> dict[str, list[object]]:
    """Return the values of each field that the records were read from; the text alone where they
    have no fields.
    """
    rows = [
        record.fields if record.fields is not None else {"text": record.text} for record in records
    ]
    names = dict.fromkeys(name for row in rows for name in row if name not in _OWN)
    return {name: [row.get(name) for row in rows] for name in names}


def _column(pyarrow: Any, values: list[object]) -> Any:
    """Return the values in the type that pyarrow finds for them; as JSON if they have none in
    common, or are lists or objects, of which Parquet cannot hold empty ones.
    """
    try:
        array = pyarrow.array(values)
    except (pyarrow.ArrowException, TypeError, OverflowError):
        return _as_json(pyarrow, values)
    except UnicodeError as error:
        raise InputError(f"a text of the input is not valid Unicode: {error}") from None
    if pyarrow.types.is_null(array.type):
        return array.cast(pyarrow.string())
    return _as_json(pyarrow, values) if pyarrow.types.is_nested(array.type) else array


def _as_json(pyarrow: Any, values: list[object]) -> Any:
    """Return texts as they are, and other values as JSON."""
    texts = [
        value if isinstance(value, str) or value is None else json.dumps(value) for value in values
    ]
    return pyarrow.array(texts, pyarrow.string())
