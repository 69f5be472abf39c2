"""The engine of bulk jobs with a client that answers at once."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from shoal.bulk import engine, export
from shoal.bulk.engine import JobRun, create, request
from shoal.bulk.failures import Busy, InputChanged, JobError, StorageError
from shoal.bulk.places import Folder
from shoal.bulk.spec import BulkLimits
from shoal.errors import (
    DeadlinePassed,
    EmbeddingIdMismatch,
    InternalError,
    Overloaded,
    ShoalError,
    Unavailable,
    WorkerLost,
)

from tests.bulk.fake_client import RECIPE, FakeClient, make_vector
from tests.bulk.jobs import (
    eventually,
    lines,
    parts,
    read_manifest,
    recipe,
    run,
    table,
    write_lines,
    write_parquet,
)

ROWS = 45


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "_FIRST_DELAY_SECONDS",
        "_MAX_DELAY_SECONDS",
        "_REPORT_SECONDS",
        "_CONTROL_SECONDS",
    ):
        monkeypatch.setattr(engine, name, 0.01)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_parquet(tmp_path / "in.parquet", ROWS)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


async def test_read_that_hangs_is_overdue(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job reports for how long, and continues when the read returns."""
    released, seen = threading.Event(), list[float]()
    read = JobRun._read

    def hang(job: JobRun, reader: Any) -> Any:
        chunk = read(job, reader)
        released.wait(60.0)
        return chunk

    monkeypatch.setattr(JobRun, "_read", hang)
    where = Folder(tmp_path / "out")
    manifest = create(where, str(source), recipe(), BulkLimits())
    client: Any = FakeClient()
    job = JobRun(where, manifest, client, on_progress=lambda now: seen.append(now.overdue_seconds))
    running = asyncio.create_task(job.run())
    await eventually(lambda: seen[-1:] > [0.1])
    assert seen[0] < seen[-1]
    released.set()
    assert (await running).state == "completed"


async def test_every_row_has_its_vector_in_input_order(source: Path, out: Path) -> None:
    client = FakeClient()
    manifest = await run(Folder(out), source, client)
    found = table(out)
    assert found.column_names == ["row", "id", "dense", "error"]
    assert found["row"].to_pylist() == list(range(ROWS))
    assert found["id"].to_pylist() == [f"d{number}" for number in range(ROWS)]
    texts = [f"text {number} {'a' * (number % 5)}" for number in range(ROWS)]
    assert found["dense"].to_pylist() == [make_vector(text) for text in texts]
    assert str(found["dense"].type) == "fixed_size_list<element: float>[4]"
    assert found["error"].null_count == ROWS
    assert (manifest.state, manifest.rows, manifest.total, manifest.failed) == (
        "completed",
        ROWS,
        ROWS,
        0,
    )
    assert manifest.embedding_id == f"{RECIPE}.float32"
    assert client.expected == ["", *[RECIPE] * 4]
    assert sorted(client.texts) == sorted(texts)
    assert len(list(export.contents(Folder(out), read_manifest(out)))) == len(parts(out)) == 5
    assert manifest.size == read_manifest(out).size == sum(one.stat().st_size for one in parts(out))
    columns = parquet.ParquetFile(parts(out)[0]).metadata.row_group(0)
    encodings = {columns.column(n).path_in_schema: columns.column(n).encodings for n in range(4)}
    assert "RLE_DICTIONARY" in encodings["id"]
    assert "RLE_DICTIONARY" not in encodings["dense.list.element"]


async def test_job_stops_at_its_limit_of_bytes(source: Path, out: Path) -> None:
    with pytest.raises(JobError, match="and at most 1 are allowed"):
        await run(Folder(out), source, FakeClient(), limits=BulkLimits(output_bytes=1))
    assert (read_manifest(out).state, len(parts(out))) == ("failed", 1)
    manifest = await run(Folder(out), source, FakeClient())
    assert (manifest.state, manifest.rows) == ("completed", ROWS)


class FrozenFolder(Folder):
    """A folder of a process that was killed: nothing is written after a number of writes."""

    def __init__(self, path: Path, writes: int) -> None:
        super().__init__(path)
        self.writes_left = writes

    def _is_dead(self) -> bool:
        self.writes_left -= 1
        return self.writes_left < 0

    def create(self, name: str, data: bytes) -> bool:
        return True if self._is_dead() else super().create(name, data)

    def replace(self, name: str, data: bytes) -> None:
        if not self._is_dead():
            super().replace(name, data)

    def delete(self, name: str) -> None:
        if not self._is_dead():
            super().delete(name)


