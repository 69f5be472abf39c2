"""The operator's view of batches: series of `/metrics`, read as Prometheus does, and the list that
the console shows, in front of a fake router.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from shoal.bulk.failures import StorageError
from shoal.bulk.places import place

from libs.serving import Security
from libs.telemetry import exposition
from services.edge.batches import leases, manager
from services.edge.batches import lines as lines_of_batches
from services.edge.batches import runner as runners
from services.edge.batches.leases import BatchLease
from services.edge.batches.runner import BatchRunner
from services.edge.batches.settings import BatchSettings
from services.edge.batches.store import TenantStore
from services.edge.intake.served import Executed
from tests.edge.batches.parts import (
    EMBEDDINGS,
    ENDED,
    embed,
    form,
    line,
    lines,
    send_form,
    start,
    wait_for,
)
from tests.edge.batches.test_runner import ANSWER, Harness, fail_later
from tests.edge.batches.test_runner import harness as harness  # a fixture
from tests.edge.parts import MODEL, Http, Script, edge, routing
from tests.router.parts import until

COUNTERS = {
    *(("shoal_http_batches_ended_total", status) for status in ENDED),
    *(("shoal_http_batch_requests_total", outcome) for outcome in ("ok", "failed")),
}
ACTIVE = ("shoal_http_batches_active", "")
IN_FLIGHT = ("shoal_http_batch_requests_in_flight", "")
Series = tuple[str, str]
"""A name, and the value of the label."""


class Scrapes:
    """The series of batches at the metrics addresses of the edges of a test.

    Attributes:
        addresses: The addresses, in the order in which the edges started.
    """

    def __init__(self, before: dict[Series, float]) -> None:
        self.addresses: list[str] = []
        self._before = before

    async def read(self, number: int = 0) -> dict[Series, float]:
        """Return all series of batches of an edge that have changed since the start of the test."""
        now = await asyncio.to_thread(_scrape, self.addresses[number])
        return {
            series: value - self._before.get(series, 0.0)
            for series, value in now.items()
            if value != self._before.get(series, 0.0)
        }

    async def names(self, number: int = 0) -> set[Series]:
        """Return the names and labels of all series of batches of an edge."""
        return set(await asyncio.to_thread(_scrape, self.addresses[number]))

    async def wait_for(self, wanted: Mapping[Series, float], number: int = 0) -> None:
        """Wait until an edge has exactly these changes."""

        found: dict[Series, float] = {}

        async def is_equal() -> bool:
            nonlocal found
            found = await self.read(number)
            return found == wanted

        try:
            await until(is_equal, "the changes", 120.0)
        except AssertionError:
            raise AssertionError(f"{found} instead of {dict(wanted)}") from None

    async def wait_for_requests(self, script: Script, answered: int = 0) -> None:
        """Wait until the edge has a batch and as many requests in flight as the router, and at
        least one.
        """
        found: dict[Series, float] = {}

        async def is_equal() -> bool:
            nonlocal found
            found = await self.read()
            gauges = found.get(ACTIVE), found.get(IN_FLIGHT)
            return gauges == (1, len(script.requests) - answered)

        try:
            await until(is_equal, "the requests", 120.0)
        except AssertionError:
            count = len(script.requests)
            raise AssertionError(f"{found} with {count} requests at the router") from None

    @asynccontextmanager
    async def serving(self, address: str, read: Any, **more: Any) -> AsyncIterator[str]:
        """Serve metrics at any address, and note it."""
        async with exposition.serving_metrics("127.0.0.1:0", read, **more) as served:
            self.addresses.append(served)
            yield served


def _scrape(address: str) -> dict[Series, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60.0) as reply:
        text = reply.read().decode()
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("shoal_http_batch") and not sample.name.endswith("_created")
    }


@pytest.fixture
async def scrapes(monkeypatch: pytest.MonkeyPatch) -> Scrapes:
    """Edges of this test serve metrics. Counters belong to the process, so writers of earlier tests
    must have ended.
    """
    await until(
        lambda: not any(one.name.startswith("batches") for one in threading.enumerate()),
        "the ends of threads of earlier edges",
        120.0,
    )
    async with exposition.serving_metrics("127.0.0.1:0", list) as served:
        found = Scrapes(await asyncio.to_thread(_scrape, served))
    monkeypatch.setattr("services.edge.app.serving_metrics", found.serving)
    return found


def ended(status: str) -> Series:
    return "shoal_http_batches_ended_total", status


def requests(outcome: str) -> Series:
    return "shoal_http_batch_requests_total", outcome


async def test_running_batch_and_its_requests_are_counted(
    folder: BatchSettings, scrapes: Scrapes
) -> None:
    free = asyncio.Event()
    script = Script(encode=embed, act=free.wait)  # type: ignore[arg-type]
    async with edge(script, batches=folder) as http:
        assert await scrapes.names() == COUNTERS | {ACTIVE, IN_FLIGHT}
        assert await scrapes.read() == {}
        batch = await start(http, lines(4) + line("id-bad", "bad"))
        await scrapes.wait_for_requests(script)
        free.set()
        await wait_for(http, batch, ENDED)
        await scrapes.wait_for({ended("completed"): 1, requests("ok"): 4, requests("failed"): 1})
        await wait_for(http, await start(http, b"no JSON\n"), ENDED)
        await scrapes.wait_for(
            {
                ended("completed"): 1,
                ended("failed"): 1,
                requests("ok"): 4,
                requests("failed"): 1,
            }
        )
        # No label has a value of a client: neither the model nor an id.
        assert await scrapes.names() == COUNTERS | {ACTIVE, IN_FLIGHT}


async def test_cancelled_batch_counts_only_requests_with_results(
    folder: BatchSettings, scrapes: Scrapes, answered: Callable[[], int]
) -> None:
    async def act() -> None:
        if len(script.requests) > 3:
            await asyncio.Event().wait()

    script = Script(encode=embed, act=act)
    async with edge(script, batches=folder) as http:
        batch = await start(http, lines(20))
        await until(lambda: answered() == 3, "three results", 120.0)
        await scrapes.wait_for_requests(script, answered())
        await http.post(f"/v1/batches/{batch['id']}/cancel", b"")
        assert (await wait_for(http, batch, ENDED))["status"] == "cancelled"
        await scrapes.wait_for({ended("cancelled"): 1, requests("ok"): 3})


async def test_requests_of_an_expired_batch_are_failed(
    folder: BatchSettings,
    scrapes: Scrapes,
    made: list[BatchRunner],
    answered: Callable[[], int],
) -> None:
    async def act() -> None:
        if len(script.requests) > 1:
            await asyncio.Event().wait()

    script = Script(encode=embed, act=act)
    async with edge(script, batches=folder) as http:
        batch = await start(http, lines(600))
        await until(lambda: answered() == 1, "a result", 120.0)
        made[0]._set_stop("expired")
        assert (await wait_for(http, batch, ENDED))["status"] == "expired"
        await scrapes.wait_for({ended("expired"): 1, requests("ok"): 1, requests("failed"): 599})


async def test_edge_that_loses_a_batch_does_not_count_it(
    folder: BatchSettings, scrapes: Scrapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another edge claims the batch, and releases it later without a result."""
    monkeypatch.setattr(runners, "BATCH_RENEW_SECONDS", 0.02)
    monkeypatch.setattr(manager, "SCAN_SECONDS", 0.05)
    monkeypatch.setattr(manager, "Observed", lambda: leases.Observed(3600.0))
    free = asyncio.Event()
    script = Script(encode=embed, act=free.wait)  # type: ignore[arg-type]
    active = place(f"{folder.location}/active")
    async with edge(script, batches=folder) as http:
        batch = await start(http, lines(3))
        await scrapes.wait_for_requests(script)
        (name,) = [name for name in active.names() if name.endswith(batch["id"])]
        taken = BatchLease.acquire(active, name, 1)
        assert taken is not None
        await scrapes.wait_for({})
        free.set()
        taken.release_if_held()
        found = await wait_for(http, batch, ENDED)
        assert found["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        await scrapes.wait_for({ended("completed"): 1, requests("ok"): 3})


async def test_edge_that_continues_a_batch_counts_only_the_rest(
    folder: BatchSettings, scrapes: Scrapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first edge stops after the first of two chunks."""
    monkeypatch.setattr(lines_of_batches, "CHUNK_REQUESTS", 2)
    free = asyncio.Event()

    async def act() -> None:
        if len(script.requests) > 2:
            await free.wait()

    script = Script(encode=embed, act=act)
    async with routing(script) as router:
        more: dict[str, Any] = {"batches": folder, "routers": (router,), "grace_seconds": 0.1}
        async with edge(script, **more) as http:
            batch = await start(http, lines(4))
            await scrapes.wait_for({ACTIVE: 1, IN_FLIGHT: 2, requests("ok"): 2})
        free.set()
        async with edge(script, **more) as http:
            found = await wait_for(http, batch, ENDED)
            assert found["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
            # Both edges count in this process, so the first one's requests are here, too.
            await scrapes.wait_for({ended("completed"): 1, requests("ok"): 4}, 1)


async def test_two_runners_of_a_batch_count_each_result_and_the_end_once(
    harness: Harness, scrapes: Scrapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is suspended until the second one has ended the batch, and then stores its
    results, too.
    """
    monkeypatch.setattr(runners, "BATCH_RENEW_SECONDS", 3600.0)
    batch, started, free = harness.create(3), asyncio.Event(), asyncio.Event()

    async def act(text: str) -> Executed:
        if not started.is_set():
            started.set()
            await free.wait()
        return ANSWER

    harness.act = act
    first = asyncio.create_task(harness.runner(batch.id).run())
    await asyncio.wait_for(started.wait(), 120.0)
    found = await harness.run(batch.id)
    assert (found.status, found.counts.completed) == ("completed", 3)
    free.set()
    await asyncio.wait_for(first, 120.0)
    assert harness.sent.count("text 0") == 2
    async with scrapes.serving("", list):
        assert await scrapes.read() == {ended("completed"): 1, requests("ok"): 3}


async def test_end_that_a_lost_runner_commits_is_counted(
    harness: Harness, scrapes: Scrapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner is cancelled while a thread commits the end."""
    batch, loop = harness.create(1), asyncio.get_running_loop()
    began, free, real = asyncio.Event(), threading.Event(), TenantStore.end_batch

    def end_batch(store: TenantStore, record: Any) -> bool:
        loop.call_soon_threadsafe(began.set)
        assert free.wait(120.0)
        return real(store, record)

    monkeypatch.setattr(TenantStore, "end_batch", end_batch)
    running = asyncio.create_task(harness.runner(batch.id).run())
    await asyncio.wait_for(began.wait(), 120.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    free.set()
    async with scrapes.serving("", list):
        await scrapes.wait_for({ended("completed"): 1, requests("ok"): 1})


async def test_part_and_end_that_are_not_stored_are_not_counted(
    harness: Harness, scrapes: Scrapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, harness.act = harness.create(2), fail_later
    with pytest.raises(StorageError):
        await harness.run(batch.id)

    def end_batch(store: TenantStore, record: Any) -> bool:
        raise StorageError("the storage is full")

    harness.act = None
    async with scrapes.serving("", list):
        assert await scrapes.read() == {requests("ok"): 1}
        with monkeypatch.context() as patch:
            patch.setattr(TenantStore, "end_batch", end_batch)
            with pytest.raises(StorageError):
                await harness.run(batch.id)
        assert await scrapes.read() == {requests("ok"): 2}
        assert (await harness.run(batch.id)).status == "completed"
        assert await scrapes.read() == {ended("completed"): 1, requests("ok"): 2}


async def test_edge_without_storage_has_no_running_batches(scrapes: Scrapes) -> None:
    async with edge(Script()):
        assert not {ACTIVE, IN_FLIGHT} & await scrapes.names()


async def test_console_lists_the_batches_of_its_tenant(
    folder: BatchSettings, tmp_path: Path
) -> None:
    tokens = {name: f"token-of-the-{name}-tenant" for name in ("red", "blue")}
    path = tmp_path / "tokens.yaml"
    path.write_text(
        json.dumps(
            {
                "tokens": [
                    {"token": token, "subject": name, "role": "client", "tenant": name}
                    for name, token in tokens.items()
                ]
            }
        )
    )
    path.chmod(0o600)

    def page(name: str) -> dict[str, str]:
        """Return the headers of the console's page with the token of a tenant."""
        return {"x-shoal-console": "1", "authorization": f"Bearer {tokens[name]}"}

    async def listed(http: Http, **headers: str) -> list[Any]:
        reply = await http.get("/v1/batches?limit=20", **headers)
        assert reply.status == 200, reply.body
        data: list[Any] = reply.json["data"]
        return data

    script = Script(encode=embed)
    async with edge(script, Security(tokens=path), batches=folder, console=True) as http:
        content = lines(2) + line("id-bad", "bad")
        file = (await send_form(http, form(content), **page("red"))).json["id"]
        body = {"input_file_id": file, "endpoint": EMBEDDINGS, "completion_window": "24h"}
        made = (await http.post("/v1/batches", body, **page("red"))).json

        async def is_ended() -> bool:
            return bool((await listed(http, **page("red")))[0]["status"] in ENDED)

        await until(is_ended, "the end of the batch", 120.0)
        (shown,) = await listed(http, **page("red"))
        assert (shown["id"], shown["status"], shown["model"]) == (made["id"], "completed", MODEL)
        assert shown["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert shown["endpoint"] == EMBEDDINGS
        assert shown["error_file_id"]
        assert await listed(http, **page("blue")) == []
        assert (await http.get("/v1/batches?limit=20", x_shoal_console="1")).status == 401
