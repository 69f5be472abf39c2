"""Inputs of jobs, runs of the engine, and the rows that they wrote."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet
from shoal.bulk.engine import JobRun, create
from shoal.bulk.manifest import Manifest, load
from shoal.bulk.places import Folder, OutputPlace
from shoal.bulk.spec import BulkLimits, BulkRecipe

from tests.bulk.fake_client import FakeClient
from tests.support.waiting import wait_until

MODEL = "org/small"


def recipe(**changes: Any) -> BulkRecipe:
    """Return a recipe of small chunks that keeps an id."""
    return BulkRecipe(
        **{"verb": "encode", "model": MODEL, "keep": ("id",), "chunk_rows": 10, **changes}
    )


def write_parquet(path: Path, rows: int, *, group: int = 7) -> Path:
    """Write texts of different lengths with ids, in row groups that are not chunks."""
    columns = {
        "id": [f"d{number}" for number in range(rows)],
        "other": [0.5] * rows,
        "text": [f"text {number} {'a' * (number % 5)}" for number in range(rows)],
    }
    parquet.write_table(pyarrow.table(columns), path, row_group_size=group)
    return path


def write_lines(path: Path, lines: Sequence[object]) -> Path:
    """Write values as lines of JSON; bytes as they are."""
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in encoded))
    return path


async def run(
    place: OutputPlace,
    source: Path | str,
    client: FakeClient,
    *,
    made: BulkRecipe | None = None,
    limits: BulkLimits | None = None,
    retry: bool = False,
) -> Manifest:
    """Run a job until it ends, or continue the one that the place has."""
    manifest = create(place, str(source), made or recipe(), limits or BulkLimits())
    return await JobRun(place, manifest, client, timeout=5.0).run(retry=retry)  # type: ignore[arg-type]


async def eventually(is_true: Callable[[], bool]) -> None:
    """Return once the condition is true; fail after 30 seconds."""
    await asyncio.to_thread(wait_until, is_true)


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*"))


def table(folder: Path) -> pyarrow.Table:
    """Return the rows of all Parquet parts, as a reader without the manifest sees them."""
    return pyarrow.concat_tables(
        [parquet.read_table(part).replace_schema_metadata() for part in parts(folder)]
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of all parts of lines."""
    return [json.loads(line) for part in parts(folder) for line in part.read_text().splitlines()]


def read_manifest(folder: Path) -> Manifest:
    found = load(Folder(folder))
    assert found is not None
    return found
