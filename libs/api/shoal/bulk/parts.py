"""Makes the file of a chunk's results, and reads it again.

Rows are in input order. Every file has the columns `row` (the row's index in the input), the
columns that the recipe keeps, the results, and `error`: the reason of a row without a result.
Parts of vectors and scores are Parquet files; those of extractions are lines of JSON.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from shoal.bulk.columns import SKIPPED, EncodedRows, fit_to_schema, writer_options
from shoal.bulk.failures import JobError
from shoal.bulk.inputs import RowChunk
from shoal.bulk.kept import build_column, json_value, scalar_json
from shoal.bulk.sending import ChunkResults
from shoal.bulk.spec import BulkRecipe
from shoal.extractions import Extraction
from shoal.requests.merging import merged_embedding_id
from shoal.results import EncodeResult, ExtractResult, ScoreResult

ROW: Final = "row"
ERROR: Final = "error"
SCORE: Final = "score"
OWN_COLUMNS: Final = frozenset(
    (
        *(ROW, ERROR, SCORE, "dense", "scale", "offset", "sparse", "multi_vector"),
        *("chunk_start", "chunk_end", "chunk_tokens", "chunk_text"),
    )
)
"""Columns of results, which the recipe cannot keep from the input."""
TRUNCATED: Final = "truncated"
_FIELDS: Final[Mapping[str, Sequence[str]]] = {
    "entities": ("entities",),
    "classify": ("labels",),
    "relations": ("relations",),
    "generate": ("text", "form", "finish_reason", "tool_calls"),
    "structure": ("entities", "classifications", "relations", "structures"),
}
_EMPTY_FIELDS: Final = frozenset(("form", "tool_calls"))
"""Fields that are left out of a line if they are empty."""


@dataclass(frozen=True, slots=True)
class PartContent:
    """The content of a part.

    Attributes:
        rows: Number of input rows; rows of chunked texts are more.
        failed: Number of input rows with an error.
        truncated: Number of input rows with a text that was cut.
    """

    data: bytes
    rows: int
    failed: int
    tokens: int
    truncated: int = 0
    embedding_id: str = ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


class PartWriter:
    """Makes the parts of a job, which all have one schema.

    Attributes:
        schema: The Arrow schema of all parts, base64; empty until the first part with a result, and
            for lines of JSON.
    """

    def __init__(self, recipe: BulkRecipe, schema: bytes = b"") -> None:
        import pyarrow

        refused = sorted(set(recipe.keep) & _result_columns(recipe))
        if refused:
            raise JobError(
                f"the output has columns {', '.join(refused)} of its results; rename these "
                "columns of the input to keep them"
            )
        self._pa, self._recipe = pyarrow, recipe
        self._schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(schema)) if schema else None

    @property
    def schema(self) -> bytes:
        return self._schema.serialize().to_pybytes() if self._schema is not None else b""

    @property
    def has_schema(self) -> bool:
        """False if a part without any result has to wait for one that shows the types."""
        return self._recipe.verb == "extract" or self._schema is not None

    def decides_schema(self, answer: ChunkResults) -> bool:
        """Return True if the answer has a result."""
        return any(len(result.skipped) < len(rows) for rows, result in answer.pieces)

    def content(self, chunk: RowChunk, answer: ChunkResults, before: bytes = b"") -> PartContent:
        """Return the part of a chunk.

        Args:
            before: The earlier part. The answer's rows replace its failed ones.
        """
        if self._recipe.verb == "extract":
            return self._lines(chunk, answer, before)
        return self._table(chunk, answer, before)

    def _table(self, chunk: RowChunk, answer: ChunkResults, before: bytes) -> PartContent:
        pa = self._pa
        kept, errors = self._kept(chunk), answer.errors
        tables = [self._piece(kept, rows, result, errors) for rows, result in answer.pieces]
        answered = {row for rows, _ in answer.pieces for row in rows}
        lost = sorted(set(answer.errors) - answered)
        tables += [self._failed(kept, lost, errors)] if lost else []
        if self._schema is None:
            self._schema = max((table.schema for table in tables), key=len)
        fitted = [fit_to_schema(pa, table, self._schema) for table in tables]
        if before:
            old = read_table(before)
            fitted.append(fit_to_schema(pa, old.filter(old[ERROR].is_null()), self._schema))
        table = pa.concat_tables(fitted).sort_by([(ROW, "ascending")])
        failed = len(set(table.filter(table[ERROR].is_valid())[ROW].to_pylist()))
        return self._written(table, chunk, answer, failed)

    def _written(
        self, table: Any, chunk: RowChunk, answer: ChunkResults, failed: int
    ) -> PartContent:
        from pyarrow import parquet

        embedding_id = merged_embedding_id(answer.embedding_ids)
        noted = {
            "shoal.model": self._recipe.model,
            "shoal.revision": next(iter(answer.revisions), ""),
            "shoal.embedding_id": embedding_id,
            "shoal.rows": str(len(chunk)),
            "shoal.failed": str(failed),
            "shoal.tokens": str(answer.tokens),
            "shoal.truncated": str(answer.truncated),
        }
        file = io.BytesIO()
        table = table.replace_schema_metadata({key: value for key, value in noted.items() if value})
        parquet.write_table(table, file, **writer_options(self._pa, table.schema))
        counts = (len(chunk), failed, answer.tokens, answer.truncated)
        return PartContent(file.getvalue(), *counts, embedding_id)

    def _kept(self, chunk: RowChunk) -> Any:
        """Return a table of `row` and the kept columns. Raises JobError if a value does not have
        the type of its column in earlier parts.
        """
        pa = self._pa
        columns = {ROW: pa.array(range(chunk.first, chunk.first + len(chunk)), pa.int64())}
        for name, values in chunk.kept.items():
            if isinstance(values, list):
                kind = self._schema.field(name).type if self._schema is not None else None
                values = build_column(pa, name, values, kind, chunk.first)
            columns[name] = values
        return pa.table(columns)

    def _piece(self, kept: Any, rows: list[int], result: object, errors: Mapping[int, str]) -> Any:
        """Return the table of a result's rows."""
        pa = self._pa
        if isinstance(result, ScoreResult):
            found = result.scores.astype(np.float32)
            columns = {SCORE: pa.array(found, mask=np.isnan(found))}
            places = rows
        else:
            assert isinstance(result, EncodeResult)  # noqa: S101  # for the type checker
            encoded = EncodedRows(pa, result, len(rows))
            columns = encoded.results()
            del columns[SKIPPED]
            places = encoded.source(pa.array(rows)).to_pylist()
        source = kept.take(pa.array(places, pa.int64()))
        reasons = pa.array([errors.get(row) for row in places], pa.string())
        return _joined(pa, source, {**columns, ERROR: reasons})

    def _failed(self, kept: Any, rows: list[int], errors: Mapping[int, str]) -> Any:
        pa = self._pa
        reasons = pa.array([errors[row] for row in rows], pa.string())
        return _joined(pa, kept.take(pa.array(rows, pa.int64())), {ERROR: reasons})

    def _lines(self, chunk: RowChunk, answer: ChunkResults, before: bytes) -> PartContent:
        lines = {line[ROW]: line for line in read_lines(before) if ERROR not in line}
        for row, reason in answer.errors.items():
            lines[chunk.first + row] = {**self._source(chunk, row), ERROR: reason}
        for rows, result in answer.pieces:
            assert isinstance(result, ExtractResult)  # noqa: S101  # for the type checker
            for row, extraction in zip(rows, result, strict=True):
                if row not in answer.errors:
                    found = self._extraction(extraction)
                    lines[chunk.first + row] = {**self._source(chunk, row), **found}
        ordered = [lines[row] for row in sorted(lines)]
        text = "".join(_line(line) + "\n" for line in ordered)
        data = text.encode(errors="replace")  # Kept values may have lone surrogates.
        failed = sum(ERROR in line for line in ordered)
        return PartContent(data, len(chunk), failed, answer.tokens, answer.truncated)

    def _source(self, chunk: RowChunk, row: int) -> dict[str, object]:
        kept = {
            name: json_value(values[row])
            if isinstance(values, list)
            else scalar_json(self._pa, values[row])
            for name, values in chunk.kept.items()
        }
        return {ROW: chunk.first + row, **kept}

    def _extraction(self, extraction: Extraction) -> dict[str, object]:
        found = asdict(extraction)
        named = {name: found[name] for name in _FIELDS[self._recipe.task["kind"]]}
        named = {name: value for name, value in named.items() if value or name not in _EMPTY_FIELDS}
        return named | ({TRUNCATED: True} if extraction.truncated else {})


