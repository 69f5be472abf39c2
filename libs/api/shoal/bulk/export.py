"""Reads the committed parts of a job: checks their digests, and copies them to one file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.bulk.failures import JobError, StorageError
from shoal.bulk.manifest import Manifest, Part
from shoal.bulk.parts import failed_rows
from shoal.bulk.places import Place


def contents(place: Place, manifest: Manifest) -> Iterator[tuple[Part, bytes]]:
    """Yield the parts in input order. Raises StorageError if one is missing or changed."""
    for _, part in sorted(manifest.parts.items()):
        data = place.read(part.name)
        path = place.path_of(part.name)
        if data is None:
            raise StorageError(f"the part {path} is missing; run a new job with another output")
        if hashlib.sha256(data).hexdigest() != part.sha256:
            raise StorageError(f"the part {path} is not the one that was committed")
        yield part, data


def failures(place: Place, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Yield `row`, the kept columns and `error` of failed rows. Raises StorageError."""
    for part, data in contents(place, manifest):
        if part.failed:
            yield from failed_rows(data, manifest.recipe.suffix)


def export(place: Place, manifest: Manifest, output: Path) -> None:
    """Copy all parts to one file, which appears when it is complete. Raises JobError."""
    if output.suffix != manifest.recipe.suffix:
        raise JobError(f"the output {output} must end in {manifest.recipe.suffix}")
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


def _export_lines(place: Place, manifest: Manifest, output: Path) -> None:
    with output.open("wb") as file:
        for _, data in contents(place, manifest):
            file.write(data)


def _export_tables(place: Place, manifest: Manifest, output: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    noted = {
        "shoal.model": manifest.recipe.model,
        "shoal.revision": manifest.revision,
        "shoal.embedding_id": manifest.embedding_id,
    }
    schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(manifest.schema))
    schema = schema.with_metadata({key: value for key, value in noted.items() if value})
    with parquet.ParquetWriter(output, schema, compression="zstd") as writer:
        for _, data in contents(place, manifest):
            table = parquet.read_table(pyarrow.BufferReader(data))
            writer.write_table(table.replace_schema_metadata(schema.metadata))
