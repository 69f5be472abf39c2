"""Reads the committed parts of a job: checks their digests, and copies them to one file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.bulk.columns import fit_to_schema, writer_options
from shoal.bulk.failures import JobError, StorageError
from shoal.bulk.manifest import CommittedPart, Manifest
from shoal.bulk.parts import ERROR, ROW, failed_rows, read_table
from shoal.bulk.places import OutputPlace, local_path


def contents(place: OutputPlace, manifest: Manifest) -> Iterator[tuple[CommittedPart, bytes]]:
    """Yield the parts in input order. Raises StorageError if one is missing or changed."""
    for _, part in sorted(manifest.parts.items()):
        data = place.read(part.name)
        path = place.full_path(part.name)
        if data is None:
            raise StorageError(f"the part {path} is missing; run a new job with another output")
        if hashlib.sha256(data).hexdigest() != part.sha256:
            raise StorageError(f"the part {path} is not the one that was committed")
        yield part, data


def failures(place: OutputPlace, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Yield `row`, the kept columns and `error` of failed rows. Raises StorageError."""
    for part, data in contents(place, manifest):
        if part.failed:
            yield from failed_rows(data, manifest.recipe.suffix)


def export(place: OutputPlace, manifest: Manifest, output: Path, *, partial: bool = False) -> None:
    """Copy all parts to one file, which appears when it is complete, or replaces an earlier file.

    Args:
        partial: Copy the parts of a job that is not completed.

    Raises:
        JobError: The job is not completed, or its files must not be replaced by the output.
    """
    if manifest.state != "completed" and not partial:
        total = "" if manifest.total is None else f" of {manifest.total:,}"
        raise JobError(
            f"the job is {manifest.state}, and its parts have {manifest.rows:,}{total} rows; "
            "complete it, or export these with --partial"
        )
    _check_output(place, manifest, output)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        if output.suffix == ".jsonl":
            _export_lines(place, manifest, temporary)
        else:
            _export_tables(place, manifest, temporary)
        temporary.replace(output)
    except OSError as error:
        raise StorageError(f"{output} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _check_output(place: OutputPlace, manifest: Manifest, output: Path) -> None:
    """Raise JobError if a file of the job would be replaced."""
    if output.suffix != manifest.recipe.suffix:
        raise JobError(f"the output {output} must end in {manifest.recipe.suffix}")
    found = output.resolve()
    sources = (local_path(file.uri) for file in manifest.input.files)
    if any(source is not None and source.resolve() == found for source in sources):
        raise JobError(f"the output {output} is the input of the job; choose another file")
    folder = local_path(place.uri)
    if folder is not None and found.is_relative_to(folder.resolve()):
        raise JobError(f"the output {output} is in the folder of the job; choose another folder")


def _export_lines(place: OutputPlace, manifest: Manifest, output: Path) -> None:
    with output.open("wb") as file:
        for _, data in contents(place, manifest):
            file.write(data)


def _export_tables(place: OutputPlace, manifest: Manifest, output: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    noted = {
        "shoal.model": manifest.recipe.model,
        "shoal.revision": manifest.revision,
        "shoal.embedding_id": manifest.embedding_id,
    }
    schema = (
        pyarrow.ipc.read_schema(pyarrow.py_buffer(manifest.schema))
        if manifest.schema
        else pyarrow.schema([(ROW, pyarrow.int64()), (ERROR, pyarrow.string())])  # Without parts.
    )
    schema = schema.with_metadata({key: value for key, value in noted.items() if value})
    with parquet.ParquetWriter(output, schema, **writer_options(pyarrow, schema)) as writer:
        for _, data in contents(place, manifest):
            writer.write_table(fit_to_schema(pyarrow, read_table(data), schema))