@pytest.mark.parametrize("writes", range(1, 9))
async def test_end_after_any_write_loses_and_repeats_no_row(
    source: Path, out: Path, tmp_path: Path, writes: int
) -> None:
    await run(FrozenFolder(out, writes), source, FakeClient())
    committed = {part.name: part.stat().st_ino for part in parts(out)}
    client = FakeClient()
    manifest = await run(Folder(out), source, client)
    await run(Folder(tmp_path / "whole"), source, FakeClient())
    assert table(out).equals(table(tmp_path / "whole"))
    assert committed.items() <= {part.name: part.stat().st_ino for part in parts(out)}.items()
    rows = sum(min(10, ROWS - 10 * int(name[5:13])) for name in committed)
    assert len(client.texts) == ROWS - rows
    assert manifest.rows == ROWS


async def test_completed_job_is_not_run_again(source: Path, out: Path) -> None:
    await run(Folder(out), source, FakeClient())
    with pytest.raises(JobError, match="is completed"):
        await run(Folder(out), source, FakeClient())


async def test_other_recipe_is_refused(source: Path, out: Path) -> None:
    await run(Folder(out), source, FakeClient())
    with pytest.raises(JobError, match="with another chunk_rows"):
        await run(Folder(out), source, FakeClient(), made=recipe(chunk_rows=20))


async def test_parts_of_another_job_are_refused(source: Path, out: Path) -> None:
    await run(Folder(out), source, FakeClient())
    (out / "manifest.json").unlink()
    with pytest.raises(JobError, match=r"has parts and no manifest\.json"):
        await run(Folder(out), source, FakeClient())


async def test_manifest_names_only_files_of_parts(source: Path, out: Path) -> None:
    await run(Folder(out), source, FakeClient())
    manifest = out / "manifest.json"
    values = json.loads(manifest.read_text())
    values["parts"][0]["name"] = "../other.parquet"
    manifest.write_text(json.dumps(values))
    with pytest.raises(JobError, match=r"'\.\./other\.parquet' is not the name of part 0"):
        await run(Folder(out), source, FakeClient(), retry=True)


async def test_retry_of_a_job_without_parts_is_refused(source: Path, out: Path) -> None:
    await run(Folder(out), source, FakeClient())
    for name in ("manifest.json", *(part.name for part in parts(out))):
        (out / name).unlink()
    with pytest.raises(JobError, match=r"has no parts in .* to retry"):
        await run(Folder(out), source, FakeClient(), retry=True)


async def test_changed_input_is_refused_at_the_start(source: Path, out: Path) -> None:
    await run(FrozenFolder(out, 4), source, FakeClient())
    write_parquet(source, ROWS + 1)
    client = FakeClient()
    with pytest.raises(InputChanged, match=r"changed since the job began: it had .* bytes"):
        await run(Folder(out), source, client)
    assert client.texts == []


async def test_input_that_changes_during_the_job_stops_it(source: Path, out: Path) -> None:
    client = FakeClient()

    def rewrite(texts: Sequence[str]) -> None:
        write_parquet(source, ROWS + 1)

    client.before = rewrite
    with pytest.raises(InputChanged):
        await run(Folder(out), source, client)
    manifest = read_manifest(out)
    assert (manifest.state, "changed since the job began" in manifest.error) == ("failed", True)
    assert manifest.rows < ROWS


async def test_second_process_is_refused(source: Path, out: Path) -> None:
    with Folder(out).locked(), pytest.raises(Busy, match="another process runs the job"):
        await run(Folder(out), source, FakeClient())


BAD_LINES = [
    {"id": 1, "text": "a text"},
    {"id": 2, "text": ""},
    b"{broken",
    {"id": 4, "text": "a second text"},
    {"id": 5},
    b"",
    {"id": 7, "text": "too long"},
    {"id": 8, "text": "\ud800"},
    {"id": 9, "text": "the last"},
]


