"""Kept columns of parts, lists of failed rows, and exports."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from shoal.bulk import export
from shoal.bulk.failures import JobError
from shoal.bulk.parts import PartWriter
from shoal.bulk.places import Folder

from tests.bulk.fake_client import FakeClient
from tests.bulk.jobs import lines, read_manifest, recipe, run, table, write_lines

CLASSIFY = {"kind": "classify", "labels": ["t"]}
KEPT: dict[str, tuple[pyarrow.Array, object]] = {
    "stamp": (
        pyarrow.array([datetime(2026, 11, 28, 17, 5, tzinfo=UTC)], pyarrow.timestamp("us", "UTC")),
        "2026-11-28T17:05:00+00:00",
    ),
    "nanoseconds": (
        pyarrow.array([1], pyarrow.timestamp("ns")),
        "1970-01-01 00:00:00.000000001",
    ),
    "day": (pyarrow.array([date(2026, 11, 28)]), "2026-11-28"),
    "hour": (pyarrow.array([time(17, 5)]), "17:05:00"),
    "duration": (pyarrow.array([timedelta(seconds=90)]), "0:01:30"),
    "price": (pyarrow.array([Decimal("12.50")]), "12.50"),
    "blob": (pyarrow.array([b"\x00\xff"]), "AP8="),
    "nan": (pyarrow.array([float("nan")]), None),
    "infinity": (pyarrow.array([float("inf")], pyarrow.float32()), None),
    "half": (pyarrow.array([1.5], pyarrow.float16()), 1.5),
    "tags": (pyarrow.array([[1.0, float("nan")]]), [1.0, None]),
    "object": (pyarrow.array([{"day": date(2026, 1, 2)}]), {"day": "2026-01-02"}),
    "none": (pyarrow.array([None], pyarrow.int64()), None),
    "bad": (pyarrow.array([b"a\xff"]).view(pyarrow.string()), "a\ufffd"),
    "id": (pyarrow.array([7]), 7),
}
VALUES = {name: value for name, (_, value) in KEPT.items()}


def strict(text: str) -> Any:
    """Parse JSON as other programs do: without NaN and infinities."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def write_kept(folder: Path, *texts: str) -> Path:
    """Write a row for each text, all with the same kept values."""
    row = pyarrow.table({name: array for name, (array, _) in KEPT.items()})
    rows = pyarrow.concat_tables([row] * len(texts)).append_column("text", [texts])
    parquet.write_table(rows, folder / "in.parquet")
    return folder / "in.parquet"


async def test_kept_values_of_parquet_are_json_in_extractions(tmp_path: Path) -> None:
    made = recipe(verb="extract", task=CLASSIFY, keep=tuple(KEPT))
    source = write_kept(tmp_path, "a text")
    assert (await run(Folder(tmp_path / "out"), source, FakeClient(), made=made)).failed == 0
    [part] = (tmp_path / "out").glob("part-*.jsonl")
    [line] = part.read_text().splitlines()
    assert strict(line) == {"row": 0, **VALUES, "labels": [{"label": "a", "score": 0.5}]}


@pytest.mark.parametrize("made", [{}, {"verb": "extract", "task": CLASSIFY}])
async def test_failed_rows_are_json(tmp_path: Path, made: dict[str, Any]) -> None:
    source = write_kept(tmp_path, "", "a text")
    manifest = await run(
        Folder(tmp_path / "out"), source, FakeClient(), made=recipe(**made, keep=tuple(KEPT))
    )
    [found] = export.failures(Folder(tmp_path / "out"), manifest)
    assert strict(json.dumps(found)) == {
        "row": 0,
        **VALUES,
        "error": "the row has no text in 'text'",
    }


async def test_kept_nan_of_lines_is_null_in_extractions(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [b'{"id": [NaN, -Infinity, 1], "text": "a"}'])
    made = recipe(verb="extract", task=CLASSIFY)
    await run(Folder(tmp_path / "out"), source, FakeClient(), made=made)
    assert lines(tmp_path / "out")[0]["id"] == [None, None, 1]


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("generate", ["finish_reason", "form", "text", "tool_calls", "truncated"]),
        ("entities", ["entities", "truncated"]),
        ("classify", ["labels", "truncated"]),
        ("relations", ["relations", "truncated"]),
        ("structure", ["classifications", "entities", "relations", "structures", "truncated"]),
    ],
)
def test_names_of_results_cannot_be_kept(kind: str, refused: list[str]) -> None:
    task = {"kind": kind}
    with pytest.raises(JobError, match=f"has columns {', '.join(refused)} of its results"):
        PartWriter(recipe(verb="extract", task=task, keep=("id", *refused)))


