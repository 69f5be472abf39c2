"""Failures of the processes that run submitted jobs: each row is written once all the same."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import threading
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from shoal.bulk.manifest import load
from shoal.bulk.places import Folder

from libs.serving import Security
from services.edge.jobs import process as processes
from services.edge.jobs import runner as runners
from services.edge.jobs.objects import JobRecord
from services.edge.jobs.runner import JobRunner
from services.edge.jobs.store import JobStore
from tests.bulk.jobs import recipe
from tests.edge.batches.parts import serving_edge
from tests.edge.jobs.parts import Files, act, encode, submit, wait_for
from tests.edge.parts import Script, edge, routing
from tests.router.parts import until

ROWS = 200


class Holding:
    """A router that holds requests after a number of them until it is released."""

    def __init__(self, free: int) -> None:
        self.script = Script(encode=encode, act=self._act)
        self.free = free
        self.released = asyncio.Event()

    async def wait(self) -> None:
        """Wait until a request is held."""
        await until(lambda: len(self.script.requests) > self.free, "requests", 120.0)

    async def _act(self) -> None:
        if len(self.script.requests) > self.free:
            await self.released.wait()


async def test_killed_processes_of_a_job_are_replaced(files: Files, made: list[JobRunner]) -> None:
    files.write(ROWS)
    router = Holding(5)
    async with edge(router.script, **files.settings) as http:
        job = await submit(http, files.request())
        killed = set[int]()
        for _ in range(3):
            await router.wait()
            await until(lambda: _pid(made) not in (0, *killed), "another process", 120.0)
            killed.add(pid := _pid(made))
            os.kill(pid, signal.SIGKILL)
            router.free = len(router.script.requests) + 5
            router.released.set()
            router.released.clear()
        router.free = 10_000
        router.released.set()
        found = await wait_for(http, job)
        assert (found["status"], found["counts"]["rows"]) == ("completed", ROWS)
    assert len(killed) == 3
    assert files.ids() == [f"d{number}" for number in range(ROWS)]


@pytest.fixture
def fail(files: Files, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes processes of jobs fail in a way of `failing_child`."""
    files.write(10)
    monkeypatch.setattr(processes, "CHILD", "tests.edge.jobs.failing_child")
    monkeypatch.setattr(processes, "INHERITED_VARIABLES", {"TEST_CHILD"})
    monkeypatch.setattr(processes, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(runners, "PROCESS_RESTART_SECONDS", 0.01)
    return lambda way: monkeypatch.setenv("TEST_CHILD", way)


@pytest.mark.parametrize("way", ["ends", "long", "overdue", "silent"])
async def test_job_of_a_process_that_always_fails_ends(
    files: Files, fail: Callable[[str], None], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report beyond the limit of a line counts, too, and a process that hangs: one that reports
    nothing, and one that only reports that a chunk is overdue.
    """
    fail(way)
    if way == "silent":
        monkeypatch.setattr(processes, "MAX_IDLE_SECONDS", 0.1)
    async with edge(Script(encode=encode), **files.settings) as http:
        found = await wait_for(http, await submit(http, files.request()))
    assert (found["status"], "ended or hung 3 times" in found["error"]) == ("failed", True)


async def test_process_that_hangs_after_its_end_is_killed(
    files: Files, fail: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PROCESS_STOP_SECONDS", 0.1)
    fail("stays")
    async with edge(Script(encode=encode), **files.settings) as http:
        found = await wait_for(http, await submit(http, files.request()))
    assert (found["status"], found["counts"]["rows"]) == ("completed", 7)


async def test_job_of_a_process_that_hangs_can_be_cancelled(
    files: Files,
    fail: Callable[[str], None],
    made: list[JobRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "MAX_IDLE_STOP_SECONDS", 0.1)
    fail("silent")
    async with edge(Script(encode=encode), **files.settings) as http:
        job = await submit(http, files.request())
        await until(lambda: _pid(made) != 0, "a process", 120.0)
        await act(http, job, "cancel")
        assert (await wait_for(http, job))["status"] == "cancelled"


async def test_slow_chunk_does_not_count_against_a_request_to_pause(
    files: Files, fail: Callable[[str], None], made: list[JobRunner]
) -> None:
    fail("slow")
    async with edge(Script(encode=encode), **files.settings) as http:
        job = await submit(http, files.request())
        await until(lambda: _pid(made) != 0, "a process", 120.0)
        await act(http, job, "pause")
        found = await wait_for(http, job)
    assert (found["status"], found["counts"]["rows"]) == ("paused", 7)


async def test_process_has_no_secret_of_the_edge(
    files: Files, made: list[JobRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the credentials of stores."""
    secrets = {
        "SHOAL_REDIS_URL": "redis://:password@redis",
        "SHOAL_TOKEN": "token",
        "SHOAL_TLS_KEY": "/key.pem",
        "HF_TOKEN": "hub",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
    }
    needed = {"AWS_SECRET_ACCESS_KEY": "key", "GOOGLE_APPLICATION_CREDENTIALS": "/key.json"}
    for name, value in {**secrets, **needed}.items():
        monkeypatch.setenv(name, value)
    files.write(ROWS)
    router = Holding(2)
    async with edge(router.script, **files.settings) as http:
        await submit(http, files.request())
        await router.wait()
        content = await asyncio.to_thread(Path(f"/proc/{_pid(made)}/environ").read_bytes)
        router.free = 10_000
        router.released.set()
    found = dict(one.split("=", 1) for one in content.decode().split("\0") if one)
    assert not secrets.keys() & found.keys()
    assert not [name for name in found if name.startswith("SHOAL_")]
    assert needed.items() <= found.items()


async def test_unexpected_error_is_reported_in_short(
    files: Files, fail: Callable[[str], None]
) -> None:
    fail("broken")
    async with edge(Script(encode=encode), **files.settings) as http:
        found = await wait_for(http, await submit(http, files.request()))
    assert (found["status"], found["error"][:26]) == ("failed", "ValueError: no such thing ")
    assert len(found["error"]) == 2000


async def test_long_error_ends_the_job(files: Files) -> None:
    """The type of the column fills more than a line of the report."""
    fields = {f"{'f' * 80}{number}": [1] for number in range(15_000)}
    row = pyarrow.table(fields).to_struct_array()
    parquet.write_table(pyarrow.table({"text": row, "id": [1]}), files.root / "in.parquet")
    async with edge(Script(encode=encode), **files.settings) as http:
        found = await wait_for(http, await submit(http, files.request()))
    assert (found["status"], len(found["error"])) == ("failed", 2000)


async def test_process_with_too_little_memory_fails_the_job(files: Files) -> None:
    """A small file needs about 250 MB, more than the process may have."""
    texts = pyarrow.array(["x" * 1_000_000] * 120)
    columns = {"text": texts, "id": range(len(texts))}
    parquet.write_table(pyarrow.table(columns), files.root / "in.parquet", compression="zstd")
    assert (files.root / "in.parquet").stat().st_size < 100_000
    settings = files.settings
    settings["jobs"] = replace(settings["jobs"], process_bytes=1 << 28)
    async with edge(Script(encode=encode), **settings) as http:
        request = files.request(recipe={"chunk_rows": len(texts)})
        found = await wait_for(http, await submit(http, request))
    assert found["status"] == "failed"
    assert re.search("memory|malloc", found["error"]), found["error"]


@pytest.mark.parametrize("end", ["cancelled", "paused", "expired"])
async def test_job_with_a_busy_output_can_be_ended(
    files: Files, fail: Callable[[str], None], made: list[JobRunner], end: str
) -> None:
    """Also while it waits for long before the next try."""
    fail("busy")
    limits = {"deadline": time.time() + 3.0} if end == "expired" else {}
    async with edge(Script(encode=encode), **files.settings) as http:
        job = await submit(http, files.request(limits=limits))
        await wait_for(http, job, ("running",))
        if end != "expired":
            await asyncio.sleep(2.0)  # The next waits are of seconds.
            await act(http, job, {"cancelled": "cancel", "paused": "pause"}[end])
        async with asyncio.timeout(30.0):
            found = await wait_for(http, job)
    assert found["status"] == end
    assert len(made) == 1


async def test_edge_that_dies_with_a_process_counts_its_fault(
    files: Files, fail: Callable[[str], None], made: list[JobRunner]
) -> None:
    fail("waits")
    settings = files.settings
    folder = settings.pop("batches")
    async with routing(Script(encode=encode)) as address:
        async with serving_edge(address, folder, **settings) as http:
            job = await submit(http, files.request())
            await until(lambda: _pid(made) != 0, "a process", 120.0)
            assert _saved(files, job)["faults"] == 1
        assert _saved(files, job)["faults"] == 0  # The job has no part in the stop of its edge.
        record = _saved(files, job) | {"faults": runners.MAX_FAULTS}
        _record(files, job).write_text(json.dumps(record))
        async with serving_edge(address, folder, **settings) as http:
            found = await wait_for(http, job)
    assert (found["status"], "ended or hung 3 times" in found["error"]) == ("failed", True)
    assert _saved(files, job)["faults"] == 0  # A client may resume it.


async def test_another_edge_continues_the_job(files: Files) -> None:
    files.write(ROWS)
    router = Holding(8)
    settings = files.settings
    folder = settings.pop("batches")
    async with routing(router.script) as address:
        async with serving_edge(address, folder, **settings) as http:
            job = await submit(http, files.request())
            await router.wait()
        router.free = 10_000
        router.released.set()
        async with serving_edge(address, folder, **settings) as http:
            found = await wait_for(http, job)
    assert (found["status"], found["counts"]["rows"]) == ("completed", ROWS)
    assert files.ids() == [f"d{number}" for number in range(ROWS)]


async def test_process_ends_with_its_edge(files: Files) -> None:
    """An edge that is killed closes the pipe, and another edge soon runs the job."""
    source = files.write(ROWS)
    router = Holding(3)
    async with routing(router.script) as address:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", processes.CHILD), stdin=PIPE, stdout=PIPE
        )
        assert process.stdin is not None
        order = _order(address, source, files)
        process.stdin.write(json.dumps(order).encode() + b"\n")
        await router.wait()
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 60.0) == 0
    manifest = load(Folder(files.root / "out"))
    assert manifest is not None
    assert manifest.state == "paused"
    assert len(files.ids()) == manifest.rows < ROWS


