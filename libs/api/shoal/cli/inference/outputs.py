"""Writes results to files: .npy, .npz and .parquet for vectors, .jsonl for all results, one line
per item.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import typer
from numpy.typing import NDArray

from shoal.cli.failures import InputError
from shoal.cli.inference import parquet
from shoal.cli.inference.files import TextRecord
from shoal.cli.text import document
from shoal.results import Chunk, EncodeResult, ExtractResult, Form, ScoreResult, Skipped

Row = dict[str, object]
JSON_LINES = (".jsonl",)
_OF_SCHEMAS = ("entities", "classifications", "relations", "structures")
_FIELDS = {"structure": _OF_SCHEMAS, "generated_text": (), "ocr_text": ("regions",)}
"""Fields of an extraction that a command reports, where these are not the one of the same name."""
_ANSWER_FIELDS: Final = frozenset(
    (
        *("dense", "scale", "offset", "sparse", "multi_vector", "chunks"),
        *("labels", "regions", *_OF_SCHEMAS),
        *("generated_text", "ocr_text", "form", "finish_reason", "truncated", "skipped"),
    )
)
"""Fields that lines of results have, which replace fields of the same name of the input."""


def check(output: Path | None, *suffixes: str, name: str = "--output") -> None:
    """Raise BadParameter, before any request is sent, for a file that cannot be written."""
    if output is None or str(output) == "-":
        return
    if output.suffix not in suffixes:
        raise typer.BadParameter(f"{name} {output} must end in {' or '.join(suffixes)}")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"{name} {output}: the directory {output.parent} does not exist")


def write_lines(output: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line, to a file or, for `-`, to stdout."""
    if str(output) == "-":
        sys.stdout.writelines(document(row) + "\n" for row in rows)
    else:
        replace_file(
            output, lambda file: file.writelines(document(row).encode() + b"\n" for row in rows)
        )


def write_vectors(
    output: Path, model: str, result: EncodeResult, records: Sequence[TextRecord]
) -> None:
    """Write a result in the format of the file's suffix. Raises InputError if the format cannot
    represent it.
    """
    if output.suffix == ".npy":
        replace_file(output, lambda file: np.save(_Bytes(file), _only_dense(result)))
    elif output.suffix == ".npz":
        replace_file(output, lambda file: np.savez(file, **_arrays(result)))  # type: ignore[arg-type]
    elif output.suffix == parquet.SUFFIX:
        with name_errors(output), parquet.writing(output, model, records) as write:
            write(result, records)
    else:
        write_lines(output, encoded_lines(result, records))


def encoded_lines(result: EncodeResult, records: Sequence[TextRecord]) -> Iterator[Row]:
    """Return one object per item, with what its text was read from."""
    return (
        _source_fields(record) | row
        for record, row in zip(records, encoded_rows(result), strict=True)
    )


def append_lines(file: BinaryIO, rows: Iterable[Row]) -> None:
    """Write one JSON object per line, so that readers of the file see them at once."""
    file.writelines(document(row).encode() + b"\n" for row in rows)
    file.flush()


def lines_before(output: Path, records: Sequence[TextRecord]) -> int:
    """Count the records that have a line in an interrupted file, and remove an incomplete last
    line.

    Raises InputError if the file's last line is not that of its record, because it was written from
    another input.
    """
    if not output.exists():
        return 0
    with output.open("r+b") as file:
        count, end, last = 0, 0, b""
        for line in file:
            if line.endswith(b"\n"):
                count, end, last = count + 1, end + len(line), line
        file.truncate(end)
    if not count:
        return 0
    problem = f"{output} has {count:,} lines, and line {count:,} is not of this input"
    try:
        row = json.loads(last)
        source = _source_fields(records[count - 1]).items()
        is_same = isinstance(row, dict) and all(
            row.get(name) == value for name, value in source if name not in _ANSWER_FIELDS
        )
    except (ValueError, IndexError):
        is_same = False
    if not is_same:
        raise InputError(
            f"{problem}: name the input that it was written from, or leave --resume out to begin "
            "again"
        )
    return count


def _source_fields(record: TextRecord) -> Row:
    """Return the JSON object that the text was read from, or one with only the text."""
    return record.fields if record.fields is not None else {"text": record.text}


def encoded_rows(result: EncodeResult) -> Iterator[Row]:
    """Yield one object per item, with numbers as stored: bytes of int8, uint8 and binary are
    integers, their scale a field temporary them.

    The object of a skipped item has only the reason, because JSON has no NaN.
    """
    forms, skipped = result.representations, _reasons(result.skipped)
    if result.is_divided:
        for index, chunks in enumerate(result.chunks):
            yield (
                skipped[index]
                if index in skipped
                else {"chunks": [_chunk(result, forms, chunk) for chunk in chunks]}
            )
        return
    rows: Sized = (
        result.dense
        if "dense" in forms
        else result.sparse
        if "sparse" in forms
        else result.multi_vector
    )
    for index in range(len(rows)):
        yield skipped[index] if index in skipped else _encoded(result, forms, index)


