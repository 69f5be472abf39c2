"""Answers as files: .npy and .npz for vectors, .jsonl for everything, one line an item."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import numpy as np
import typer

from shoal.cli.inputs import Record
from shoal.cli.options import InputError
from shoal.results import EncodeResult, Extraction, ExtractResult, Form, ScoreResult, Skipped
from shoal.text import document

Row = dict[str, object]


def check(output: Path | None, *suffixes: str) -> None:
    """Refuses an output that cannot be written before any work is done."""
    if output is None or str(output) == "-":
        return
    if output.suffix not in suffixes:
        raise typer.BadParameter(f"--output {output} must end in {' or '.join(suffixes)}")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"--output {output}: there is no directory {output.parent}")


def write_lines(output: Path, rows: Iterable[Row]) -> None:
    """One JSON object a line, to a file or, for `-`, to stdout."""
    if str(output) == "-":
        sys.stdout.writelines(document(row) + "\n" for row in rows)
    else:
        _replace(output, lambda file: file.writelines(document(row).encode() + b"\n" for row in rows))


def write_vectors(output: Path, result: EncodeResult, records: Sequence[Record]) -> None:
    """An EncodeResult in the format of the file's name. Raises InputError where the format cannot hold it."""
    if output.suffix == ".npy":
        _replace(output, lambda file: np.save(file, _only_dense(result)))
    elif output.suffix == ".npz":
        _replace(output, lambda file: np.savez(file, **_arrays(result)))  # type: ignore[arg-type]
    else:
        write_lines(output, (_kept(record) | row for record, row in zip(records, encoded_rows(result), strict=True)))


def _kept(record: Record) -> Row:
    """The object that the text was read from, or one with the text alone."""
    return record.fields if record.fields is not None else {"text": record.text}


def encoded_rows(result: EncodeResult) -> Iterator[Row]:
    """One object an item, with numbers as stored: bytes of int8, uint8 and binary are whole numbers, their scale beside them.

    Of an item that was skipped only why: JSON has no NaN.
    """
    forms, skipped = result.representations, _why(result.skipped)
    rows: Sized = result.dense if "dense" in forms else result.sparse if "sparse" in forms else result.multi_vector
    for index in range(len(rows)):
        yield skipped[index] if index in skipped else _encoded(result, forms, index)


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


def _why(skipped: Sequence[Skipped]) -> dict[int, Row]:
    return {one.index: {"skipped": one.message} for one in skipped}


def ranked_rows(result: ScoreResult, records: Sequence[Record]) -> Iterator[Row]:
    """Documents from the best to the `top_n`-th."""
    for rank, index in enumerate(result.ranking.tolist(), start=1):
        yield {"rank": rank, "index": index, "score": float(result.scores[index])} | _kept(records[index])


def extracted_rows(result: ExtractResult, records: Sequence[Record], only: str) -> Iterator[Row]:
    """One object an item, with what its task found under the name `only`; why, for one that was skipped."""
    skipped = _why(result.skipped)
    for index, (record, extraction) in enumerate(zip(records, result, strict=True)):
        yield _kept(record) | {only: _found(extraction, only)} | skipped.get(index, {})


def _found(extraction: Extraction, only: str) -> object:
    return asdict(extraction)[only]


def _only_dense(result: EncodeResult) -> np.ndarray[tuple[int, ...], np.dtype[np.number]]:
    if result.representations != ("dense",):
        raise InputError("a .npy file holds dense vectors only; write sparse and multi-vector answers to .npz or .jsonl")
    if result.vectors.scale is not None:
        raise InputError(f"a .npy file has no place for the scales of {result.vectors.data_type} vectors; write .npz or .jsonl")
    return result.vectors.array


def _arrays(result: EncodeResult) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.number]]]:
    """The arrays of an answer by name."""
    arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.number]]] = {}
    if "dense" in result.representations:
        vectors = result.vectors
        arrays["dense"] = vectors.array
        arrays |= {} if vectors.scale is None else {"scale": vectors.scale}
        arrays |= {} if vectors.offset is None else {"offset": vectors.offset}
    if "sparse" in result.representations:
        sparse = result.sparse
        arrays |= {"sparse_data": sparse.data, "sparse_indices": sparse.indices, "sparse_indptr": sparse.indptr}
        arrays["sparse_shape"] = np.array(sparse.shape)
    if "multi_vector" in result.representations:
        arrays |= {"multi_vector_values": result.multi_vector.values, "multi_vector_offsets": result.multi_vector.offsets}
    return arrays


def _replace(output: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes beside the file and renames, so that nobody ever reads half an answer."""
    beside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            write(file)
        beside.replace(output)
    finally:
        beside.unlink(missing_ok=True)