async def test_token_is_not_stored_and_awaited_after_a_restart(
    files: Files, tmp_path: Path
) -> None:
    files.write(ROWS)
    secret = "secret-of-the-red-tenant"
    path = tmp_path / "tokens.yaml"
    token = {"token": secret, "subject": "a", "role": "client", "tenant": "red"}
    path.write_text(json.dumps({"tokens": [token]}))
    path.chmod(0o600)
    router = Holding(3)
    red = {"authorization": f"Bearer {secret}"}
    settings = files.settings
    folder = settings.pop("batches")
    async with routing(router.script, Security(tokens=path)) as address:
        async with serving_edge(address, folder, **settings) as http:
            assert (await http.post("/v1/jobs", files.request())).status == 401
            job = await submit(http, files.request(), **red)
            await router.wait()
            stored = await asyncio.to_thread(_contents, files.storage, files.root)
            assert stored
            assert not any(secret.encode() in content for content in stored)
        router.free = 10_000
        router.released.set()
        before = len(router.script.requests)
        async with serving_edge(address, folder, **settings) as http:
            await asyncio.sleep(1.0)
            assert len(router.script.requests) == before
            found = await wait_for(http, job, **red)
    assert (found["status"], found["counts"]["rows"]) == ("completed", ROWS)
    assert {one["authorization"] for one in router.script.metadata} == {f"Bearer {secret}"}
    assert files.ids() == [f"d{number}" for number in range(ROWS)]