async def test_failed_rows_have_errors_and_do_not_stop_the_job(tmp_path: Path, out: Path) -> None:
    source, client = write_lines(tmp_path / "in.jsonl", BAD_LINES), FakeClient()
    client.skips = lambda text: text == "too long"
    manifest = await run(Folder(out), source, client, made=recipe(chunk_rows=3))
    rows = table(out).to_pylist()
    assert [row["row"] for row in rows] == list(range(9))
    assert [row["id"] for row in rows] == [1, 2, None, 4, 5, None, 7, 8, 9]
    errors = {row["row"]: row["error"] for row in rows if row["error"]}
    assert sorted(errors) == [1, 2, 4, 5, 6, 7]
    assert "is not JSON" in errors[2]
    assert "too long [INPUT_TOO_LONG]" in errors[6]
    assert "not valid Unicode" in errors[7]
    assert [row["row"] for row in rows if row["dense"] is not None] == [0, 3, 8]
    assert (manifest.state, manifest.failed, manifest.total) == ("completed", 6, 9)
    found = list(export.failures(Folder(out), manifest))
    assert [row["row"] for row in found] == sorted(errors)
    assert set(found[0]) == {"row", "id", "error"}


async def test_part_without_results_waits_for_the_schema(tmp_path: Path, out: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", [{"id": 1}, {"id": 2}, {"id": 3, "text": "a"}, {"id": 4}]
    )
    await run(Folder(out), source, FakeClient(), made=recipe(chunk_rows=1))
    schemas = {str(table(out).schema)} | {str(table(part.parent).schema) for part in parts(out)}
    assert len(schemas) == 1
    assert [row["dense"] is None for row in table(out).to_pylist()] == [True, True, False, True]


async def test_job_without_any_result_fails_and_can_be_resumed(source: Path, out: Path) -> None:
    """Parts without results would fix columns that leave out the vectors of a later retry."""
    client = FakeClient()
    client.skips = lambda text: True
    limits = BulkLimits(failed_share=1.0)
    with pytest.raises(JobError, match="none of the first 45 rows has a result; the last error"):
        await run(Folder(out), source, client, limits=limits)
    assert (read_manifest(out).state, read_manifest(out).schema, parts(out)) == ("failed", b"", [])
    assert (await run(Folder(out), source, FakeClient())).state == "completed"
    assert table(out)["dense"].null_count == 0


@pytest.mark.parametrize(("share", "stops"), [(0.0, True), (0.4, True), (0.6, False)])
async def test_share_of_failed_rows_stops_the_job(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, share: float, stops: bool
) -> None:
    monkeypatch.setattr(engine, "MIN_SHARE_ROWS", 10)
    client = FakeClient()
    client.skips = lambda text: int(text.split()[1]) % 2 == 1
    limits = BulkLimits(failed_share=share)
    if stops:
        with pytest.raises(JobError, match=r"rows failed, more than the allowed share of"):
            await run(Folder(out), source, client, limits=limits)
        assert read_manifest(out).state == "failed"
        limits = BulkLimits(failed_share=1.0)
    assert (await run(Folder(out), source, client, limits=limits)).failed == ROWS // 2


async def test_retry_replaces_failed_rows_alone(source: Path, out: Path) -> None:
    client = FakeClient()
    client.skips = lambda text: text.startswith(("text 3 ", "text 44 "))
    await run(Folder(out), source, client)
    before = parts(out)
    client = FakeClient()
    client.skips = lambda text: text.startswith("text 44 ")
    manifest = await run(Folder(out), source, client, retry=True)
    assert sorted(text.split()[1] for text in client.texts) == ["3", "44"]
    assert (manifest.state, manifest.rows, manifest.failed) == ("completed", ROWS, 1)
    assert len(parts(out)) == len(before)
    assert [part.name.endswith(".r1.parquet") for part in parts(out)] == [True, *[False] * 4]
    rows = table(out).to_pylist()
    assert [row["row"] for row in rows] == list(range(ROWS))
    assert [row["row"] for row in rows if row["error"]] == [44]


async def test_rows_of_cut_texts_are_counted(source: Path, out: Path) -> None:
    client = FakeClient()
    client.cuts = lambda text: text.startswith(("text 3 ", "text 44 "))
    client.skips = lambda text: text.startswith("text 5 ")
    manifest = await run(Folder(out), source, client)
    assert [manifest.parts[chunk].truncated for chunk in range(5)] == [1, 0, 0, 0, 1]
    client.skips = lambda text: False
    await run(Folder(out), source, client, retry=True)
    counts = read_manifest(out).to_json()["counts"]
    assert (counts["truncated_rows"], counts["failed_rows"]) == (2, 0)


