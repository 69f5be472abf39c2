"""Records of submitted jobs: edges that are killed or frozen, limits, and requests side by side."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from typing import Any

import pytest
from msgspec.structs import replace
from shoal.bulk.failures import StorageError
from shoal.transport.wire import Metadata

from services.edge.batches.context import Context, new_id
from services.edge.batches.store import BatchStore, _Directory, tenant_key
from services.edge.jobs import jobs
from services.edge.jobs.jobs import JobKind
from services.edge.jobs.objects import JOB_PREFIX, JobRecord, Status
from services.edge.jobs.runner import JobRunner, MeshConnection
from services.edge.jobs.store import JobStore
from tests.edge.jobs.parts import Files, act, encode, send, submit, wait_for
from tests.edge.parts import Http, Script, edge
from tests.router.parts import until


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
    """Nor does its own end, also after another edge has run the job again."""
    store = JobStore(BatchStore(str(files.storage)), "tenant")
    frozen = record(files, "running")
    store.create(frozen)

    def change(status: Status, changes: int) -> bool:
        return store.change(replace(frozen, status=status, changes=changes))

    def status() -> str:
        store.save(frozen)
        found = store.job(frozen.id)
        assert found is not None
        return found.status

    assert status() == "running"
    assert change("paused", 1)
    assert not change("failed", 1)
    assert status() == "paused"
    assert change("queued", 2)
    assert not change("failed", 1)
    assert status() == "queued"
    store.save(replace(frozen, status="running", changes=2))
    assert change("completed", 3)
    assert status() == "completed"
    store.delete(frozen.id)
    assert list((files.storage / "tenant" / "records").iterdir()) == []


async def test_edge_that_lost_its_job_while_it_ended_it_keeps_the_end_of_the_other(
    files: Files, made: list[JobRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is frozen after it has checked its lease, and before it writes."""
    files.write(3)
    change = JobStore.change

    def ended_by_another(store: JobStore, one: JobRecord) -> bool:
        assert change(store, replace(one, status="failed", error="of another edge"))
        return change(store, one)

    monkeypatch.setattr(JobStore, "change", ended_by_another)
    async with edge(Script(encode=encode), **files.settings) as http:
        found = await wait_for(http, await submit(http, files.request()))
        assert (found["status"], found["error"]) == ("failed", "of another edge")
        await until(lambda: not list((files.storage / "active").iterdir()), "its end", 120.0)
    assert not made[0].record.is_ended


async def test_job_that_lost_its_name_is_found_again(files: Files) -> None:
    """The name is removed by an edge that was frozen since it ended the job before."""

    async def identify(metadata: Metadata) -> str:
        return "red"

    context = Context(files.settings["batches"], identify, vouches=False)
    store = JobStore(context.store, "tenant")
    lost, ended = record(files, "queued"), replace(record(files, "failed"), ended_at=1000)
    store.save(lost)
    store.save(ended)
    JobKind(context, files.settings["jobs"], MeshConnection((), None)).clean("tenant", 1001.0)
    context.close()
    assert store.active_ids() == [lost.id]
    assert store.ids() == sorted((lost.id, ended.id))


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
    change = JobStore.change

    def hold(store: JobStore, one: JobRecord) -> bool:
        if one.status == "cancelled":
            is_saving.set()
            has_resumed.wait(1.0)
        return change(store, one)

    async with edge(Script(encode=encode), **files.settings) as http:
        store = await tenant_store(http, files)
        job = record(files, "paused")
        store.save(job)
        monkeypatch.setattr(JobStore, "change", hold)
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
    settings["jobs"] = dataclasses.replace(settings["jobs"], tenant_output_bytes=1 << 30)
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


def test_output_of_several_jobs_counts_once(files: Files) -> None:
    store = JobStore(BatchStore(str(files.storage)), "tenant")
    made = []
    for output, size in (("a", 5), ("a/", 7), ("b", 3)):
        made.append(replace(record(files, "failed"), output=output))
        made[-1].counts.bytes = size
        store.save(made[-1])
    assert [store.bytes_of_others(one) for one in made] == [3, 3, 7]
    assert store.bytes_of_others(replace(made[0], output="c")) == 10


def test_repeated_write_is_no_change_by_another_edge(files: Files) -> None:
    store = JobStore(BatchStore(str(files.storage)), "tenant")
    ended = replace(record(files, "completed"), changes=1)
    assert store.change(ended)
    assert store.change(ended)
    assert not store.change(replace(ended, status="failed"))


@pytest.mark.parametrize("act", ["end", "run again", "delete"])
def test_job_is_found_and_whole_whatever_write_fails(
    files: Files, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edge is killed before each write in turn, and another one continues."""
    store = JobStore(BatchStore(str(files.storage)), "tenant")
    allowed = 0

    def limited(name: str) -> None:
        real = getattr(_Directory, name)

        def write(place: _Directory, *arguments: Any) -> Any:
            nonlocal allowed
            allowed -= 1
            if allowed < 0:
                raise StorageError("the edge is killed")
            return real(place, *arguments)

        monkeypatch.setattr(_Directory, name, write)

    for name in ("create", "replace", "delete"):
        limited(name)
    for writes in range(20):
        allowed = 100
        running = record(files, "running")
        store.create(running)
        ended = replace(running, status="paused", changes=1)
        again = replace(running, status="queued", changes=2)
        if act != "end":
            store.change(ended)
            store.deactivate(running.id)
        wanted = {"end": (running, ended), "run again": (ended, again), "delete": (ended, None)}
        allowed = writes
        try:
            if act == "delete":
                store.delete(running.id)
            else:
                change = ended if act == "end" else again
                store.change(change)
                (store.deactivate if act == "end" else store.activate)(running.id)
            is_whole = True
        except StorageError:
            is_whole = False
        allowed = 100
        found = store.job(running.id)
        assert found in wanted[act]
        store.activate_lost()
        is_active = found is not None and not found.is_ended
        assert not is_active or store.is_active(running.id)
        store.delete(running.id)
        assert store.job(running.id) is None
        if is_whole:
            break
    assert is_whole
    assert 1 < writes < 20
