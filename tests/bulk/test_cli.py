"""`shoal job` against a fake router."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import grpc
import pytest
from pyarrow import parquet
from shoal.bulk.failures import StorageError
from shoal.bulk.manifest import CONTROL, MANIFEST
from shoal.bulk.places import Folder, entries, place
from shoal.cli import main
from shoal.cli.bulk import listing
from typer.testing import CliRunner

from tests.api.conftest import nobody, router
from tests.api.fake_router import MODEL, FakeRouter, Refusal
from tests.bulk.jobs import lines, read_manifest, table, write_lines

__all__ = ["nobody", "router"]  # Fixtures.
Run = Callable[..., tuple[int, str, str]]
ROWS = 30


@pytest.fixture
def run(router: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line and return its status, stdout and stderr."""
    monkeypatch.setenv("SHOAL_ADDRESS", router.address)
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*arguments: object) -> tuple[int, str, str]:
        result = CliRunner().invoke(main.build(), ["job", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return invoke


@pytest.fixture
def source(tmp_path: Path) -> Path:
    texts = [{"id": n, "body": f"Anna has {n}", "q": "a"} for n in range(ROWS)]
    return write_lines(tmp_path / "in.jsonl", [*texts, {"id": ROWS}])


@pytest.fixture
def files(source: Path, tmp_path: Path) -> list[object]:
    return ["-i", source, "-o", tmp_path / "out", "--column", "body", "--keep", "id"]


def test_encode_and_results(run: Run, files: list[object], tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, shown, _ = run("run", "encode", MODEL, *files, "--chunk-rows", 8, "--no-normalize")
    assert (code, "31 of 31 in 4 parts" in shown) == (0, True)
    assert read_manifest(out).recipe.options == {"normalize": False}
    assert table(out)["id"].to_pylist() == list(range(ROWS + 1))
    code, shown, _ = run("show", out, "--json")
    found = json.loads(shown)
    assert (code, found["state"], found["counts"]["failed_rows"]) == (0, "completed", 1)
    code, shown, _ = run("results", out, "--failed", "--json")
    assert json.loads(shown) == [{"row": 30, "id": 30, "error": "the row has no text in 'body'"}]
    code, shown, _ = run("results", out, "--json")
    assert [part["rows"] for part in json.loads(shown)] == [8, 8, 8, 7]
    code, _, notes = run("results", out, "--export", tmp_path / "all.parquet")
    assert (code, "31 rows" in notes) == (0, True)
    assert parquet.read_table(tmp_path / "all.parquet").num_rows == ROWS + 1
    code, _, notes = run("run", "encode", MODEL, *files, "--chunk-rows", 8, "--no-normalize")
    assert (code, "the job is completed already" in notes) == (0, True)
    export = ("results", out, "--export", tmp_path / "all.parquet", "--json")
    assert json.loads(run(*export)[1]) == {
        "path": str(tmp_path / "all.parquet"),
        "rows": ROWS + 1,
        "state": "completed",
    }
    assert json.loads(run("results", out, "--verify", "--json")[1])["verified_parts"] == 4
    code, shown, _ = run("retry", out)
    assert (code, "completed" in shown) == (0, True)
    code, shown, _ = run("watch", out)
    assert (code, "completed" in shown) == (0, True)


def test_extractions(run: Run, files: list[object], tmp_path: Path) -> None:
    assert run("run", "entities", MODEL, *files, "--label", "NAME")[0] == 0
    assert lines(tmp_path / "out")[3]["entities"] == [
        {"start": 0, "end": 4, "label": "NAME", "score": 0.5, "text": "Anna"}
    ]


def test_retry_without_failed_rows_prints_the_job_as_json(
    run: Run, source: Path, tmp_path: Path
) -> None:
    write_lines(source, [{"text": "Anna"}])
    assert run("run", "encode", MODEL, "-i", source, "-o", tmp_path / "out")[0] == 0
    code, shown, notes = run("retry", tmp_path / "out", "--json")
    assert (code, json.loads(shown)["state"]) == (0, "completed")
    assert "no row failed" in notes


def test_scores_with_a_column_of_queries(run: Run, files: list[object], tmp_path: Path) -> None:
    code, _, errors = run("run", "score", MODEL, *files)
    assert (code, "name the query with --query" in errors) == (2, True)
    assert run("run", "score", MODEL, *files, "--query-column", "q")[0] == 0
    assert table(tmp_path / "out")["score"].null_count == 1


def test_job_of_a_misspelt_model_is_replaced_by_the_corrected_command(
    run: Run, router: FakeRouter, files: list[object], tmp_path: Path
) -> None:
    refusal = Refusal(grpc.StatusCode.FAILED_PRECONDITION, "MODEL_UNREACHABLE", field="model")
    router.refusals += [refusal] * 2  # A job begins with two chunks in flight.
    code, _, errors = run("run", "encode", "org/misspelt", *files)
    assert (code, "reason MODEL_UNREACHABLE" in errors) == (1, True)
    router.refusals.clear()
    assert run("run", "encode", MODEL, *files)[0] == 0
    assert read_manifest(tmp_path / "out").recipe.model == MODEL
    code, _, errors = run("run", "encode", "org/other", *files)  # A job with parts stays.
    assert (code, "with another model; choose another output" in errors) == (1, True)


def test_failed_share_stops_the_job(run: Run, files: list[object], tmp_path: Path) -> None:
    code, _, errors = run("run", "encode", MODEL, *files, "--max-failed", 0)
    assert (code, "1 of 31 rows failed" in errors) == (1, True)
    code, shown, _ = run("show", tmp_path / "out")
    assert "shoal job resume" in shown
    output = tmp_path / "all.parquet"
    code, _, errors = run("results", tmp_path / "out", "--export", output)
    assert (code, "export these with --partial" in errors) == (1, True)
    code, _, notes = run("results", tmp_path / "out", "--export", output, "--partial")
    assert (code, "31 rows of a job that is failed" in notes) == (0, True)
    assert parquet.read_table(output).num_rows == ROWS + 1
    assert "--partial needs --export" in run("results", tmp_path / "out", "--partial")[2]
    assert run("resume", tmp_path / "out", "--max-failed", 1)[0] == 0


def test_pause_and_cancel_leave_requests_for_the_running_process(
    run: Run, files: list[object], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run("run", "encode", MODEL, *files, "--max-failed", 0)
    manifest = read_manifest(out)
    manifest.state = "running"
    with Folder(out).locked():
        manifest.save(Folder(out))
        assert run("pause", out)[0] == 0
        assert json.loads((out / CONTROL).read_text()) == {"request": "pause"}
        assert run("cancel", out)[0] == 0
        assert json.loads((out / CONTROL).read_text()) == {"request": "cancel"}
    assert "no process runs the job, which is interrupted" in run("pause", out)[2]
    assert "the job is cancelled" in run("cancel", out)[2]
    assert read_manifest(out).state == "cancelled"
    assert "the job is cancelled already" in run("cancel", out)[2]


def test_requests_in_object_stores_report_unknown_states(
    run: Run, files: list[object], tmp_path: Path
) -> None:
    run("run", "encode", MODEL, *files, "--max-failed", 0)
    manifest, url = read_manifest(tmp_path / "out"), "memory://cli/out"
    manifest.state = "running"
    try:
        manifest.save(place(url))
        for command, consequence in [("pause", "pauses when"), ("cancel", "ends within seconds")]:
            code, _, notes = run(command, url)
            assert (code, f"if a process runs the job, the job {consequence}" in notes) == (0, True)
            assert "After 120 s without a new one" in notes
        silent = json.loads(manifest.encoded()) | {"updated_at": time.time() - 121}
        place(url).replace(MANIFEST, json.dumps(silent).encode())
        assert "the job is cancelled" in run("cancel", url)[2]
    finally:
        fsspec.filesystem("memory").rm("/cli", recursive=True)


@pytest.mark.parametrize("is_remote", [False, True])
def test_jobs_below_a_folder_are_listed(
    run: Run, files: list[object], tmp_path: Path, is_remote: bool
) -> None:
    top = "memory://list/top" if is_remote else str(tmp_path / "top")
    run("run", "encode", MODEL, *files)
    manifest = read_manifest(tmp_path / "out")
    try:
        for number, name in enumerate(("", "/old", "/deep/er/new", "/.hidden/job")):
            (tmp_path / "top" / name.strip("/")).mkdir(parents=True, exist_ok=True)
            found = json.loads(manifest.encoded()) | {"updated_at": 1000.0 + number}
            place(top + name).replace(MANIFEST, json.dumps(found).encode())
        (tmp_path / "top/web").mkdir()
        place(f"{top}/web").replace(MANIFEST, b'{"name": "an app"}')
        code, shown, notes = run("list", top, "--json")
        jobs = json.loads(shown)
        expected = [f"{top}/deep/er/new", f"{top}/old", top]
        assert (code, [job["output"] for job in jobs]) == (0, expected)
        assert "skipped 1 manifest; the first: " in notes
        assert f"{top}/web/manifest.json is not a manifest of a job" in notes
        assert jobs[0] == json.loads(run("show", expected[0], "--json")[1])
        if is_remote:  # The root of a store ends in two slashes.
            listed = json.loads(run("list", "memory://", "--json")[1])
            assert expected == [job["output"] for job in listed if "/top" in job["output"]]
        code, shown, _ = run("list", top)
        (row,) = [line for line in shown.splitlines() if f"{top}/old" in line]
        cells = [cell.strip() for cell in row.split("│")[1:-1]]
        assert cells[1:5] == ["completed", "31 of 31", "1", MODEL]
        assert cells[5].startswith("1970-01-01")
    finally:
        if is_remote:
            fsspec.filesystem("memory").rm("/list", recursive=True)


def test_list_is_limited_and_says_so(
    run: Run, files: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("run", "encode", MODEL, *files)
    for name in ("a", "b", "c"):
        read_manifest(tmp_path / "out").save(_made(tmp_path / "top" / name))
    monkeypatch.setattr(listing, "MAX_LISTED_JOBS", 2)
    code, shown, notes = run("list", tmp_path / "top", "--json")
    assert (code, len(json.loads(shown))) == (0, 2)
    assert "the search ended after 2 jobs" in notes
    monkeypatch.setattr(listing, "MAX_LISTED_JOBS", 3)
    assert run("list", tmp_path / "top")[2] == ""
    monkeypatch.setattr(listing, "MAX_LISTED_FOLDERS", 3)
    code, shown, notes = run("list", tmp_path / "top", "--json")
    assert (code, len(json.loads(shown))) == (0, 2)
    assert "the search ended after 3 folders" in notes


def test_list_without_jobs_says_how_one_is_made(run: Run, tmp_path: Path) -> None:
    code, shown, _ = run("list", tmp_path)
    assert (code, shown.startswith("no jobs in ")) == (0, True)
    assert "shoal job run --output" in shown
    assert run("list", tmp_path, "--json")[1] == "[]\n"
    code, _, notes = run("list", tmp_path / "absent")
    assert (code, f"{tmp_path / 'absent'} does not exist" in notes) == (1, True)


def test_list_names_folders_that_cannot_be_listed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").mkdir()

    def refuse(uri: str) -> tuple[list[str], list[str]] | None:
        if uri.endswith("secret"):
            raise StorageError(f"{uri} cannot be listed")
        return entries(uri)

    monkeypatch.setattr(listing, "entries", refuse)
    code, _, notes = run("list", tmp_path)
    assert code == 0
    assert f"skipped 1 folder; the first: {tmp_path / 'secret'} cannot be listed" in notes


def _made(folder: Path) -> Folder:
    folder.mkdir(parents=True)
    return Folder(folder)


def test_unusable_arguments_are_refused_with_advice(
    run: Run, files: list[object], source: Path, tmp_path: Path, nobody: str
) -> None:
    for arguments, problem in [
        (["show", tmp_path], "has no job: it has no manifest.json"),
        (["run", "encode", MODEL, "-i", tmp_path / "no.jsonl", "-o", tmp_path], "does not exist"),
        (["run", "encode", MODEL, "-i", __file__, "-o", tmp_path / "o"], "must end in .parquet"),
        (["run", "encode", MODEL, *files, "--keep", "error"], "rename these columns"),
        (["run", "encode", MODEL, *files, "--deadline", "soon"], "neither a duration such as 8h"),
        (["run", "encode", MODEL, *files, "--address", nobody], "cannot reach a router"),
    ]:
        code, shown, errors = run(*arguments)
        assert code in (1, 2), shown
        assert problem in " ".join(errors.split()), errors
