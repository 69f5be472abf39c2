"""Submitted jobs from and to a store with a real S3 API."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import fsspec
import pytest
from pyarrow import parquet

from services.edge.jobs.runner import JobRunner
from services.edge.jobs.settings import JobSettings
from tests.edge.jobs.parts import Files, send, submit, wait_for
from tests.edge.jobs.test_processes import Holding
from tests.edge.parts import edge
from tests.router.parts import until
from tests.support.s3 import s3_bucket

ROWS = 100


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_bucket(monkeypatch) as url:
        yield url


async def test_job_in_s3_survives_a_kill_of_its_process(
    files: Files, bucket: str, made: list[JobRunner]
) -> None:
    store = fsspec.filesystem("s3")
    root = f"{bucket}/roots/red"
    store.put_file(str(files.write(ROWS)), f"{root}/in.parquet")
    settings = files.settings
    settings["jobs"] = JobSettings(roots=(f"{bucket}/roots/{{tenant}}",))
    settings["batches"] = replace(settings["batches"], url=f"{bucket}/files")
    body = files.request(f"{root}/out", input=f"{root}/in.parquet")
    router = Holding(3)
    async with edge(router.script, **settings) as http:
        refused = await send(http, body, "blue")
        assert (refused.status, "must be below" in refused.json["error"]["message"]) == (400, True)
        job = await submit(http, body, "red")
        await router.wait()
        process = made[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: made[0].process not in (None, process), "another process", 120.0)
        router.free = 10_000
        router.released.set()
        found = await wait_for(http, job, x_shoal_tenant="red")
    assert (found["status"], found["error"]) == ("completed", None)
    parts = sorted(name for name in store.ls(f"{root}/out", detail=False) if "/part-" in name)
    ids = [
        one
        for part in parts
        for one in parquet.read_table(io.BytesIO(store.cat_file(part)))["id"].to_pylist()
    ]
    assert ids == [f"d{number}" for number in range(ROWS)]
