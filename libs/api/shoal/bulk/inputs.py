"""Reads the input of a job as a stream of chunks of a fixed number of rows.

Memory is bounded by the chunk, which has at most MAX_CHUNK_BYTES: Parquet files are read by pages,
whatever the size of their row groups, and lines of JSON and rows of CSV one by one. The rows of
several files are numbered as if the files were one, so a chunk may have rows of several.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, Protocol

from shoal.bulk.failures import JobError, StorageError
from shoal.bulk.matching import DELIMITERS, InputFormat, detect_format
from shoal.bulk.places import opened
from shoal.bulk.spec import BulkRecipe, InputFile, InputVersion

MAX_LINE_BYTES: Final = 64 << 20
MAX_CHUNK_BYTES: Final = 128 << 20
"""Maximum size of the rows of a chunk: of lines, or of the needed columns of Parquet."""
_MAX_SHOWN_COLUMNS: Final = 20
_BATCH_ROWS: Final = 256
"""Rows of Parquet that are decoded at once, after which the size of the chunk is checked."""
_BUFFER_BYTES: Final = 1 << 20
_FOOTER_THREADS: Final = 8
"""Threads that read the footers of Parquet files."""

_Row = tuple[dict[str, object], str]
"""The fields of a row, and the problem of one that has none."""
IsWanted = Callable[[int], bool]
"""Returns whether a chunk must be read, by its number."""


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Consecutive rows of the input.

    Attributes:
        first: The index of the first row in the input.
        texts: A text for each row; empty where `problems` says why the row has none.
        problems: Reasons of rows without a text, by their index in the chunk.
        kept: The values of the columns to copy: an Arrow array of Parquet, a list of JSON.
        queries: A query for each row, if the recipe has a column of them.
        characters: The number of characters of all texts.
    """

    number: int
    first: int
    texts: Sequence[str]
    problems: dict[int, str]
    kept: dict[str, Any]
    queries: Sequence[str] = ()
    characters: int = 0

    def __len__(self) -> int:
        return len(self.texts)


class InputSource(Protocol):
    """The files of an input. Raises JobError if it does not have the recipe's columns."""

    total: int | None
    """Number of rows; None if it is only known at the end."""

    def chunks(self, wanted: IsWanted) -> Iterator[RowChunk]:
        """Yield the wanted chunks in order. Raises JobError."""

    def estimate(self, size: int) -> int | None:
        """Estimate the number of rows of files of this size, by those read; None if unknown."""

    def take_read(self) -> list[InputFile]:
        """Return the files that were read since the last call."""


def open_source(version: InputVersion, recipe: BulkRecipe) -> InputSource:
    """Open an input by the suffix of its files. Raises JobError."""
    kinds: dict[InputFormat, Callable[[Sequence[InputFile], BulkRecipe], InputSource]] = {
        "Parquet": ParquetSource,
        "JSON lines": LineSource,
        "CSV": TableSource,
    }
    return kinds[detect_format(version.files[0].uri)](version.files, recipe)


class _ReadFiles:
    """Notes which files are read."""

    def __init__(self) -> None:
        self._read: list[InputFile] = []

    def take_read(self) -> list[InputFile]:
        """Return the files that were read since the last call."""
        found = self._read.copy()
        del self._read[:-1]  # The last one is still being read.
        return found


@dataclass
class _Texts:
    """Collects the rows of a chunk."""

    recipe: BulkRecipe
    texts: list[str] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)
    characters: int = 0

    def add(self, text: object, query: object, problem: str = "") -> None:
        """Add a row: its text, and its query if the recipe has a column of them."""
        problem = problem or _problem(self.recipe.text, text)
        if self.recipe.query_column:
            problem = problem or _problem(self.recipe.query_column, query)
            self.queries.append(query if isinstance(query, str) and not problem else "")
        if problem:
            self.problems[len(self.texts)] = problem
        self.texts.append(text if isinstance(text, str) and not problem else "")
        self.characters += len(self.texts[-1])

    def chunk(self, number: int, kept: dict[str, Any]) -> RowChunk:
        first = number * self.recipe.chunk_rows
        return RowChunk(
            number, first, self.texts, self.problems, kept, self.queries, self.characters
        )


