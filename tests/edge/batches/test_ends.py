"""The ends of batches: cancellation, expiry, refused and failed requests, and limits of tenants, in
front of a fake router.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from shoal.v1 import inference_pb2 as pb

from libs.errors import QueueFull, WorkerLost
from services.edge.batches.runner import BatchRunner
from services.edge.batches.settings import BatchSettings
from tests.edge.batches.parts import (
    ENDED,
    create,
    embed,
    lines,
    results,
    start,
    texts,
    upload,
    wait_for,
)
from tests.edge.parts import Script, dense, edge, vectors
from tests.router.parts import until


async def test_cancelled_batch_keeps_its_results(
    folder: BatchSettings, answered: Callable[[], int]
) -> None:
    free = asyncio.Event()

    async def act() -> None:
        if len(script.requests) > 3:
            await free.wait()

    script = Script(encode=embed, act=act)
    async with edge(script, batches=folder) as http:
        batch = await start(http, lines(20))
        await until(lambda: answered() == 3, "three results", 120.0)
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
    folder: BatchSettings, made: list[BatchRunner], answered: Callable[[], int]
) -> None:
    async def act() -> None:
        if len(script.requests) > 1:
            await asyncio.Event().wait()

    script = Script(encode=embed, act=act)
    async with edge(script, batches=folder) as http:
        count = 600
        batch = await start(http, lines(count))
        await until(lambda: answered() == 1, "a result", 120.0)
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
    folder: BatchSettings,
) -> None:
    async def act() -> None:
        await asyncio.Event().wait()

    settings = dataclasses.replace(folder, tenant_batches=2)
    async with edge(Script(act=act), batches=settings) as http:
        file = (await upload(http, lines(1))).json["id"]
        replies = await asyncio.gather(*(create(http, file) for _ in range(4)))
        assert sorted(one.status for one in replies) == [200, 200, 429, 429]
        (refused, _) = (one for one in replies if one.status == 429)
        assert refused.json["error"]["code"] == "batch_quota_exceeded"
        assert refused.json["error"]["type"] == "rate_limit_error"
        assert float(refused.headers["retry-after"]) > 0
        refused = await http.send("DELETE", f"/v1/files/{file}", b"", {})
        assert (refused.status, b"batch_" in refused.body) == (409, True)


async def test_waiting_requests_of_a_tenant_are_bounded(folder: BatchSettings) -> None:
    """Requests of a batch count until they have results; those of other tenants do not."""
    free = asyncio.Event()
    script = Script(encode=embed, act=free.wait)  # type: ignore[arg-type]
    settings = dataclasses.replace(folder, lines=5, tenant_requests=6)
    async with edge(script, batches=settings) as http:
        file = (await upload(http, lines(4))).json["id"]
        small = (await upload(http, lines(3)[:-1])).json["id"]  # without the last line break
        batch = (await create(http, file)).json
        replies = [await create(http, one) for one in (file, small)]
        assert [one.status for one in replies] == [429, 429]
        assert replies[0].json["error"]["code"] == "request_quota_exceeded"
        other = (await upload(http, lines(4), "other")).json["id"]
        assert (await create(http, other, "other")).status == 200
        free.set()
        await wait_for(http, batch, ENDED)
        assert (await create(http, file)).status == 200
