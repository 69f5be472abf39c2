"""Batches of several edges with one storage."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from shoal.bulk.places import place

from libs.serving import Security
from services.edge.batches import leases, manager
from services.edge.batches.leases import BatchLease
from services.edge.batches.settings import BatchSettings
from services.edge.batches.store import BatchStore
from tests.edge.batches.parts import (
    EMBEDDINGS,
    ENDED,
    embed,
    form,
    lines,
    results,
    retrieve,
    send_form,
    sent,
    serving_edge,
    start,
    texts,
    wait_for,
)
from tests.edge.parts import Script, routing
from tests.router.parts import until


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
        real = BatchStore.active

        def claim_first(store: BatchStore) -> Any:
            for name in real(store).names():
                if name not in taken and "lease" not in name:
                    assert BatchLease.acquire(active, name, 0)
                    taken.append(name)
            return real(store)

        async with serving_edge(router, folder) as http:
            monkeypatch.setattr(BatchStore, "active", claim_first)
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