def test_names_of_other_results_can_be_kept() -> None:
    PartWriter(recipe(keep=("text", "labels", "truncated")))
    PartWriter(recipe(verb="extract", task={"kind": "entities"}, keep=("text", "labels")))


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ([1, 2, "A"], ["1", "2", "A"]),
        ([1, 2, True], ["1", "2", "true"]),
        ([1.5, True], ["1.5", "true"]),
        ([1, 1.5], [1.0, 1.5]),
        ([2**60 + 1, 1.5], [str(2**60 + 1), "1.5"]),
        ([2**64, 1], [str(2**64), "1"]),
        ([{"a": 1}, [1], None], ['{"a": 1}', "[1]", None]),
        ([1, None], [1, None]),
    ],
)
async def test_mixed_kept_values_of_a_chunk_are_texts(
    tmp_path: Path, values: list[object], written: list[object]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"id": one, "text": "a"} for one in values])
    manifest = await run(Folder(tmp_path / "out"), source, FakeClient())
    assert (manifest.failed, table(tmp_path / "out")["id"].to_pylist()) == (0, written)


@pytest.mark.parametrize("other", ["A", 2.5, True, 2**64, [3], {"a": 3}])
async def test_kept_value_of_another_type_than_earlier_parts_stops_the_job(
    tmp_path: Path, other: object
) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", [{"id": one, "text": "a"} for one in (1, None, 3.0, other)]
    )
    with pytest.raises(JobError, match=r"'id' of line 4 .* int64: write this field as text"):
        await run(Folder(tmp_path / "out"), source, FakeClient(), made=recipe(chunk_rows=1))
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.state, manifest.failed) == ("failed", 0)
    assert table(tmp_path / "out")["id"].to_pylist() == [1, None, 3][: manifest.rows]


async def test_other_values_of_a_kept_field_of_texts_become_texts(tmp_path: Path) -> None:
    values = ["A", 1, 1.5, True, None, ["b"]]
    source = write_lines(tmp_path / "in.jsonl", [{"id": one, "text": "a"} for one in values])
    await run(Folder(tmp_path / "out"), source, FakeClient(), made=recipe(chunk_rows=1))
    assert table(tmp_path / "out")["id"].to_pylist() == ["A", "1", "1.5", "true", None, '["b"]']


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
async def test_job_without_rows_exports_an_empty_file(tmp_path: Path, suffix: str) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", []), tmp_path / f"all.{suffix}"
    made = recipe(verb="extract", task=CLASSIFY) if suffix == "jsonl" else recipe()
    manifest = await run(Folder(tmp_path / "out"), source, FakeClient(), made=made)
    export.export(Folder(tmp_path / "out"), manifest, output)
    if suffix == "jsonl":
        assert output.read_bytes() == b""
    else:
        found = parquet.read_table(output)
        assert (found.num_rows, found.column_names) == (0, ["row", "error"])


async def test_job_that_is_not_completed_is_exported_only_on_request(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"id": n, "text": "a"} for n in (1, "A")])
    where, output = Folder(tmp_path / "out"), tmp_path / "all.parquet"
    with pytest.raises(JobError):
        await run(where, source, FakeClient(), made=recipe(chunk_rows=1))
    manifest = read_manifest(tmp_path / "out")
    with pytest.raises(JobError, match=r"is failed, and its parts have 1 rows; .* --partial"):
        export.export(where, manifest, output)
    assert not output.exists()
    export.export(where, manifest, output, partial=True)
    assert parquet.read_table(output)["id"].to_pylist() == [1]


async def test_export_does_not_replace_files_of_the_job(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"id": 1, "text": "a"}])
    made, where = recipe(verb="extract", task=CLASSIFY), Folder(tmp_path / "out")
    manifest = await run(where, source, FakeClient(), made=made)
    before = source.read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    (tmp_path / "link.jsonl").symlink_to(source)
    for output, problem in [
        (tmp_path / "out" / ".." / "in.jsonl", "is the input of the job"),
        (tmp_path / "link.jsonl", "is the input of the job"),
        (tmp_path / "out" / "all.jsonl", "is in the folder of the job"),
        (tmp_path / "link" / "deep" / "all.jsonl", "is in the folder of the job"),
    ]:
        with pytest.raises(JobError, match=problem):
            export.export(where, manifest, output)
    assert source.read_bytes() == before
    export.export(where, manifest, tmp_path / "out.jsonl")
    export.export(where, manifest, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == where.read(manifest.parts[0].name)