@pytest.mark.parametrize("writes", range(1, 10))
async def test_end_during_a_retry_keeps_one_part_for_each_chunk(
    source: Path, out: Path, writes: int
) -> None:
    await run_with_a_failed_row(source, out)
    await run(FrozenFolder(out, writes), source, FakeClient(), retry=True)
    if read_manifest(out).state != "completed":
        await run(Folder(out), source, FakeClient())
    if read_manifest(out).failed:
        await run(Folder(out), source, FakeClient(), retry=True)
    assert table(out)["row"].to_pylist() == list(range(ROWS))
    assert table(out)["error"].null_count == ROWS


async def run_with_a_failed_row(source: Path, out: Path) -> None:
    client = FakeClient()
    client.skips = lambda text: text.startswith("text 3 ")
    await run(Folder(out), source, client)


async def test_manifest_that_cannot_be_written_after_a_retry_leaves_no_second_part(
    source: Path, out: Path
) -> None:
    await run_with_a_failed_row(source, out)

    class FullFolder(Folder):
        saved = 0

        def replace(self, name: str, data: bytes) -> None:
            self.saved += 1
            if self.saved == 2:
                raise StorageError("the disk is full")
            super().replace(name, data)

    with pytest.raises(StorageError, match="full"):
        await run(FullFolder(out), source, FakeClient(), retry=True)
    assert (await run(Folder(out), source, FakeClient())).failed == 0
    assert table(out)["row"].to_pylist() == list(range(ROWS))


async def test_changed_input_after_a_killed_retry_leaves_all_parts_of_the_manifest(
    source: Path, out: Path
) -> None:
    await run_with_a_failed_row(source, out)
    await run(FrozenFolder(out, 3), source, FakeClient(), retry=True)  # ends before the manifest
    assert len(parts(out)) == 6
    os.utime(source, (1, 1))
    with pytest.raises(InputChanged):
        await run(Folder(out), source, FakeClient())
    assert len(list(export.contents(Folder(out), read_manifest(out)))) == 5


async def test_job_that_another_process_began_with_another_recipe_is_not_continued(
    source: Path, out: Path
) -> None:
    mine = create(Folder(out), str(source), recipe(verb="score", query="long query"), BulkLimits())
    await run(Folder(out), source, FakeClient(), made=recipe(verb="score", query="q"))
    client = FakeClient()
    with pytest.raises(JobError, match="with another query"):
        await JobRun(Folder(out), mine, client).run(retry=True)  # type: ignore[arg-type]
    assert client.texts == []


async def test_unexpected_error_is_in_the_manifest(source: Path, out: Path) -> None:
    client = FakeClient()

    def fail(texts: Sequence[str]) -> None:
        raise RuntimeError("a fault")

    client.before = fail
    with pytest.raises(RuntimeError):
        await run(Folder(out), source, client)
    assert (read_manifest(out).state, read_manifest(out).error) == ("failed", "a fault")


async def test_answered_rows_of_a_chunk_are_not_sent_again(tmp_path: Path, out: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", [{"id": n, "text": f"text {n}", "q": f"q{n}"} for n in range(6)]
    )
    client, refusals = FakeClient(), [Unavailable("lost")] * 2

    def refuse(texts: Sequence[str]) -> None:
        if refusals and len(client.texts) in (2, 4):
            client.texts.append("refused")
            raise refusals.pop()

    client.before = refuse
    await run(Folder(out), source, client, made=recipe(verb="score", query_column="q"))
    assert sorted(client.texts) == ["refused", "refused", *(f"text {n}" for n in range(6))]
    assert table(out)["row"].to_pylist() == list(range(6))


async def test_row_that_fails_its_request_is_isolated(source: Path, out: Path) -> None:
    client = FakeClient()

    def poison(texts: Sequence[str]) -> None:
        if any(text.startswith("text 13 ") for text in texts):
            raise WorkerLost("workers died")

    client.before = poison
    manifest = await run(Folder(out), source, client)
    assert manifest.failed == 1
    errors = [row for row in table(out).to_pylist() if row["error"]]
    assert [(row["row"], row["error"]) for row in errors] == [(13, "workers died [WORKER_LOST]")]


@pytest.mark.parametrize("error", [Overloaded("full", retry_after=0.0), Unavailable("lost")])
async def test_transient_errors_are_repeated(source: Path, out: Path, error: ShoalError) -> None:
    client, refusals = FakeClient(), [error] * 12

    def refuse(texts: Sequence[str]) -> None:
        if refusals and len(client.texts) >= 20:
            raise refusals.pop()

    client.before = refuse
    manifest = await run(Folder(out), source, client)
    assert (manifest.state, manifest.failed, refusals) == ("completed", 0, [])