def _problem(column: str, text: object) -> str:
    """Return why a value is not a text that can be sent; empty if it is one."""
    if text is None or text == "":
        return f"the row has no text in {column!r}"
    if isinstance(text, bytes):
        return f"the text in {column!r} is not valid UTF-8"
    if not isinstance(text, str):
        return f"{column!r} has {type(text).__name__} {text!r:.40}; a text is needed"
    try:
        text.encode()
    except UnicodeError:
        return f"the text in {column!r} is not valid Unicode"
    return ""


class ParquetSource(_ReadFiles):
    """Parquet files, of which only the needed columns are read."""

    def __init__(self, files: Sequence[InputFile], recipe: BulkRecipe) -> None:
        super().__init__()
        self._files, self._recipe = files, recipe
        first = self._footer(files[0])
        with ThreadPoolExecutor(_FOOTER_THREADS) as threads:
            footers = [first, *threads.map(self._footer, files[1:])]
        for file, (_, types) in zip(files, footers, strict=True):
            for name in recipe.keep:
                if types[name] != first[1][name]:
                    raise JobError(
                        f"the column {name!r} of {file.uri} has the type {types[name]}, and of "
                        f"{files[0].uri} {first[1][name]}; all files of an input need the same"
                    )
        self._rows = [rows for rows, _ in footers]
        self.total: int | None = sum(self._rows)

    def chunks(self, wanted: IsWanted) -> Iterator[RowChunk]:
        """Yield chunks of consecutive batches, which are cut at the borders of chunks."""
        size, total = self._recipe.chunk_rows, sum(self._rows)
        pending: list[Any] = []
        pending_bytes = 0
        for begin, batch in self._batches(wanted):
            end = begin + len(batch)
            while begin < end:
                number = begin // size
                stop = min((number + 1) * size, total)
                if wanted(number):
                    pending.append(batch.slice(len(batch) - (end - begin), stop - begin))
                    pending_bytes += sum(map(_decoded_bytes, pending[-1].columns))
                    _check_size(begin, pending_bytes)
                    if stop <= end:
                        yield self._chunk(number, pending)
                        pending.clear()
                        pending_bytes = 0
                begin = min(stop, end)

    def estimate(self, size: int) -> int | None:
        return self.total

    def _footer(self, file: InputFile) -> tuple[int, dict[str, Any]]:
        """Return the number of rows of a file, and the types of the columns to keep."""
        with _parquet_file(file.uri) as opened_file:
            schema = opened_file.schema_arrow
            _check_columns(file.uri, schema, self._recipe)
            types = {name: schema.field(name).type for name in self._recipe.keep}
            return opened_file.metadata.num_rows, types

    def _batches(self, wanted: IsWanted) -> Iterator[tuple[int, Any]]:
        """Yield the index of the first row of each batch, and the batch; files without a wanted
        chunk are not read.
        """
        import pyarrow

        begin = 0
        for file, rows in zip(self._files, self._rows, strict=True):
            if self._has_wanted(begin, rows, wanted):
                self._read.append(file)
                with _parquet_file(file.uri) as opened_file:
                    try:
                        yield from self._read_batches(opened_file, begin, wanted)
                    except (pyarrow.ArrowException, OSError) as error:
                        raise JobError(f"the input {file.uri} cannot be read: {error}") from error
            begin += rows

    def _read_batches(self, file: Any, begin: int, wanted: IsWanted) -> Iterator[tuple[int, Any]]:
        """Yield the batches of a file; row groups without a wanted chunk are not read."""
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            end = begin + rows
            if self._has_wanted(begin, rows, wanted):
                for batch in file.iter_batches(
                    batch_size=min(self._recipe.chunk_rows, _BATCH_ROWS),
                    row_groups=[group],
                    columns=list(self._recipe.columns),
                    use_threads=False,
                ):
                    yield begin, batch
                    begin += len(batch)
            begin = end

    def _has_wanted(self, begin: int, rows: int, wanted: IsWanted) -> bool:
        size = self._recipe.chunk_rows
        return rows > 0 and any(map(wanted, range(begin // size, (begin + rows - 1) // size + 1)))

    def _chunk(self, number: int, slices: Sequence[Any]) -> RowChunk:
        import pyarrow

        recipe, rows = self._recipe, _Texts(self._recipe)
        for batch in slices:
            texts = _decoded(batch.column(recipe.text))
            queries = _decoded(batch.column(recipe.query_column)) if recipe.query_column else texts
            for text, query in zip(texts, queries, strict=True):
                rows.add(text, query)
        kept = {
            name: pyarrow.chunked_array([batch.column(name) for batch in slices]).combine_chunks()
            for name in recipe.keep
        }
        return rows.chunk(number, kept)


def _parquet_file(uri: str) -> Any:
    """Open a Parquet file within a context. Raises JobError."""
    import pyarrow
    from pyarrow import parquet

    stream = opened(uri)
    try:
        # A buffer makes the reader fetch columns by pages; pre_buffer would hold row groups.
        return _ClosingFile(
            parquet.ParquetFile(stream, buffer_size=_BUFFER_BYTES, pre_buffer=False), stream
        )
    except (pyarrow.ArrowException, OSError) as error:
        stream.close()
        raise JobError(
            f"the input {uri} is not a Parquet file that can be read: {error}"
        ) from error


def _check_size(row: int, size: int) -> None:
    """Raise JobError if the rows of a chunk up to this one have too many bytes."""
    if size > MAX_CHUNK_BYTES:
        raise JobError(
            f"the chunk with row {row:,} of the input has {size:,} bytes or more, and at most "
            f"{MAX_CHUNK_BYTES:,} are allowed: start another job with fewer chunk_rows"
        )


def _decoded_bytes(column: Any) -> int:
    """Return the size of an array, with the texts of a dictionary as often as they are used."""
    from pyarrow import compute, types

    if not types.is_dictionary(column.type):
        return int(column.nbytes)
    kind, indices = column.type.value_type, column.indices
    if not (types.is_string(kind) or types.is_large_string(kind)):
        return int(indices.nbytes)
    return compute.sum(compute.binary_length(column.dictionary).take(indices)).as_py() or 0


def _decoded(column: Any) -> list[object]:
    """Return the texts of a column; empty bytes stand for a text that is not UTF-8."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:  # Parquet's readers do not check texts.
        return [_decoded_value(value) for value in column]


def _decoded_value(value: Any) -> object:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return b""


class _ClosingFile:
    """Closes the stream of a Parquet file at the end of a block, which pyarrow does not."""

    def __init__(self, file: Any, stream: BinaryIO) -> None:
        self._file, self._stream = file, stream

    def __enter__(self) -> Any:
        return self._file

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def _check_names(uri: str, names: Sequence[str], recipe: BulkRecipe) -> None:
    """Raise JobError if a column is missing, or if several have its name."""
    for name in recipe.columns:
        if names.count(name) != 1:
            found = "no column" if name not in names else "several columns"
            shown = ", ".join(f"{one:.50}" for one in names[:_MAX_SHOWN_COLUMNS])
            more = f" and {len(names) - _MAX_SHOWN_COLUMNS:,} more"
            raise JobError(
                f"the input {uri} has {found} {name!r}; its columns are {shown}"
                f"{more if len(names) > _MAX_SHOWN_COLUMNS else ''}"
            )


def _check_columns(uri: str, schema: Any, recipe: BulkRecipe) -> None:
    """Raise JobError if a column is missing, or one of texts has another type."""
    from pyarrow import types

    _check_names(uri, schema.names, recipe)
    for name in filter(None, (recipe.text, recipe.query_column)):
        kind = schema.field(name).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(kind) or types.is_large_string(kind)):
            raise JobError(f"the column {name!r} of {uri} has the type {kind}; texts are needed")


class LineSource(_ReadFiles):
    """Lines of JSON: objects with the columns as fields."""

    total: int | None = None

    def __init__(self, files: Sequence[InputFile], recipe: BulkRecipe) -> None:
        super().__init__()
        self._files, self._recipe = files, recipe
        self._rows = self._bytes = self._chunk_begin = 0
        opened(files[0].uri).close()

    def estimate(self, size: int) -> int | None:
        return int(self._rows * size / self._bytes) if self._bytes else None

    def chunks(self, wanted: IsWanted) -> Iterator[RowChunk]:
        rows = self._all_rows()
        for number in itertools.count():
            self._chunk_begin = self._bytes
            found = list(itertools.islice(rows, self._recipe.chunk_rows))
            if not found:
                return
            if wanted(number):
                yield self._chunk(number, found)

    def _all_rows(self) -> Iterator[bytes | _Row]:
        self._rows = self._bytes = self._chunk_begin = 0
        for file in self._files:
            self._read.append(file)
            for row in self._read_rows(file.uri):
                self._rows += 1
                yield row

    def _read_rows(self, uri: str) -> Iterator[bytes | _Row]:
        """Yield the rows of a file; those of JSON are parsed when they are needed."""
        return self._read_lines(uri)

    def _read_lines(self, uri: str) -> Iterator[bytes]:
        with opened(uri) as raw, io.BufferedReader(raw, _BUFFER_BYTES) as file:  # type: ignore[type-var]
            for number in itertools.count(1):
                try:
                    line = file.readline(MAX_LINE_BYTES + 1)
                except OSError as error:
                    raise StorageError(f"the input {uri} cannot be read: {error}") from error
                if len(line) > MAX_LINE_BYTES:
                    raise JobError(
                        f"line {number:,} of {uri} is longer than {MAX_LINE_BYTES >> 20} MiB"
                    )
                if not line:
                    return
                self._bytes += len(line)
                _check_size(self._rows, self._bytes - self._chunk_begin)
                yield line

    def _chunk(self, number: int, found: Sequence[bytes | _Row]) -> RowChunk:
        recipe, rows = self._recipe, _Texts(self._recipe)
        kept: dict[str, list[object]] = {name: [] for name in recipe.keep}
        for row in found:
            fields, problem = _parsed(row) if isinstance(row, bytes) else row
            rows.add(fields.get(recipe.text), fields.get(recipe.query_column), problem)
            for name, values in kept.items():
                values.append(fields.get(name))
        return rows.chunk(number, kept)


def _parsed(line: bytes) -> _Row:
    """Return the fields of a line, or the problem of one that is not an object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {}, f"the line is not JSON: {error}"
    if not isinstance(value, dict):
        return {}, f"the line is not a JSON object but {type(value).__name__}"
    return value, ""


class TableSource(LineSource):
    """Rows of .csv and .tsv files below a header. All values are texts; blank lines are ignored."""

    def __init__(self, files: Sequence[InputFile], recipe: BulkRecipe) -> None:
        super().__init__(files, recipe)
        csv.field_size_limit(MAX_LINE_BYTES)  # The default, 128 Ki, is shorter than documents.
        next(
            self._read_rows(files[0].uri), None
        )  # A wrong header is reported before the job starts.

    def _read_rows(self, uri: str) -> Iterator[_Row]:
        lines = map(_decoded_line, self._read_lines(uri), itertools.count())
        delimiter = DELIMITERS[uri[uri.rindex(".") :].lower()]
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            names = next(reader, [])
            _check_names(uri, names, self._recipe)
            needed = [(name, names.index(name)) for name in self._recipe.columns]
            for row in filter(None, reader):
                if len(row) == len(names):
                    yield {name: row[index] for name, index in needed}, ""
                else:
                    yield {}, f"the row has {len(row)} columns; the header has {len(names)}"
        except csv.Error as error:
            raise JobError(
                f"line {reader.line_num:,} of {uri} is not a row of a table: {error}"
            ) from error


def _decoded_line(line: bytes, number: int) -> str:
    """Return a line of a table. Bytes that are not UTF-8 become half surrogates, so that only their
    row fails.
    """
    if number == 0:
        line = line.removeprefix(codecs.BOM_UTF8)  # Excel writes one.
    return line.decode(errors="surrogateescape")