def _chunk(result: EncodeResult, forms: Sequence[Form], chunk: Chunk) -> Row:
    place: Row = {
        "start": chunk.start,
        "end": chunk.end,
        "tokens": chunk.tokens,
        "text": chunk.text,
    }
    if chunk.page:
        place["page"] = chunk.page
    return place | _encoded(result, forms, chunk.row)


def _encoded(result: EncodeResult, forms: Sequence[Form], index: int) -> Row:
    row: Row = {}
    if "dense" in forms:
        vectors = result.vectors
        row["dense"] = vectors.array[index].tolist()
        row |= {} if vectors.scale is None else {"scale": float(vectors.scale[index])}
        row |= {} if vectors.offset is None else {"offset": float(vectors.offset[index])}
    if "sparse" in forms:
        columns, weights = result.sparse[index]
        row["sparse"] = {"indices": columns.tolist(), "values": weights.tolist()}
    if "multi_vector" in forms:
        row["multi_vector"] = result.multi_vector[index].tolist()
    return row


def _reasons(skipped: Sequence[Skipped]) -> dict[int, Row]:
    return {item.index: {"skipped": item.message} for item in skipped}


def ranked_rows(result: ScoreResult, records: Sequence[TextRecord]) -> Iterator[Row]:
    """Yield one object for each ranked document, best first."""
    for rank, index in enumerate(result.ranking.tolist(), start=1):
        yield {"rank": rank, "index": index, "score": float(result.scores[index])} | _source_fields(
            records[index]
        )


def extracted_rows(
    result: ExtractResult, records: Sequence[TextRecord], kind: str
) -> Iterator[Row]:
    """Yield one object per item, with the field `kind` of its extraction (of a schema all that it
    finds), and the reason if skipped.
    """
    skipped = _reasons(result.skipped)
    for index, (record, extraction) in enumerate(zip(records, result, strict=True)):
        found = asdict(extraction)
        named = {name: found[name] for name in _FIELDS.get(kind, (kind,))}
        for region in named.get("regions", ()):
            if not region["polygon"]:
                del region["polygon"]
        if kind == "generated_text":
            form = {} if extraction.form is None else {"form": extraction.form}
            named = {kind: extraction.text, **form, "finish_reason": extraction.finish_reason}
        elif kind == "ocr_text":
            named = {kind: extraction.text, "regions": named["regions"], "form": extraction.form}
            named = {name: value for name, value in named.items() if value} | {
                "finish_reason": extraction.finish_reason
            }
        cut = {"truncated": True} if extraction.truncated else {}
        yield _source_fields(record) | named | cut | skipped.get(index, {})


def _only_dense(result: EncodeResult) -> np.ndarray[tuple[int, ...], np.dtype[np.number]]:
    if result.is_divided:
        raise InputError("a .npy file cannot hold where chunks are; write .npz, .parquet or .jsonl")
    if result.representations != ("dense",):
        raise InputError(
            "a .npy file can hold dense vectors only; write sparse and multi-vector results to "
            ".npz, .parquet or .jsonl"
        )
    if result.vectors.scale is not None:
        raise InputError(
            f"a .npy file cannot hold the scales of {result.vectors.data_type} vectors; write "
            ".npz, .parquet or .jsonl"
        )
    return result.vectors.array


def _arrays(result: EncodeResult) -> dict[str, NDArray[Any]]:
    """Return the arrays of a result, by name."""
    arrays: dict[str, NDArray[Any]] = {}
    if "dense" in result.representations:
        vectors = result.vectors
        arrays["dense"] = vectors.array
        arrays |= {} if vectors.scale is None else {"scale": vectors.scale}
        arrays |= {} if vectors.offset is None else {"offset": vectors.offset}
    if "sparse" in result.representations:
        sparse = result.sparse
        arrays |= {
            "sparse_data": sparse.data,
            "sparse_indices": sparse.indices,
            "sparse_indptr": sparse.indptr,
        }
        arrays["sparse_shape"] = np.array(sparse.shape)
    if "multi_vector" in result.representations:
        arrays |= {
            "multi_vector_values": result.multi_vector.values,
            "multi_vector_offsets": result.multi_vector.offsets,
        }
    if result.embedding_id:
        arrays["embedding_id"] = np.array(result.embedding_id)  # a text
    if result.is_divided:
        names = ("offsets", "starts", "ends", "tokens")
        arrays |= {f"chunk_{name}": getattr(result.chunks, name) for name in names}
        arrays |= {} if result.chunks.pages is None else {"chunk_pages": result.chunks.pages}
    return arrays


def replace_file(output: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a temporary file and rename it, so that no reader sees a part of the results."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with name_errors(output):
            with temporary.open("wb") as file:
                write(file)
            temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def name_errors(output: Path) -> Iterator[None]:
    """Raise an OSError of the block, such as that of a full disk, with the name of the output."""
    try:
        yield
    except BrokenPipeError:
        raise  # of stdout
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(error.errno, reason, str(output)) from None


class _Bytes:
    """Passes bytes on to a file. numpy writes to the descriptor of a file itself, and reports a
    full disk as numbers of bytes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.write = file.write