async def test_overload_leaves_fewer_chunks_in_flight(source: Path, out: Path) -> None:
    client, refusals = FakeClient(), [Overloaded("full")] * 2

    def refuse(texts: Sequence[str]) -> None:
        if len(client.texts) >= 10 and refusals:
            if len(refusals) == 1:
                client.gate.clear()
            raise refusals.pop()

    client.before = refuse
    made, limits = recipe(chunk_rows=2), BulkLimits(in_flight=2)
    task = asyncio.create_task(run(Folder(out), source, client, made=made, limits=limits))
    await eventually(lambda: client.blocked == 1 and not refusals)
    await asyncio.sleep(0.1)
    assert client.blocked == 1
    client.gate.set()
    assert (await task).state == "completed"


async def test_missed_deadline_lengthens_the_next_one(source: Path, out: Path) -> None:
    client = FakeClient()

    def refuse(texts: Sequence[str]) -> None:
        if client.timeouts[-1] < 20:
            raise DeadlinePassed("too slow")

    client.before = refuse
    assert (await run(Folder(out), source, client)).state == "completed"
    assert client.timeouts[:3] == [5.0, 10.0, 20.0]
    assert set(client.timeouts[3:]) == {20.0}


async def test_job_without_answers_stops_after_its_patience(source: Path, out: Path) -> None:
    client = FakeClient()

    def refuse(texts: Sequence[str]) -> None:
        raise Unavailable("no worker")

    client.before = refuse
    with pytest.raises(JobError, match=r"no chunk was answered for 0.05 s: no worker"):
        await run(Folder(out), source, client, limits=BulkLimits(patience=0.05))
    client.before = lambda texts: None
    assert (await run(Folder(out), source, client)).state == "completed"


async def test_other_embedding_id_fails_the_job(source: Path, out: Path) -> None:
    client = FakeClient()
    client.embedding_id = lambda: "f" * 16 if len(client.texts) > 20 else RECIPE
    with pytest.raises(JobError, match=rf"from embedding id {RECIPE} to {'f' * 16}"):
        await run(Folder(out), source, client)
    assert read_manifest(out).state == "failed"
    assert read_manifest(out).embedding_id == RECIPE


async def test_refusal_of_the_mesh_fails_the_job_and_names_the_cause(
    source: Path, out: Path
) -> None:
    client = FakeClient()

    def refuse(texts: Sequence[str]) -> None:
        if client.texts:
            raise EmbeddingIdMismatch("the card changed")

    client.before = refuse
    with pytest.raises(EmbeddingIdMismatch):
        await run(Folder(out), source, client)
    assert "the card changed" in read_manifest(out).error
    assert read_manifest(out).rows == 10


async def test_number_formats_of_one_recipe_may_be_mixed(source: Path, out: Path) -> None:
    client = FakeClient()
    client.embedding_id = lambda: f"{RECIPE}.{'float32' if len(client.texts) > 20 else 'int8-1'}"
    assert (await run(Folder(out), source, client)).embedding_id == RECIPE


async def test_other_revision_fails_a_job_of_scores(source: Path, out: Path) -> None:
    client = FakeClient()
    client.revision = lambda: "r2" if len(client.texts) > 20 else "r1"
    with pytest.raises(JobError, match="from revision r1 to r2"):
        await run(Folder(out), source, client, made=recipe(verb="score", query="q"))


SMALL = recipe(chunk_rows=5)


async def _stopped(source: Path, out: Path, stop: str) -> tuple[JobRun, asyncio.Task[Any]]:
    """Return a job with one committed part and others in flight, and its run, after `stop`."""
    client = FakeClient()
    client.before = lambda texts: client.gate.clear() if len(client.texts) >= 20 else None
    job = JobRun(
        Folder(out),
        create(Folder(out), str(source), SMALL, BulkLimits(in_flight=2)),
        client,  # type: ignore[arg-type]
    )
    task = asyncio.create_task(job.run())
    await eventually(lambda: client.blocked > 0 and not client.gate.is_set())
    if stop == "request":
        assert request(Folder(out), read_manifest(out), "cancel")
    else:
        getattr(job, stop)()
    if stop == "pause":
        await asyncio.sleep(0.05)
        assert not task.done()
        client.gate.set()
    return job, task


async def test_paused_job_commits_chunks_in_flight_and_can_be_resumed(
    source: Path, out: Path
) -> None:
    _, task = await _stopped(source, out, "pause")
    manifest = await task
    assert (manifest.state, 20 < manifest.rows < ROWS) == ("paused", True)
    assert (await run(Folder(out), source, FakeClient(), made=SMALL)).state == "completed"


