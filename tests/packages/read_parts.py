"""Reads the parts of a job by pandas, polars, DuckDB and LanceDB, and prints as JSON what each has:
`python read_parts.py FOLDER`. Runs in an environment with these packages.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import lancedb
import pandas
import polars
import pyarrow.dataset


def by_pandas(folder: Path) -> tuple[list[str], list[list[float]]]:
    """Return the ids, and the vectors."""
    frames = [pandas.read_parquet(part) for part in sorted(folder.glob("part-*"))]
    frame = pandas.concat(frames).sort_values("row")
    return list(frame["id"]), [list(map(float, vector)) for vector in frame["dense"]]


def by_polars(folder: Path) -> tuple[list[str], list[list[float]]]:
    """Vectors are arrays of a fixed width, not lists."""
    frame = polars.read_parquet(folder / "part-*.parquet").sort("row")
    assert frame.schema["dense"] == polars.Array(polars.Float32, 4), frame.schema
    return frame["id"].to_list(), frame["dense"].to_list()


def by_duckdb(folder: Path) -> tuple[list[str], list[list[float]]]:
    query = f"select id, dense from read_parquet('{folder}/part-*.parquet') order by row"
    rows = duckdb.sql(query).fetchall()
    return [one for one, _ in rows], [list(vector) for _, vector in rows]


def by_lancedb(folder: Path) -> tuple[list[str], list[list[float]]]:
    """Return the vectors in the order of ids, each found by a search for itself."""
    parts = pyarrow.dataset.dataset(folder, format="parquet", exclude_invalid_files=True)
    with tempfile.TemporaryDirectory() as base:
        table = lancedb.connect(base).create_table("docs", parts.to_table())
        rows = sorted(table.to_arrow().to_pylist(), key=lambda row: int(row["row"]))
        for row in rows:
            search = table.search(row["dense"], vector_column_name="dense")
            assert search.limit(1).to_list()[0]["dense"] == row["dense"]
    return [row["id"] for row in rows], [row["dense"] for row in rows]


READERS: dict[str, Callable[[Path], Any]] = {
    "pandas": by_pandas,
    "polars": by_polars,
    "duckdb": by_duckdb,
    "lancedb": by_lancedb,
}
print(json.dumps({name: read(Path(sys.argv[1])) for name, read in READERS.items()}))