def read_table(data: bytes) -> Any:
    """Return the Arrow table of a Parquet part."""
    import pyarrow
    from pyarrow import parquet

    return parquet.read_table(pyarrow.BufferReader(data))


def read_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the objects of a part of lines."""
    return (json.loads(line) for line in data.splitlines())


def read_content(data: bytes, suffix: str) -> PartContent:
    """Return a committed part. Raises JobError if it is not one of a job."""
    import pyarrow
    from pyarrow import parquet

    try:
        if suffix == ".jsonl":
            lines = list(read_lines(data))
            return PartContent(data, len(lines), sum(ERROR in line for line in lines), 0)
        noted = parquet.ParquetFile(pyarrow.BufferReader(data)).metadata.metadata or {}
        rows, failed, tokens, truncated = (int(noted[f"shoal.{key}".encode()]) for key in _COUNTS)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise JobError(f"a part cannot be read: {error}") from error
    identity = noted.get(b"shoal.embedding_id", b"").decode()
    return PartContent(data, rows, failed, tokens, truncated, identity)


_COUNTS: Final = ("rows", "failed", "tokens", "truncated")


def failed_rows(data: bytes, suffix: str) -> Iterable[dict[str, Any]]:
    """Return `row`, kept columns and `error` of the failed rows of a part, as JSON values."""
    import pyarrow

    if suffix == ".jsonl":
        return [line for line in read_lines(data) if ERROR in line]
    table = read_table(data)
    table = table.filter(table[ERROR].is_valid())
    names = [name for name in table.column_names if name not in OWN_COLUMNS - {ROW, ERROR}]
    columns = [[scalar_json(pyarrow, value) for value in table[name]] for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _result_columns(recipe: BulkRecipe) -> frozenset[str]:
    """Return the names of results that a job of the recipe may write."""
    if recipe.verb != "extract":
        return OWN_COLUMNS
    return OWN_COLUMNS.union(_FIELDS.get(recipe.task.get("kind", ""), ()), (TRUNCATED,))


def _line(values: dict[str, object]) -> str:
    """Return a line of a part, with null for NaN and infinities, which JSON does not have."""
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(json_value(values), ensure_ascii=False)


def _joined(pa: Any, table: Any, columns: Mapping[str, Any]) -> Any:
    """Return the table with further columns."""
    for name, values in columns.items():
        table = table.append_column(name, values)
    return table
