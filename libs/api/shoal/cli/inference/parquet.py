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

import numpy as np
from numpy.typing import NDArray

from shoal.cli.failures import InputError
from shoal.cli.inference.files import Record
from shoal.requests.merging import merged_embedding_id
from shoal.results import EncodeResult

SUFFIX: Final = ".parquet"
SKIPPED: Final = "skipped"
_OWN: Final = frozenset(
    (
        *("dense", "scale", "offset", "sparse", "multi_vector", SKIPPED),
        *("chunk_start", "chunk_end", "chunk_tokens", "chunk_text"),
    )
)
"""Columns of results, which replace columns of the same name of the input."""

Write = Callable[[EncodeResult, Sequence[Record]], None]


@contextmanager
def writing(output: Path, model: str, records: Sequence[Record]) -> Iterator[Write]:
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

    def write(result: EncodeResult, part: Sequence[Record]) -> None:
        nonlocal begin
        rows = _Rows(pyarrow, result, len(part))
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
            writer = parquet.ParquetWriter(temporary, schema, compression="zstd")
        for table in waiting:
            writer.write_table(_fitted(pyarrow, table, writer.schema))
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


def _fitted(pyarrow: Any, table: Any, schema: Any) -> Any:
    """Return the table with all columns of `schema`, in its types; null where it lacks one."""
    columns = [
        table[field.name].cast(field.type)
        if field.name in table.column_names
        else pyarrow.nulls(len(table), field.type)
        for field in schema
    ]
    return pyarrow.table(columns, schema=schema)


class _Rows:
    """The rows of one result: an item each, or one of its chunks.

    `has_vectors`: whether any row has one.
    """

    def __init__(self, pyarrow: Any, result: EncodeResult, items: int) -> None:
        self._pyarrow = pyarrow
        self._result = result
        self._skipped = {item.index: item.message for item in result.skipped}
        # (item, row of the vectors); an item that was skipped keeps a row, which has no vector.
        self._places = [
            place
            for item in range(items)
            for place in (
                [(item, -1)]
                if item in self._skipped
                else [(item, chunk.row) for chunk in result.chunks[item]]
                if result.is_divided
                else [(item, item)]
            )
        ]
        self._rows = np.array([row for _, row in self._places], dtype=np.int64)
        self.has_vectors = bool((self._rows >= 0).any())

    def source(self, values: Any) -> Any:
        """Repeat the values of items for their rows."""
        return values.take(self._pyarrow.array([item for item, _ in self._places]))

    def results(self) -> dict[str, Any]:
        """Return the columns of the result, by name."""
        pa, result = self._pyarrow, self._result
        skipped = pa.array([self._skipped.get(item) for item, _ in self._places], pa.string())
        if not self.has_vectors:
            return {SKIPPED: skipped}
        columns: dict[str, Any] = self._chunks() if result.is_divided else {}
        forms = result.representations
        if "dense" in forms:
            vectors = result.vectors
            columns["dense"] = self._vectors(np.asarray(vectors.array))
            for name, numbers in (("scale", vectors.scale), ("offset", vectors.offset)):
                if numbers is not None:
                    columns[name] = self._numbers(np.asarray(numbers))
        if "sparse" in forms:
            kind = pa.struct(
                [("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float32()))]
            )
            columns["sparse"] = pa.array([self._sparse(row) for row in self._rows], kind)
        if "multi_vector" in forms:
            width = result.multi_vector.values.shape[1]
            kind = pa.list_(pa.list_(pa.from_numpy_dtype(result.multi_vector.values.dtype), width))
            columns["multi_vector"] = pa.array(
                [None if row < 0 else list(result.multi_vector[row]) for row in self._rows], kind
            )
        return columns | {SKIPPED: skipped}

    def _chunks(self) -> dict[str, Any]:
        pa, result = self._pyarrow, self._result
        by_row = {chunk.row: chunk for chunks in result.chunks for chunk in chunks}
        found = [by_row.get(int(row)) for row in self._rows]
        names = {"start": pa.int64(), "end": pa.int64(), "tokens": pa.int32(), "text": pa.string()}
        return {
            f"chunk_{name}": pa.array([one and getattr(one, name) for one in found], kind)
            for name, kind in names.items()
        }

    def _sparse(self, row: int) -> dict[str, Any] | None:
        if row < 0:
            return None
        indices, values = self._result.sparse[row]
        return {"indices": indices, "values": values}

    def _vectors(self, array: NDArray[Any]) -> Any:
        """Return a column of fixed-size lists of [rows, width] numbers; null where the row is
        negative.
        """
        pa = self._pyarrow
        absent = self._rows < 0
        taken = array[np.where(absent, 0, self._rows)]
        values = pa.array(np.ascontiguousarray(taken).reshape(-1))
        mask = pa.array(absent) if absent.any() else None
        return pa.FixedSizeListArray.from_arrays(values, taken.shape[1], mask=mask)

    def _numbers(self, numbers: NDArray[Any]) -> Any:
        absent = self._rows < 0
        return self._pyarrow.array(numbers[np.where(absent, 0, self._rows)], mask=absent)


def _pyarrow(output: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{output} needs pyarrow: pip install 'shoal[parquet]'") from None
    return pyarrow, parquet


def _columns(records: Sequence[Record]) -> dict[str, list[object]]:
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
        raise InputError(f"a text of the input is no valid Unicode: {error}") from None
    if pyarrow.types.is_null(array.type):
        return array.cast(pyarrow.string())
    return _as_json(pyarrow, values) if pyarrow.types.is_nested(array.type) else array


def _as_json(pyarrow: Any, values: list[object]) -> Any:
    """Return texts as they are, and other values as JSON."""
    texts = [
        value if isinstance(value, str) or value is None else json.dumps(value) for value in values
    ]
    return pyarrow.array(texts, pyarrow.string())
