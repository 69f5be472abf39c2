"""`/v1/batches` in front of a fake router: results, failures, cancellation, expiry, tokens, and
several edges with one storage.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from shoal.bulk.places import place
from shoal.v1 import inference_pb2 as pb

from libs.errors import InvalidInput, QueueFull, WorkerLost
from libs.serving import Security
from services.edge import asgi
from services.edge.app import running
from services.edge.batches import batches as batches_routes
from services.edge.batches import files as files_routes
from services.edge.batches import leases, manager
from services.edge.batches import lines as lines_of_batches
from services.edge.batches.leases import Lease
from services.edge.batches.runner import Gate, Runner
from services.edge.batches.settings import BatchSettings
from services.edge.batches.store import Store, tenant_key
from services.edge.messages.names import Names
from services.edge.routers import Routers
from services.edge.settings import Settings
from tests.edge.batches.parts import (
    EMBEDDINGS,
    create,
    form,
    line,
    lines,
    results,
    retrieve,
    send_form,
    start,
    upload,
    wait_for,
)
from tests.edge.parts import MODEL, Http, Script, dense, edge, routing, vectors
from tests.router.parts import until

ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> BatchSettings:
    """A directory and an object store."""
    url = tmp_path / "files" if request.param == "folder" else f"memory:/{tmp_path}"
    return BatchSettings(url=str(url))


@pytest.fixture
def folder(tmp_path: Path) -> BatchSettings:
    return BatchSettings(url=str(tmp_path / "files"))


def embed(request: pb.EncodeRequest) -> pb.EncodeResponse:
    """Refuse the text "bad"."""
    if any(item.text == "bad" for item in request.items):
        raise InvalidInput("items[0].text is bad", field="items[0].text")
    return pb.EncodeResponse(
        dense=dense(vectors(len(request.items))), usage=pb.Usage(input_tokens=5)
    )


def texts(script: Script) -> Counter[str]:
    """Return how often each text was sent."""
    return Counter(item.text for request in script.requests for item in request.items)


async def sent(script: Script, count: int) -> None:
    """Wait until the router has received requests."""
    for _ in range(3000):
        if len(script.requests) >= count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{len(script.requests)} requests were sent")


async def test_results_and_errors_are_files_with_each_request_once(
    storage: BatchSettings,
) -> None:
    script = Script(encode=embed)
    async with edge(script, batches=storage) as http:
        content = lines(3) + line("bad", "bad") + b"\n" + line("two", ["a", "b"])
        batch = await start(http, content, metadata={"job": "nightly"})
        assert (batch["object"], batch["status"]) == ("batch", "validating")
        assert batch["output_file_id"] is batch["error_file_id"] is batch["errors"] is None
        found = await wait_for(http, batch, ENDED)
        assert found["status"] == "completed"
        assert found["request_counts"] == {"total": 5, "completed": 4, "failed": 1}
        assert found["usage"]["total_tokens"] == 20
        assert (found["metadata"], found["model"]) == ({"job": "nightly"}, MODEL)
        assert found["created_at"] <= found["in_progress_at"] <= found["completed_at"]
        done = await results(http, found["output_file_id"])
        assert {one["custom_id"] for one in done} == {"id-0", "id-1", "id-2", "two"}
        assert {one["response"]["status_code"] for one in done} == {200}
        (two,) = (one for one in done if one["custom_id"] == "two")
        assert len(two["response"]["body"]["data"]) == 2
        assert two["response"]["request_id"] == two["id"]
        (failed,) = await results(http, found["error_file_id"])
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
        assert failed["response"]["body"]["error"]["param"] == "input"
        assert failed["error"]["message"]
        file = (await http.get(f"/v1/files/{found['output_file_id']}")).json
        assert (file["purpose"], file["filename"]) == (
            "batch_output",
            f"{batch['id']}_output.jsonl",
        )
        page = (await http.get("/v1/batches")).json
        assert (page["data"], page["has_more"]) == ([found], False)
    assert all(request.priority == pb.PRIORITY_BULK for request in script.requests)
    assert {call.request_id for call in script.calls} >= {one["id"] for one in (*done, failed)}
    store = Store(storage.location).tenant(tenant_key("default"))
    assert not place(f"{storage.location}/active").names()
    assert store.stored_bytes() == len(content) + sum(
        one.bytes for one in store.all_files() if one.batch
    )


async def test_input_of_several_pieces_is_executed_in_two_chunks_at_a_time(
    folder: BatchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_routes, "FILE_PIECE_BYTES", 5000)
    monkeypatch.setattr(lines_of_batches, "CHUNK_REQUESTS", 20)
    script = Script(encode=embed)
    async with edge(script, batches=folder) as http:
        content = lines(200)
        assert len(content) > 4 * 5000
        found = await wait_for(http, await start(http, content), ENDED)
        assert found["request_counts"] == {"total": 200, "completed": 200, "failed": 0}
        done = await results(http, found["output_file_id"])
    assert {one["custom_id"] for one in done} == {f"id-{number}" for number in range(200)}
    assert texts(script) == Counter(f"text {number}" for number in range(200))


async def test_data_of_a_batch_is_deleted_with_its_last_file(
    folder: BatchSettings, tmp_path: Path
) -> None:
    async with edge(Script(encode=embed), batches=folder) as http:
        batch = await wait_for(http, await start(http, lines(1) + line("bad", "bad")), ENDED)
        data = tmp_path / "files" / tenant_key("default") / batch["id"]
        for name, exists in (("output_file_id", True), ("error_file_id", False)):
            await http.send("DELETE", f"/v1/files/{batch[name]}", b"", {})
            assert data.exists() == exists
        await http.send("DELETE", f"/v1/files/{batch['input_file_id']}", b"", {})
        assert Store(folder.location).tenant(tenant_key("default")).stored_bytes() == 0
        assert (await retrieve(http, batch))["status"] == "completed"


async def test_outputs_are_kept_as_long_as_the_edge_keeps_files(tmp_path: Path) -> None:
    longest = 60 * 86_400
    settings = BatchSettings(url=str(tmp_path / "files"), expiry_seconds=longest)
    after = {"anchor": "created_at", "seconds": 7200}
    async with edge(Script(encode=embed), batches=settings) as http:
        whole = await start(http, lines(1))
        short = await start(http, lines(1), output_expires_after=after)
        for batch, seconds in ((whole, longest), (short, 7200)):
            found = await wait_for(http, batch, ENDED)
            file = (await http.get(f"/v1/files/{found['output_file_id']}")).json
            assert file["expires_at"] - file["created_at"] == seconds


async def test_bad_lines_fail_the_batch_before_any_request(folder: BatchSettings) -> None:
    script = Script(encode=embed)
    async with edge(script, batches=folder) as http:
        content = lines(1) + b"{\n" + line("id-0", "again") + line("x", "a", url="/v1/rerank")
        found = await wait_for(http, await start(http, content), ENDED)
    assert found["status"] == "failed"
    assert found["failed_at"]
    assert found["output_file_id"] is found["error_file_id"] is None
    assert found["errors"]["object"] == "list"
    errors = [(one["line"], one["code"], one["param"]) for one in found["errors"]["data"]]
    assert errors == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_url", "url"),
    ]
    assert not script.requests


async def test_batch_of_failed_requests_is_completed_without_results(
    folder: BatchSettings,
) -> None:
    async with edge(Script(encode=embed), batches=folder) as http:
        found = await wait_for(http, await start(http, line("a", "bad")), ENDED)
    assert (found["status"], found["output_file_id"]) == ("completed", None)
    assert found["error_file_id"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"endpoint": "/v1/responses"}, "endpoint"),
        ({"endpoint": "/v1/extract/" + "a" * 500}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"input_file_id": "file-x"}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
async def test_requests_for_a_batch_are_checked(
    folder: BatchSettings, more: dict[str, Any], param: str
) -> None:
    async with edge(Script(), batches=folder) as http:
        file = (await upload(http, lines(1))).json["id"]
        reply = await create(http, file, **more)
        assert reply.status == 400
        assert param in reply.json["error"]["param"]
        assert (await http.get("/v1/batches")).json["data"] == []


async def test_batches_of_another_tenant_do_not_exist(folder: BatchSettings) -> None:
    async with edge(Script(encode=embed), batches=folder) as http:
        file = (await upload(http, lines(1), "red")).json["id"]
        assert (await create(http, file, "blue")).status == 400
        batch = (await create(http, file, "red")).json
        for tenant, status in (("blue", 404), ("red", 200)):
            reply = await http.get(f"/v1/batches/{batch['id']}", x_shoal_tenant=tenant)
            assert reply.status == status
        path = f"/v1/batches/{batch['id']}/cancel"
        assert (await http.post(path, b"", x_shoal_tenant="blue")).status == 404
        page = (await http.get("/v1/batches", x_shoal_tenant="blue")).json
        assert page["data"] == []


async def test_requests_are_sent_as_their_tenant(folder: BatchSettings) -> None:
    script = Script(encode=embed)
    async with edge(script, batches=folder) as http:
        await start(http, lines(2), "red")
        await sent(script, 2)
    assert {call.tenant for call in script.calls} == {"red"}


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Awaitable[None]]:
    """Waits until requests have results."""
    count, real = 0, lines_of_batches.result_line

    def result_line(*arguments: Any) -> bytes:
        nonlocal count
        count += 1
        return real(*arguments)

    async def wait(least: int) -> None:
        for _ in range(3000):
            if count >= least:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{count} requests have results")

    monkeypatch.setattr(lines_of_batches, "result_line", result_line)
    return wait


async def test_cancelled_batch_keeps_its_results(
    folder: BatchSettings, answered: Callable[[int], Awaitable[None]]
) -> None:
    free = asyncio.Event()

    async def act() -> None:
        if len(script.requests) > 3:
            await free.wait()

    script = Script(encode=embed, act=act)
    async with edge(script, batches=folder) as http:
        batch = await start(http, lines(20))
        await answered(3)
        asked = (await http.post(f"/v1/batches/{batch['id']}/cancel", b"")).json
        assert asked["status"] in ("cancelling", "cancelled")
        assert asked["cancelling_at"]
        found = await wait_for(http, batch, ENDED)
        assert found["status"] == "cancelled"
        assert found["request_counts"] == {"total": 20, "completed": 3, "failed": 0}
        assert len(await results(http, found["output_file_id"])) == 3
        again = await http.post(f"/v1/batches/{batch['id']}/cancel", b"")
        assert (again.status, again.json["status"]) == (200, "cancelled")
        free.set()
        done = await wait_for(http, await start(http, lines(1)), ENDED)
        refused = await http.post(f"/v1/batches/{done['id']}/cancel", b"")
        assert refused.status == 409
    assert script.cancelled >= 1


async def test_expired_batch_has_errors_for_the_rest(
    folder: BatchSettings,
    monkeypatch: pytest.MonkeyPatch,
    answered: Callable[[int], Awaitable[None]],
) -> None:
    made: list[Runner] = []

    class Recorded(Runner):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            made.append(self)

    async def act() -> None:
        if len(script.requests) > 1:
            await asyncio.Event().wait()

    monkeypatch.setattr(manager, "Runner", Recorded)
    script = Script(encode=embed, act=act)
    async with edge(script, batches=folder) as http:
        count = 600
        batch = await start(http, lines(count))
        await answered(1)
        made[0]._set_stop("expired")
        found = await wait_for(http, batch, ENDED)
        assert found["status"] == "expired"
        assert found["request_counts"] == {"total": count, "completed": 1, "failed": count - 1}
        done = await results(http, found["output_file_id"])
        rest = await results(http, found["error_file_id"])
    assert {one["error"]["code"] for one in rest} == {"batch_expired"}
    assert {one["response"] for one in rest} == {None}
    ids = Counter(one["custom_id"] for one in (*done, *rest))
    assert ids == Counter(f"id-{number}" for number in range(count))


async def test_refused_requests_are_repeated(folder: BatchSettings) -> None:
    async def act() -> None:
        if len(script.requests) in (1, 3):
            raise QueueFull("the lane is full", retry_after=0.1)
        if len(script.requests) == 4:
            raise WorkerLost("workers died")

    script = Script(encode=embed, act=act)
    async with edge(script, batches=folder) as http:
        found = await wait_for(http, await start(http, lines(5)), ENDED)
        assert found["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
    assert sum(texts(script).values()) == 8


async def test_request_that_always_fails_is_an_error(folder: BatchSettings) -> None:
    async def act() -> None:
        raise WorkerLost("workers died")

    script = Script(act=act)
    async with edge(script, batches=folder) as http:
        found = await wait_for(http, await start(http, lines(1)), ENDED)
        (failed,) = await results(http, found["error_file_id"])
    assert failed["response"]["status_code"] == 500
    assert len(script.requests) == 3


async def test_results_beyond_the_quota_end_the_batch(tmp_path: Path) -> None:
    content = lines(300)
    settings = BatchSettings(
        url=str(tmp_path / "files"), file_bytes=1 << 20, tenant_bytes=(1 << 20) + 80_000
    )
    wide = dense(vectors(1, 1000))
    reply = pb.EncodeResponse(dense=wide)
    async with edge(Script(encode=lambda request: reply), batches=settings) as http:
        await upload(http, b"a" * ((1 << 20) - len(content)))
        found = await wait_for(http, await start(http, content), ENDED)
    assert found["status"] == "failed"
    assert found["errors"]["data"][0]["code"] == "storage_quota_exceeded"


async def test_unfinished_batches_of_a_tenant_are_bounded(
    folder: BatchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_routes, "MAX_UNFINISHED", 2)

    async def act() -> None:
        await asyncio.Event().wait()

    async with edge(Script(act=act), batches=folder) as http:
        file = (await upload(http, lines(1))).json["id"]
        statuses = [(await create(http, file)).status for _ in range(3)]
        assert statuses == [200, 200, 429]
        refused = await http.send("DELETE", f"/v1/files/{file}", b"", {})
        assert (refused.status, b"batch_" in refused.body) == (409, True)


@asynccontextmanager
async def serving_edge(router: str, folder: BatchSettings, **more: Any) -> AsyncIterator[Http]:
    settings = Settings(
        edge_id="edge",
        address="127.0.0.1:0",
        routers=(router,),
        grace_seconds=1.0,
        batches=folder,
        **more,
    )
    async with running(settings) as address:
        yield Http(address)


async def test_two_edges_execute_each_request_once(folder: BatchSettings) -> None:
    async def act() -> None:
        await asyncio.sleep(0.01)

    script = Script(encode=embed, act=act)
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(routing(script))
        first, second = [
            await stack.enter_async_context(serving_edge(router, folder)) for _ in range(2)
        ]
        made = [await start(http, lines(40, f"batch {n}")) for n, http in enumerate((first,) * 3)]
        for batch in made:
            found = await wait_for(second, batch, ENDED)
            assert found["request_counts"]["completed"] == 40
            assert len(await results(second, found["output_file_id"])) == 40
    assert set(texts(script).values()) == {1}
    assert len(texts(script)) == 120


async def test_batch_of_a_dead_edge_is_continued(
    folder: BatchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another edge holds the lease and never renews it."""
    observed = leases.Observed(600.0)
    monkeypatch.setattr(manager, "Observed", lambda: observed)
    monkeypatch.setattr(manager, "SCAN_SECONDS", 0.3)
    script = Script(encode=embed)
    async with routing(script) as router:
        active = place(f"{folder.location}/active")
        taken: list[str] = []
        real = Store.active

        def claim_first(store: Store) -> Any:
            for name in real(store).names():
                if name not in taken and "lease" not in name:
                    assert Lease.acquire(active, name, 0)
                    taken.append(name)
            return real(store)

        async with serving_edge(router, folder) as http:
            monkeypatch.setattr(Store, "active", claim_first)
            batch = await start(http, lines(3))
            await until(lambda: bool(observed._seen))
            await asyncio.sleep(0.5)
            assert (await retrieve(http, batch))["status"] == "validating"
            monkeypatch.setattr(observed, "_lease_seconds", 1.0)
            found = await wait_for(http, batch, ENDED)
    assert (found["status"], len(taken)) == ("completed", 1)
    assert set(texts(script).values()) == {1}


