"""`/v1/jobs` in front of a fake router, with real processes of jobs: results, states, limits."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from shoal.bulk.manifest import Manifest, load
from shoal.bulk.places import LOCK, Folder, place, read_file_version
from shoal.bulk.spec import BulkLimits, InputVersion, recipe_from
from shoal.v1 import inference_pb2 as pb

from libs.errors import InvalidInput
from libs.telemetry import metrics
from services.edge.batches.settings import BatchSettings
from services.edge.jobs.settings import JobSettings
from services.edge.jobs.store import JobStore
from services.edge.settings import Settings
from services.local.settings import free_port
from tests.bulk.jobs import write_lines
from tests.edge.batches.parts import lines, start
from tests.edge.batches.parts import wait_for as wait_for_batch
from tests.edge.jobs.parts import EMBEDDING_ID, STOPPED, Files, act, encode, send, submit, wait_for
from tests.edge.parts import MODEL, Script, edge
from tests.router.parts import until


def row(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


async def test_submitted_job_returns_at_once_and_writes_each_row_once(files: Files) -> None:
    files.write(35)
    before = row("shoal_http_job_rows_total", outcome="ok")
    ended = row("shoal_http_jobs_ended_total", status="completed")
    script = Script(encode=encode)
    async with edge(script, **files.settings) as http:
        job = await submit(http, files.request())
        assert (job["object"], job["status"], job["counts"]["rows"]) == ("job", "queued", 0)
        found = await wait_for(http, job)
        assert (found["status"], found["error"]) == ("completed", None)
        assert found["counts"] == {
            "rows": 35,
            "failed_rows": 0,
            "total_rows": 35,
            "tokens": 35,
            "parts": 4,
            "bytes": sum(part.stat().st_size for part in (files.root / "out").glob("part-*")),
        }
        assert found["embedding_id"] == EMBEDDING_ID
        assert found["created_at"] <= found["started_at"] <= found["ended_at"]
        page = (await http.get("/v1/jobs")).json
        assert (page["data"], page["has_more"]) == ([found], False)
        assert (await http.get(f"/v1/jobs/{job['id']}", x_shoal_tenant="blue")).status == 404
        assert (await http.get("/v1/jobs", x_shoal_tenant="blue")).json["data"] == []
        again = await http.post(f"/v1/jobs/{job['id']}/cancel", b"")
        assert (again.status, again.json["error"]["code"]) == (409, None)
        # The end is counted after it is saved.
        completed = partial(row, "shoal_http_jobs_ended_total", status="completed")
        await until(lambda: completed() == ended + 1, "the end to be counted")
    assert files.ids() == [f"d{number}" for number in range(35)]
    manifest = load(Folder(files.root / "out"))
    assert manifest is not None
    assert (manifest.state, manifest.input.uri) == ("completed", str(files.root / "in.parquet"))
    assert all(request.priority == pb.PRIORITY_BULK for request in script.requests)
    assert row("shoal_http_job_rows_total", outcome="ok") == before + 35


async def test_job_is_paused_resumed_and_cancelled(files: Files) -> None:
    files.write(100)
    allowed = 25

    async def hold() -> None:
        number = len(script.requests)
        await until(lambda: number <= allowed, "the test", 300.0)

    script = Script(encode=encode, act=hold)
    async with edge(script, **files.settings) as http:
        request = files.request(recipe={"chunk_rows": 2}, limits={"in_flight": 4})
        job = await submit(http, request)
        await until(lambda: len(script.requests) > allowed, "requests", 120.0)
        await act(http, job, "pause")
        allowed = len(script.requests)  # Further ones are not answered.
        paused = await wait_for(http, job, STOPPED)
        assert paused["status"] == "paused"
        assert 0 < paused["counts"]["rows"] < 100
        allowed = len(script.requests) + 5
        resumed = await act(http, job, "resume", {"limits": {"in_flight": 2}})
        assert (resumed["status"], resumed["limits"]["in_flight"]) == ("queued", 2)
        await until(lambda: len(script.requests) > allowed, "requests", 120.0)
        await act(http, job, "cancel")
        cancelled = await wait_for(http, job, STOPPED)
        assert cancelled["status"] == "cancelled"
        assert (await http.post(f"/v1/jobs/{job['id']}/resume", b"")).status == 409
    ids = files.ids()
    assert len(ids) == len(set(ids)) == cancelled["counts"]["rows"]
    manifest = load(Folder(files.root / "out"))
    assert manifest is not None
    assert manifest.state == "cancelled"


async def test_job_is_resumed_while_its_edge_releases_it(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(40)
    release, begun = JobStore.deactivate, threading.Event()

    def slowly(store: JobStore, identity: str) -> None:
        begun.set()
        time.sleep(0.5)
        release(store, identity)

    monkeypatch.setattr(JobStore, "deactivate", slowly)
    may_answer = asyncio.Event()

    async def hold() -> None:
        await may_answer.wait()

    script = Script(encode=encode, act=hold)
    async with edge(script, **files.settings) as http:
        job = await submit(http, files.request(limits={"in_flight": 1}))
        await until(lambda: bool(script.requests), "requests", 120.0)
        await act(http, job, "pause")
        may_answer.set()
        await until(begun.is_set, "the release", 120.0)
        await act(http, job, "resume")
        assert (await wait_for(http, job, ("completed",)))["counts"]["rows"] == 40
    assert sorted(files.ids()) == sorted(f"d{number}" for number in range(40))


async def test_failed_rows_are_retried(files: Files) -> None:
    texts = [{"id": f"d{n}", "text": "bad" if n == 7 else f"text {n}"} for n in range(20)]
    write_lines(files.root / "in.jsonl", texts)
    refuses = True

    def sometimes(request: pb.EncodeRequest) -> pb.EncodeResponse:
        if refuses:
            return encode(request)
        good = [pb.Item(text=item.text.replace("bad", "good")) for item in request.items]
        return encode(pb.EncodeRequest(items=good))

    async with edge(Script(encode=sometimes), **files.settings) as http:
        source = str(files.root / "in.jsonl")
        job = await submit(http, files.request(input=source, limits={"failed_share": 0.5}))
        found = await wait_for(http, job)
        assert (found["status"], found["counts"]["failed_rows"]) == ("completed", 1)
        refuses = False
        await act(http, job, "retry")
        found = await wait_for(http, job)
        assert (found["status"], found["counts"]["failed_rows"]) == ("completed", 0)
    assert sorted(files.ids()) == sorted(f"d{n}" for n in range(20))


async def test_job_that_cannot_run_fails_with_its_reason(files: Files) -> None:
    async with edge(Script(encode=encode), **files.settings) as http:
        job = await submit(http, files.request())
        found = await wait_for(http, job)
        assert (found["status"], "does not exist" in found["error"]) == ("failed", True)
        files.write(3)
        await act(http, job, "resume")
        assert (await wait_for(http, job))["status"] == "completed"


async def test_tenants_have_quotas_and_do_not_share_outputs(files: Files) -> None:
    files.write(10)
    held = asyncio.Event()
    settings = files.settings
    settings["jobs"] = replace(settings["jobs"], tenant_jobs=2, input_bytes=1 << 20)

    async def hold() -> None:
        await held.wait()

    async with edge(Script(encode=encode, act=hold), **settings) as http:
        one = await submit(http, files.request("a"))
        reply = await send(http, files.request("a/"))
        assert (reply.status, "writes to" in reply.json["error"]["message"]) == (409, True)
        two = await submit(http, files.request("b"))
        reply = await send(http, files.request("c"))
        assert (reply.status, reply.json["error"]["code"]) == (429, "job_quota_exceeded")
        assert float(reply.headers["retry-after"]) > 0
        other = await submit(http, files.request("d"), "blue")
        held.set()
        for job in (one, two):
            assert (await wait_for(http, job))["status"] == "completed"
        await wait_for(http, other, x_shoal_tenant="blue")
        (files.root / "large.jsonl").write_bytes(b'{"text": "a"}\n' * (1 << 17))
        large = await submit(http, files.request("e", input=str(files.root / "large.jsonl")))
        found = await wait_for(http, large)
        assert (found["status"], "at most 1,048,576 are allowed" in found["error"]) == (
            "failed",
            True,
        )


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"input": "/etc/passwd"}, "input is '/etc/passwd'; it must be below"),
        ({"input": "in.parquet"}, "must be an absolute path"),
        ({"output": "ROOT/../elsewhere"}, "it must be below"),
        ({"output": "s3://bucket/out"}, "it must be below"),
        ({"output": "memory://out"}, "it must be below"),
        ({"recipe": {"options": {"on_progress": 1}}}, "recipe.options has on_progress"),
        ({"recipe": {"verb": "translate"}}, "verb"),
        ({"recipe": {"chunk_rows": 0}}, "a chunk must have 1 to"),
        ({"recipe": {"chunk_rows": 1 << 17}}, "at most 65,536"),
        ({"recipe": {"verb": "score"}}, "needs a query"),
        ({"recipe": {"verb": "extract", "task": {"kind": "paint"}}}, "the task is 'paint'"),
        ({"limits": {"failed_share": 2}}, "must be 0 to 1"),
        ({"limits": {"prices": {"l4": 0}}}, "prices"),
        ({"token": "mine"}, "token"),
    ],
)
async def test_unusable_jobs_are_refused(files: Files, changes: dict[str, Any], part: str) -> None:
    changes = {
        name: value.replace("ROOT", str(files.root)) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    async with edge(Script(encode=encode), **files.settings) as http:
        reply = await send(http, files.request(**changes))
        assert (reply.status, part in reply.json["error"]["message"]) == (400, True), reply.body
        assert (await http.get("/v1/jobs")).json["data"] == []


async def test_links_out_of_the_root_are_not_followed(files: Files, tmp_path: Path) -> None:
    secret = write_lines(tmp_path / "secret.jsonl", [{"text": "secret", "id": "d0"}])
    (files.root / "folder").mkdir()
    (files.root / "folder" / "in.jsonl").symlink_to(secret)
    (files.root / "way").symlink_to(tmp_path)
    async with edge(script := Script(encode=encode), **files.settings) as http:
        job = await submit(http, files.request(input=str(files.root / "folder")))
        found = await wait_for(http, job)
        assert (found["status"], "is it a link?" in found["error"]) == ("failed", True)
        reply = await send(http, files.request(input=str(files.root / "way" / "secret.jsonl")))
        assert reply.status == 400
    assert script.requests == []


async def test_roots_name_the_tenant(files: Files) -> None:
    settings = files.settings
    settings["jobs"] = JobSettings(roots=(f"{files.root}/{{tenant}}",))
    for tenant in ("red", "blue"):
        (files.root / tenant).mkdir()
        files.write(3, f"{tenant}/in.parquet")
    async with edge(Script(encode=encode), **settings) as http:
        body = files.request("red/out", input=str(files.root / "red/in.parquet"))
        assert (await send(http, body, "blue")).status == 400
        job = await submit(http, body, "red")
        found = await wait_for(http, job, x_shoal_tenant="red")
        assert found["status"] == "completed"
        reply = await send(http, body, "../red")
        assert (reply.status, "cannot submit jobs" in reply.json["error"]["message"]) == (400, True)


async def test_edge_without_roots_names_the_setting(files: Files) -> None:
    async with edge(Script(encode=encode), batches=files.settings["batches"]) as http:
        reply = await http.get("/v1/jobs")
        assert (reply.status, reply.json["error"]["code"]) == (404, "jobs_disabled")
        assert "SHOAL_JOBS_ROOTS" in reply.json["error"]["message"]
        assert "/v1/jobs" not in (await http.get("/openapi.json")).json["paths"]


def test_roots_need_a_storage_apart_from_them(files: Files) -> None:
    with pytest.raises(InvalidInput, match="set together with SHOAL_BATCHES_URL"):
        Settings(edge_id="edge", jobs=JobSettings(roots=("/data",)))
    for url in (files.root, files.root / "files", files.root.parent):
        with pytest.raises(InvalidInput, match="apart from SHOAL_BATCHES_URL"):
            Settings(
                edge_id="edge",
                jobs=JobSettings(roots=(f"{files.root}/{{tenant}}",)),
                batches=BatchSettings(url=str(url)),
            )
    with pytest.raises(InvalidInput, match="SHOAL_JOBS_ROOTS"):
        JobSettings(roots=("data",))


async def test_jobs_and_batches_run_side_by_side(files: Files) -> None:
    files.write(30)
    async with edge(Script(encode=encode), **files.settings) as http:
        job = await submit(http, files.request())
        batch = await start(http, lines(5))
        assert (await wait_for_batch(http, batch, ("completed", "failed")))["status"] == "completed"
        assert (await wait_for(http, job))["status"] == "completed"


async def test_metrics_have_the_rows_that_are_left(files: Files) -> None:
    files.write(50)
    held = asyncio.Event()

    async def hold() -> None:
        if len(script.requests) > 2:
            await held.wait()

    script = Script(encode=encode, act=hold)
    address = f"127.0.0.1:{free_port()}"
    async with edge(script, metrics_address=address, **files.settings) as http:
        job = await submit(http, files.request())

        async def has_left() -> bool:
            found = await asyncio.to_thread(_scrape, address)
            left = found.get(("shoal_http_job_rows_left", MODEL), 0)
            return found.get(("shoal_http_jobs_active", MODEL)) == 1 and 0 < left < 50

        await until(has_left, "the series", 120.0)
        held.set()
        await wait_for(http, job)


def _scrape(address: str) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        text = answer.read().decode()
    return {
        (sample.name, sample.labels["model"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("shoal_http_job") and "model" in sample.labels
    }


@pytest.mark.parametrize("is_folder", [False, True])
async def test_manifest_of_a_client_names_no_files_beyond_its_input(
    files: Files, tmp_path: Path, is_folder: bool
) -> None:
    """A client that may write to the output may also write a manifest there."""
    secret = write_lines(tmp_path / "secret.jsonl", [{"text": "secret", "id": "d0"}])
    (files.root / "folder").mkdir()
    inside = write_lines(files.root / "folder" / "in.jsonl", [{"text": "mine", "id": "d1"}])
    source = str(inside.parent if is_folder else inside)
    for uri in (f"file://{secret}", f"local://{secret}", str(secret)):
        (out := files.root / uri.partition(":")[0].strip("/").replace("/", "-")).mkdir()
        recipe = recipe_from(files.request()["recipe"])
        named = InputVersion(source, 1, "tag", (replace(read_file_version(uri), uri=uri),))
        Manifest("0" * 12, recipe, named, BulkLimits()).save(place(str(out)))
        async with edge(script := Script(encode=encode), **files.settings) as http:
            body = files.request(input=source, output=str(out))
            found = await wait_for(http, await submit(http, body))
        assert (found["status"], script.requests) == ("failed", [])
        assert not list(out.glob("part-*"))


async def test_lock_that_is_a_link_leaves_its_target_alone(files: Files, tmp_path: Path) -> None:
    (victim := tmp_path / "victim").write_text("content")
    files.write(3)
    (files.root / "out").mkdir()
    (files.root / "out" / LOCK).symlink_to(victim)
    async with edge(Script(encode=encode), **files.settings) as http:
        found = await wait_for(http, await submit(http, files.request()))
    assert (found["status"], victim.read_text()) == ("failed", "content")


async def test_links_in_a_circle_are_refused(files: Files) -> None:
    (files.root / "one").symlink_to(files.root / "two")
    (files.root / "two").symlink_to(files.root / "one")
    async with edge(Script(encode=encode), **files.settings) as http:
        reply = await send(http, files.request(input=str(files.root / "one" / "in.jsonl")))
    assert reply.status == 400
