"""Turns of tenants: which batches an edge runs, and which leave their places."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from shoal.transport.wire import Metadata

from services.edge.batches import manager as managers
from services.edge.batches.context import Context
from services.edge.batches.manager import Manager
from services.edge.batches.objects import BatchRecord, make_id
from services.edge.batches.settings import BatchSettings
from services.edge.batches.store import tenant_key


async def identify(metadata: Metadata) -> str:
    return ""


async def execute(*args: Any) -> Any:
    raise AssertionError("requests of these batches are not sent")


class FakeRunner:
    """Runs until it is preempted."""

    def __init__(
        self, context: Any, store: Any, record: BatchRecord, *args: Any, **kw: Any
    ) -> None:
        self.record, self.key, self.is_preempted = record, store.key, False
        self._ended = asyncio.Event()

    def preempt(self) -> None:
        self.is_preempted = True
        self._ended.set()

    async def run(self) -> None:
        await self._ended.wait()


class Turns:
    """A manager with fake runners."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.manager = Manager(context, execute, max_line_bytes=1, max_seconds=1.0)
        self._made = 0

    def create(self, tenant: str) -> None:
        """Store a batch of a tenant."""
        self._made += 1
        now = int(time.time())
        self.context.store.tenant(tenant_key(tenant)).create_batch(
            BatchRecord(
                id=make_id("batch_", now, f"{self._made:032}"),
                endpoint="/v1/embeddings",
                input_file_id="",
                completion_window="24h",
                created_at=now,
                expires_at=now + 3600,
                output_id="",
                errors_id="",
                output_seconds=1,
            )
        )

    async def scan(self) -> list[str]:
        """Return the tenants of running batches after a scan and the ends of preempted ones."""
        await self.manager.scan()
        preempted = [
            self.manager._tasks[name]
            for name in self.manager._tasks
            if self.manager._runners[name.partition(".")[2]].is_preempted
        ]
        await asyncio.gather(*preempted)
        names = {tenant_key(name): name for name in ("red", "blue", "green", "gold", "gray")}
        return sorted(names[name.partition(".")[0]] for name in self.manager._tasks)

    async def scan_without_turns(self) -> list[str]:
        """Return the tenants of running batches after a scan that preempts none."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(managers, "TURN_SECONDS", 3600.0)
            return await self.scan()


@pytest.fixture
async def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Turns]:
    monkeypatch.setattr(managers, "BatchRunner", FakeRunner)
    context = Context(BatchSettings(url=str(tmp_path / "files")), identify, vouches=False)
    found = Turns(context)
    yield found
    for task in list(found.manager._tasks.values()):
        task.cancel()
    await asyncio.gather(*found.manager._tasks.values(), return_exceptions=True)
    context.close()


async def test_tenant_with_all_places_leaves_one_to_another(turns: Turns) -> None:
    for _ in range(6):
        turns.create("red")
    assert await turns.scan() == ["red"] * 4
    assert await turns.scan() == ["red"] * 4
    turns.create("blue")
    assert await turns.scan() == ["red"] * 3
    assert await turns.scan() == ["blue"] + ["red"] * 3
    assert await turns.scan() == ["blue"] + ["red"] * 3


async def test_batches_of_equal_tenants_take_turns(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tenant in ("red", "blue", "green", "gold"):
        turns.create(tenant)
    first = await turns.scan()
    turns.create("gray")
    assert await turns.scan() == first == ["blue", "gold", "green", "red"]
    monkeypatch.setattr(managers, "TURN_SECONDS", 0.0)
    left = set()
    for _ in range(5):
        assert len(await turns.scan()) == 3
        running = await turns.scan_without_turns()
        (out,) = {*first, "gray"} - {*running}
        left.add(out)
    assert left == {*first, "gray"}


async def test_batch_that_cannot_run_takes_no_place(turns: Turns) -> None:
    for _ in range(4):
        turns.create("red")
    assert await turns.scan() == ["red"] * 4
    turns.create("blue")
    store = turns.context.store.tenant(tenant_key("blue"))
    (record,) = store.all_batches()
    record.needs_token = True
    store.save_batch(record)
    assert await turns.scan() == ["red"] * 4


@pytest.mark.parametrize("turns_of_the_loop", range(6))
async def test_manager_that_is_woken_at_its_end_ends(turns: Turns, turns_of_the_loop: int) -> None:
    async with asyncio.timeout(20.0):
        async with turns.manager.serving():
            await asyncio.sleep(managers.MIN_SCAN_SECONDS + 0.3)
            turns.manager.wake()
            for _ in range(turns_of_the_loop):
                await asyncio.sleep(0)
