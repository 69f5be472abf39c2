"""Records of submitted jobs: edges that are killed or frozen, limits, and requests side by side."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from shoal.bulk.failures import StorageError

from services.edge.batches.context import new_id
from services.edge.batches.store import BatchStore, _Directory, tenant_key
from services.edge.jobs import jobs
from services.edge.jobs.objects import JOB_PREFIX, JobRecord, Status
from services.edge.jobs.store import JobStore
from tests.edge.jobs.parts import Files, act, encode, send, submit, wait_for
from tests.edge.parts import Http, Script, edge


def record(files: Files, status: Status) -> JobRecord:
    wanted = files.request()
    return JobRecord(
        id=new_id(JOB_PREFIX)[0],
        created_at=1,
        recipe=wanted["recipe"],
        input=wanted["input"],
        output=wanted["output"],
        limits={},
        status=status,
    )


async def tenant_store(http: Http, files: Files) -> JobStore:
    """Return the store of the tenant of a job, which fails for lack of an input."""
    job = await submit(http, files.request())
    assert (await wait_for(http, job))["status"] == "failed"
    (path,) = files.storage.glob(f"*/records/{job['id']}.json")
    store = JobStore(BatchStore(str(files.storage)), path.parent.parent.name)
    store.delete(job["id"])
    return store


async def test_job_of_an_edge_that_dies_while_it_creates_it_does_not_wait_for_ever(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(place: _Directory, name: str, data: bytes) -> bool:
        raise StorageError(name)

    async with edge(Script(encode=encode), **files.settings) as http:
        with monkeypatch.context() as patched:
            patched.setattr(_Directory, "create", fail)
            assert (await send(http, files.request())).status == 503
        assert (await http.get("/v1/jobs")).json["data"] == []


async def test_job_that_no_edge_finds_is_cancelled_or_resumed(files: Files) -> None:
    async with edge(Script(encode=encode), **files.settings) as http:
        store = await tenant_store(http, files)
        lost, other = record(files, "queued"), record(files, "queued")
        store.save(lost)
        store.save(other)
        assert (await act(http, {"id": lost.id}, "cancel"))["status"] == "cancelled"
        files.write(3)
        await act(http, {"id": other.id}, "resume")
        assert (await wait_for(http, {"id": other.id}))["status"] == "completed"


def test_progress_of_a_frozen_edge_does_not_replace_an_end(files: Files) -> None:
    store = JobStore(BatchStore(str(files.storage)), "tenant")
    job = record(files, "completed")
    store.save(job)

    def saved_as(status: Status, save: Any) -> str:
        job.status = status
        save(job)
        found = store.job(job.id)
        assert found is not None
        return found.status

    assert saved_as("running", store.save) == "completed"
    assert saved_as("queued", store.activate) == "queued"
    assert saved_as("running", store.save) == "running"


async def test_final_jobs_make_room_for_others(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MAX_RECORDS", 3)
    async with edge(Script(encode=encode), **files.settings) as http:
        store = await tenant_store(http, files)
        stopped, done, last = (record(files, one) for one in ("failed", "completed", "cancelled"))
        for one in (stopped, done, last):
            store.save(one)
        for one in (done, last):  # Each is the oldest final one.
            await wait_for(http, await submit(http, files.request()))
            assert one.id not in store.ids()
        assert stopped.id in store.ids()
        reply = await send(http, files.request())
        assert (reply.status, reply.json["error"]["code"]) == (429, "job_quota_exceeded")
        assert "cancel some" in reply.json["error"]["message"]
        files.write(3)
        await act(http, {"id": store.ids()[-1]}, "resume")
        await act(http, {"id": stopped.id}, "cancel")
        await submit(http, files.request("other"))
        assert stopped.id not in store.ids()


async def test_cancelling_a_stopped_job_excludes_resuming_it(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_saving, has_resumed = threading.Event(), threading.Event()
    save = JobStore.save

    def hold(store: JobStore, one: JobRecord) -> None:
        if one.status == "cancelled":
            is_saving.set()
            has_resumed.wait(1.0)
        save(store, one)

    async with edge(Script(encode=encode), **files.settings) as http:
        store = await tenant_store(http, files)
        job = record(files, "paused")
        store.save(job)
        monkeypatch.setattr(JobStore, "save", hold)
        cancel = asyncio.create_task(act(http, {"id": job.id}, "cancel"))
        assert await asyncio.to_thread(is_saving.wait, 60.0)
        reply = await http.post(f"/v1/jobs/{job.id}/resume", b"")
        has_resumed.set()
        assert (reply.status, (await cancel)["status"]) == (409, "cancelled")
        saved = store.job(job.id)
        assert saved is not None
        assert saved.status == "cancelled"


async def test_outputs_of_a_tenant_have_a_quota(files: Files) -> None:
    """It counts all jobs that are recorded, but not those of other tenants."""
    files.write(35)
    settings = files.settings
    settings["jobs"] = replace(settings["jobs"], tenant_output_bytes=1 << 30)
    other = record(files, "completed")
    other.counts.bytes, other.ended_at = 1 << 30, int(time.time())
    JobStore(BatchStore(str(files.storage)), tenant_key("red")).save(other)
    async with edge(Script(encode=encode), **settings) as http:
        red = await submit(http, files.request("a"), "red")
        blue = await submit(http, files.request("b"), "blue")
        found = await wait_for(http, red, x_shoal_tenant="red")
        assert (found["status"], "at most 1 are allowed" in found["error"]) == ("failed", True)
        assert found["counts"]["parts"] < 4
        assert (await wait_for(http, blue, x_shoal_tenant="blue"))["status"] == "completed"