@pytest.mark.parametrize("stop", ["cancel", "request"])
async def test_cancelled_job_ends_at_once_and_cannot_be_resumed(
    source: Path, out: Path, stop: str
) -> None:
    _, task = await _stopped(source, out, stop)
    manifest = await task
    assert (manifest.state, manifest.rows >= 20) == ("cancelled", True)
    with pytest.raises(JobError, match="is cancelled"):
        await run(Folder(out), source, FakeClient(), made=SMALL)


async def test_job_without_process_is_cancelled_by_the_request(source: Path, out: Path) -> None:
    await run(FrozenFolder(out, 4), source, FakeClient())
    manifest = read_manifest(out)
    assert manifest.is_interrupted(Folder(out))
    assert not request(Folder(out), manifest, "cancel")
    assert read_manifest(out).state == "cancelled"


async def test_deadline_stops_the_job(source: Path, out: Path) -> None:
    client = FakeClient()
    client.gate.clear()
    manifest = await run(Folder(out), source, client, limits=BulkLimits(deadline=time.time()))
    assert (manifest.state, "deadline passed" in manifest.error) == ("expired", True)
    assert (await run(Folder(out), source, FakeClient())).state == "completed"


async def test_chunks_in_flight_are_limited(source: Path, out: Path) -> None:
    client = FakeClient()
    client.before = lambda texts: client.gate.clear() if not client.texts else None
    task = asyncio.create_task(
        run(Folder(out), source, client, made=recipe(chunk_rows=1), limits=BulkLimits(in_flight=3))
    )
    await eventually(lambda: client.active == 2)
    await asyncio.sleep(0.05)
    assert client.active == 2  # The limit begins there, and grows with answers.
    client.gate.set()
    await task
    assert client.most_active in (2, 3)


async def test_queries_may_be_a_column(tmp_path: Path, out: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        [{"id": n, "text": "ab", "q": "query" if n % 2 else "q"} for n in range(4)],
    )
    await run(Folder(out), source, FakeClient(), made=recipe(verb="score", query_column="q"))
    assert table(out)["score"].to_pylist() == [1002.0, 5002.0, 1002.0, 5002.0]


async def test_each_reply_shows_that_the_job_does_not_hang(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk may need as many requests as it has rows."""
    source = tmp_path / "in.jsonl"
    write_lines(source, [{"id": "d", "text": "a", "q": f"query {number}"} for number in range(9)])
    client, extended = FakeClient(), list[int]()
    monkeypatch.setattr(
        JobRun, "_expect_within", lambda self, seconds: extended.append(len(client.texts))
    )
    await run(Folder(out), source, client, made=recipe(verb="score", query_column="q"))
    assert set(range(1, 10)) <= set(extended)


async def test_extractions_are_lines(source: Path, out: Path) -> None:
    client = FakeClient()
    client.skips = lambda text: text.startswith("text 2 ")
    made = recipe(verb="extract", task={"kind": "classify", "labels": ["t"]})
    await run(Folder(out), source, client, made=made)
    found = lines(out)
    assert [line["row"] for line in found] == list(range(ROWS))
    assert found[1] == {"row": 1, "id": "d1", "labels": [{"label": "t", "score": 0.5}]}
    assert (set(found[2]), "too long" in found[2]["error"]) == ({"row", "id", "error"}, True)


async def test_results_are_exported_to_one_file(source: Path, out: Path, tmp_path: Path) -> None:
    manifest = await run(Folder(out), source, FakeClient())
    export.export(Folder(out), manifest, tmp_path / "all.parquet")
    (tmp_path / "one").mkdir()
    (tmp_path / "all.parquet").rename(tmp_path / "one/part-all.parquet")
    assert table(tmp_path / "one").equals(table(out))
    parts(out)[2].write_bytes(b"other")
    with pytest.raises(JobError, match="is not the one that was committed"):
        export.export(Folder(out), manifest, tmp_path / "all.parquet")
    assert not (tmp_path / "all.parquet").exists()


async def test_internal_errors_of_all_rows_stop_the_job(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "MIN_SHARE_ROWS", 10)
    client = FakeClient()

    def fail(texts: Sequence[str]) -> None:
        raise InternalError("broken")

    client.before = fail
    with pytest.raises(JobError, match=r"rows failed, more than the allowed share"):
        await run(Folder(out), source, client)