async def test_token_is_not_stored_and_awaited_after_a_restart(
    folder: BatchSettings, tmp_path: Path
) -> None:
    secret = "secret-of-the-red-tenant"
    tokens = [
        {"token": secret, "subject": "a", "role": "client", "tenant": "red"},
        {"token": "token-of-the-blue-tenant", "subject": "b", "role": "client", "tenant": "blue"},
    ]
    path = tmp_path / "tokens.yaml"
    path.write_text(json.dumps({"tokens": tokens}))
    path.chmod(0o600)
    free = asyncio.Event()

    async def act() -> None:
        if len(script.requests) > 1:
            await free.wait()

    script = Script(encode=embed, act=act)
    red = {"authorization": f"Bearer {secret}"}
    async with routing(script, Security(tokens=path)) as router:
        async with serving_edge(router, folder) as http:
            assert (await http.get("/v1/files")).status == 401
            assert (await http.get("/v1/batches", authorization="Bearer none")).status == 401
            body = {"endpoint": EMBEDDINGS, "completion_window": "24h"}
            file = (await send_form(http, form(lines(4)), **red)).json["id"]
            batch = (await http.post("/v1/batches", {**body, "input_file_id": file}, **red)).json
            await sent(script, 2)
            stored = [one for one in (tmp_path / "files").rglob("*") if one.is_file()]
            assert stored
            for one in stored:
                with suppress(FileNotFoundError):  # the temporary file of a lease's renewal
                    assert secret.encode() not in one.read_bytes()
        free.set()
        before = len(script.requests)
        async with serving_edge(router, folder) as http:
            await http.get("/v1/batches", authorization="Bearer token-of-the-blue-tenant")
            await asyncio.sleep(1.0)
            assert len(script.requests) == before
            path_of = f"/v1/batches/{batch['id']}"

            async def is_completed() -> bool:
                return bool((await http.get(path_of, **red)).json["status"] == "completed")

            await until(is_completed, timeout=300.0)
            found = (await http.get(path_of, **red)).json
            assert found["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
            done = await results(http, found["output_file_id"], **red)
    assert Counter(one["custom_id"] for one in done) == Counter(f"id-{n}" for n in range(4))


async def test_few_answers_are_put_together_at_a_time() -> None:
    """Also if their requests are cancelled."""
    application = asgi.Application(Routers(("127.0.0.1:1",), None), lambda: Names({}), asgi.State())
    lock, may_end = threading.Lock(), threading.Event()
    loop, is_full = asyncio.get_running_loop(), asyncio.Event()
    running_now = most = 0

    def pieces() -> Iterator[bytes]:
        nonlocal running_now, most
        with lock:
            running_now += 1
            most = max(most, running_now)
        if most == asgi.JOIN_THREADS:
            loop.call_soon_threadsafe(is_full.set)
        yield b"a"
        may_end.wait(120.0)
        with lock:
            running_now -= 1
        yield b"b"

    cancelled = [asyncio.create_task(application._join(pieces())) for _ in range(3)]
    await asyncio.wait_for(is_full.wait(), 60.0)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    joins = [asyncio.create_task(application._join(pieces())) for _ in range(4)]
    await asyncio.sleep(0.1)
    may_end.set()
    assert await asyncio.gather(*joins) == [b"ab"] * 4
    await until(lambda: running_now == 0)
    assert most == asgi.JOIN_THREADS
    assert await application._join(b"whole") == b"whole"


async def test_gate_adapts_to_refusals() -> None:
    gate, running_now, most, sender = Gate(8), 0, 0, ("red", "model")

    async def send(status: int) -> None:
        nonlocal running_now, most
        async with gate.enter(sender):
            running_now += 1
            most = max(most, running_now)
            try:
                await asyncio.sleep(0)
            finally:
                running_now -= 1
            gate.report(sender, status, 1.0, 2.0)

    await asyncio.gather(*(send(200) for _ in range(100)))
    assert (gate.limit(sender), most) == (8, 8)
    await asyncio.gather(*(send(429) for _ in range(8)))
    assert gate.limit(sender) == 4
    assert gate.limit(("blue", "model")) == gate.limit(("red", "other")) == 2
    waiting = [asyncio.create_task(send(200)) for _ in range(20)]
    await asyncio.sleep(0)
    for task in waiting[::2]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    most = 0
    await asyncio.gather(*(send(200) for _ in range(40)))
    assert (running_now, most <= 8) == (0, True)


async def test_requests_of_many_senders_leave_nothing_behind() -> None:
    gate, running_now, most, done = Gate(4), 0, 0, 0

    async def send(tenant: str, model: str) -> None:
        nonlocal running_now, most, done
        async with gate.enter((tenant, model)):
            running_now += 1
            most = max(most, running_now)
            await asyncio.sleep(0)
            running_now -= 1
            done += 1

    senders = [(f"tenant {number % 4}", f"model {number % 16}") for number in range(400)]
    tasks = [asyncio.create_task(send(*one)) for one in senders]
    await asyncio.sleep(0)
    for task in tasks[100:200]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (most, done) == (4, 300)
    assert (gate._total, gate._running, gate._tenants, gate._waiting) == (0, {}, {}, {})


async def test_free_places_go_to_the_tenant_with_the_fewest_requests() -> None:
    gate, order = Gate(4), list[str]()
    free = {tenant: asyncio.Event() for tenant in ("red", "blue")}

    async def send(tenant: str) -> None:
        async with gate.enter((tenant, "model")):
            order.append(tenant)
            await free[tenant].wait()
            gate.report((tenant, "model"), 200, 1.0, 2.0)

    free["red"].set()
    await asyncio.gather(*(send("red") for _ in range(20)))
    assert gate.limit(("red", "model")) == 4
    free["red"].clear()
    order.clear()
    tasks = [asyncio.create_task(send("red")) for _ in range(10)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(send("blue")) for _ in range(2)]
    await asyncio.sleep(0)
    assert order == ["red"] * 4
    free["red"].set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert order[4:6] == ["blue", "blue"]
    free["blue"].set()
    await asyncio.gather(*tasks)
    assert Counter(order) == {"red": 10, "blue": 2}
