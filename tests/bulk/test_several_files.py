"""Inputs of several files: folders and patterns, on the disk and in object stores."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pytest
from pyarrow import parquet
from shoal.bulk import inputs, matching, places
from shoal.bulk.engine import create
from shoal.bulk.failures import InputChanged, JobError
from shoal.bulk.matching import find_input
from shoal.bulk.places import Folder
from shoal.bulk.spec import BulkLimits, BulkRecipe

from tests.bulk.fake_client import FakeClient
from tests.bulk.jobs import lines, read_manifest, recipe, run, table, write_lines

SIZES = (13, 0, 4, 28)
"""Rows of the files. Chunks have 10 rows."""


def columns(first: int, rows: int) -> dict[str, list[Any]]:
    numbers = range(first, first + rows)
    return {"id": [f"d{n}" for n in numbers], "text": [f"text {n}" for n in numbers]}


def write_files(folder: Path, sizes: Sequence[int] = SIZES) -> Path:
    """Write Parquet files with consecutive ids, and files that are not part of the input."""
    schema = pyarrow.schema([("id", pyarrow.string()), ("text", pyarrow.string())])
    for number, rows in enumerate(sizes):
        path = folder / f"year={number}" / "docs.parquet"
        path.parent.mkdir(parents=True)
        values = columns(sum(sizes[:number]), rows)
        parquet.write_table(pyarrow.table(values, schema), path, row_group_size=6)
    (folder / "_SUCCESS").touch()
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "old.parquet").touch()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "docs")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.mark.parametrize("pattern", ["", "*/docs.parquet", "**/*.parquet"])
async def test_rows_of_all_files_are_numbered_in_the_order_of_names(
    folder: Path, out: Path, pattern: str
) -> None:
    manifest = await run(Folder(out), folder / pattern, FakeClient())
    assert (manifest.state, manifest.total, len(manifest.input.files)) == ("completed", 45, 4)
    found = table(out)
    assert found["row"].to_pylist() == list(range(45))
    assert found["id"].to_pylist() == [f"d{number}" for number in range(45)]
    assert len(manifest.parts) == 5  # chunks may have rows of several files


async def test_lines_of_several_files_are_numbered(tmp_path: Path, out: Path) -> None:
    for number, (first, rows) in enumerate([(0, 12), (12, 0), (12, 9)]):
        ids = range(first, first + rows)
        values = [{"id": n, "text": f"text {n}"} for n in ids]
        write_lines(tmp_path / f"in-{number}.jsonl", values)
    last = tmp_path / "in-0.jsonl"
    last.write_bytes(last.read_bytes().rstrip(b"\n"))  # the next file does not continue its line
    manifest = await run(
        Folder(out),
        f"{tmp_path}/in-*.jsonl",
        FakeClient(),
        made=recipe(verb="extract", task={"kind": "entities", "labels": ["a"]}),
    )
    assert (manifest.total, manifest.failed) == (21, 0)
    assert [(line["row"], line["id"]) for line in lines(out)] == [(n, n) for n in range(21)]


async def test_resumed_job_reads_only_files_with_missing_rows(
    folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(Folder(out), folder, FakeClient())
    before = table(out)
    manifest = read_manifest(out)
    (out / manifest.parts.pop(2).name).unlink()
    manifest.state, manifest.rows = "running", manifest.rows - 10
    manifest.save(Folder(out))
    opened: list[str] = []
    real = places.opened

    def noted(uri: str) -> Any:
        opened.append(Path(uri).parent.name)
        return real(uri)

    monkeypatch.setattr(inputs, "opened", noted)
    await run(Folder(out), folder, FakeClient())
    assert table(out).equals(before)
    # The footer of each, and rows 20 to 29 of the last one.
    assert sorted(opened) == [*(f"year={number}" for number in range(4)), "year=3"]


async def test_changed_file_stops_the_job_and_a_new_one_is_not_read(
    folder: Path, out: Path
) -> None:
    client = FakeClient()
    await run(Folder(out), folder, client)
    manifest = read_manifest(out)
    manifest.state = "paused"
    manifest.save(Folder(out))
    shutil.copytree(folder / "year=3", folder / "year=4")
    again = await run(Folder(out), folder, client)
    assert (again.state, again.rows, len(again.input.files)) == ("completed", 45, 4)
    again.state = "paused"
    again.save(Folder(out))
    os.utime(folder / "year=2" / "docs.parquet", ns=(1, 1))
    with pytest.raises(InputChanged, match=r"year=2/docs\.parquet changed since"):
        await run(Folder(out), folder, client)
    (folder / "year=0" / "docs.parquet").unlink()
    with pytest.raises(InputChanged, match=r"year=0/docs\.parquet .*and is gone"):
        await run(Folder(out), folder, client)


def test_inputs_that_cannot_be_joined_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JobError, match="has no files that end in"):
        find_input(f"{folder}/*.jsonl")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(JobError, match=r"notes\.txt must end in"):
        find_input(f"{tmp_path}/*.txt")
    other = folder / "year=5"
    other.mkdir()
    write_lines(other / "docs.jsonl", [{"text": "a"}])
    with pytest.raises(JobError, match="has files of several formats, JSON lines and Parquet"):
        find_input(str(folder))
    parquet.write_table(pyarrow.table({"id": [1], "text": ["a"]}), other / "docs.parquet")
    with pytest.raises(JobError, match=r"'id' of .*year=5.* type int64, and of .*year=0.* string"):
        inputs.open_source(find_input(f"{folder}/*/*.parquet"), recipe())
    monkeypatch.setattr(matching, "MAX_INPUT_FILES", 4)
    with pytest.raises(JobError, match="has 5 files, and at most 4 are allowed"):
        find_input(f"{folder}/*/*.parquet")


@pytest.mark.parametrize("pattern", ["", "/*/docs.parquet"])
async def test_files_below_a_prefix_of_a_store(folder: Path, out: Path, pattern: str) -> None:
    files = fsspec.filesystem("memory")
    files.put(str(folder), "/several", recursive=True)
    try:
        manifest = await run(Folder(out), f"memory://several{pattern}", FakeClient())
        assert (manifest.state, manifest.rows) == ("completed", 45)
        assert table(out)["id"].to_pylist() == [f"d{number}" for number in range(45)]
        manifest.state = "paused"
        manifest.save(Folder(out))
        files.pipe_file("/several/year=1/docs.parquet", b"another")
        with pytest.raises(InputChanged, match=r"year=1/docs\.parquet changed since"):
            await run(Folder(out), f"memory://several{pattern}", FakeClient())
    finally:
        files.rm("/several", recursive=True)


def test_texts_may_have_different_arrow_types(tmp_path: Path) -> None:
    kinds = (pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary("int32", "string"))
    for number, kind in enumerate(kinds):
        values = pyarrow.array([f"text {number}"]).cast(kind)
        parquet.write_table(pyarrow.table({"text": values}), tmp_path / f"{number}.parquet")
    source = inputs.open_source(find_input(str(tmp_path)), BulkRecipe("encode", "org/small"))
    (chunk,) = source.chunks(lambda number: True)
    assert chunk.texts == ["text 0", "text 1", "text 2"]


def test_pattern_reads_each_visible_file_once(folder: Path) -> None:
    """Links make cycles, and Spark keeps uncommitted files in folders such as `_temporary`."""
    (folder / "loop").symlink_to(folder)
    (folder / "_temporary").mkdir()
    shutil.copy(folder / "year=0" / "docs.parquet", folder / "_temporary" / "docs.parquet")
    found = find_input(f"{folder}/**/*.parquet").files
    assert [file.uri for file in found] == [f"{folder}/year={n}/docs.parquet" for n in range(4)]


def test_file_with_a_wildcard_in_its_name_is_no_pattern(tmp_path: Path) -> None:
    path = tmp_path / "docs[1].jsonl"
    write_lines(path, [{"text": "a"}])
    assert [file.uri for file in find_input(str(path)).files] == [str(path)]


@pytest.mark.parametrize("name", ["", "out"])
def test_output_within_the_input_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(JobError, match="is in the input"):
        create(Folder(folder / name), str(folder), recipe(), BulkLimits())


async def test_folders_of_a_store_may_be_named_as_files(folder: Path, out: Path) -> None:
    """Spark writes a folder `docs.parquet`."""
    files = fsspec.filesystem("memory")
    files.put(str(folder), "/spark/docs.parquet", recursive=True)
    try:
        manifest = await run(Folder(out), "memory://spark/docs.parquet", FakeClient())
        assert (manifest.state, manifest.rows) == ("completed", 45)
    finally:
        files.rm("/spark", recursive=True)


@pytest.mark.parametrize("uri", ["memory://brackets/docs[1].jsonl", "memory://brackets"])
def test_objects_may_have_wildcards_in_their_names(uri: str) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/brackets/docs[1].jsonl", b'{"text": "a"}\n')
    try:
        (file,) = find_input(uri).files
        assert file.uri == "memory:///brackets/docs[1].jsonl" or file.uri == uri
        source = inputs.open_source(find_input(uri), BulkRecipe("encode", "org/small"))
        assert [chunk.texts for chunk in source.chunks(lambda number: True)] == [["a"]]
    finally:
        files.rm("/brackets", recursive=True)


@pytest.mark.parametrize("pattern", ["*.jsonl", "**/*.jsonl", "docs[0-9].jsonl", "sub[12]/*.jsonl"])
def test_folders_of_a_pattern_may_have_brackets(tmp_path: Path, pattern: str) -> None:
    home = tmp_path / "a[1]" / ".hidden"
    (home / "sub1").mkdir(parents=True)
    for name in ("docs1.jsonl", "sub1/docs.jsonl"):
        write_lines(home / name, [{"text": name}])
    found = [file.uri for file in find_input(f"{home}/{pattern}").files]
    expected = {
        "*.jsonl": ["docs1.jsonl"],
        "**/*.jsonl": ["docs1.jsonl", "sub1/docs.jsonl"],
        "docs[0-9].jsonl": ["docs1.jsonl"],
        "sub[12]/*.jsonl": ["sub1/docs.jsonl"],
    }
    assert found == [f"{home}/{name}" for name in expected[pattern]]