async def test_slow_storage_does_not_keep_an_earlier_state(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress that is being saved when the job ends must not replace its end."""
    files.write(ROWS)
    router = Holding(5)
    saving, proceed, saved = threading.Event(), threading.Event(), threading.Event()
    real = JobStore.save

    def save(store: JobStore, record: JobRecord) -> None:
        if record.status == "running" and record.counts.rows and not saving.is_set():
            saving.set()
            proceed.wait(60.0)
            real(store, record)
            saved.set()
        else:
            real(store, record)

    monkeypatch.setattr(JobStore, "save", save)
    async with edge(router.script, **files.settings) as http:
        job = await submit(http, files.request())
        await until(saving.is_set, "progress", 120.0)
        router.free = 10_000
        router.released.set()
        manifest = Folder(files.root / "out")
        await until(lambda: _state(manifest) == "completed", "the end", 120.0)
        await asyncio.sleep(1.0)  # The end of the job is saved now, if nothing prevents it.
        proceed.set()
        await until(saved.is_set, "the progress", 120.0)
        assert (await wait_for(http, job))["status"] == "completed"


def _record(files: Files, job: dict[str, Any]) -> Path:
    """Return the file with the record of a job."""
    [found] = files.storage.rglob(f"records/{job['id']}.json")
    return found


def _saved(files: Files, job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_record(files, job).read_text())
    return found


def _state(where: Folder) -> str:
    found = load(where)
    return "" if found is None else found.state


def _pid(made: list[JobRunner]) -> int:
    """Return the process of the newest runner; 0 without one."""
    process = made[-1].process if made else None
    return process.pid if process is not None and process.is_running else 0


def _order(address: str, source: Path, files: Files) -> dict[str, Any]:
    made = recipe()
    fields = {name: getattr(made, name) for name in made.__dataclass_fields__}
    return {
        "routers": address,
        "tls": None,
        "tenant": "",
        "token": "",
        "recipe": fields,
        "input": str(source),
        "output": str(files.root / "out"),
        "limits": {},
        "retry": False,
        "roots": [str(files.root)],
        "input_bytes": 1 << 30,
        "process_bytes": 1 << 31,
    }


def _contents(*folders: Path) -> list[bytes]:
    """Return the contents of all files below folders."""
    found = []
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        with suppress(FileNotFoundError):  # The temporary file of a lease's renewal.
            found.append(path.read_bytes())
    return found
