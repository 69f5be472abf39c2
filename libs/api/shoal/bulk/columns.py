"""Arrow columns of the results of `encode`. pyarrow is an argument, because it is optional.

Vectors are fixed-size lists, which pandas, polars, DuckDB and LanceDB read as vectors.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.results import EncodeResult

SKIPPED: Final = "skipped"
"""The column with the reason of an item without a result."""


def fit_to_schema(pyarrow: Any, table: Any, schema: Any) -> Any:
    """Return the table with all columns of `schema`, in its types; null where it lacks one.

    Raises ArrowInvalid if it has others.
    """
    others = sorted(set(table.column_names) - set(schema.names))
    if others:
        raise pyarrow.ArrowInvalid(f"earlier parts have no {', '.join(others)}")
    columns = [
        table[field.name].cast(field.type)
        if field.name in table.column_names
        else pyarrow.nulls(len(table), field.type)
        for field in schema
    ]
    return pyarrow.table(columns, schema=schema)


def writer_options(pyarrow: Any, schema: Any) -> dict[str, Any]:
    """Return the options of a Parquet writer: only texts have dictionaries, because numbers of
    vectors rarely repeat. With a dictionary, a file of them is 40 % larger.
    """
    texts = [field.name for field in schema if pyarrow.types.is_string(field.type)]
    return {"compression": "zstd", "use_dictionary": texts}


class EncodedRows:
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
        if result.chunks.pages is not None:
            names["page"] = pa.int32()
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
