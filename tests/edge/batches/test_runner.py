"""The runner of a batch, with a storage and without a mesh: inputs that are gone, stops at any
time, and failures while a batch ends.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from shoal.bulk.failures import StorageError
from shoal.transport.wire import Metadata

from services.edge.batches import context as contexts
from services.edge.batches import lines as lines_of_batches
from services.edge.batches import runner as runners
from services.edge.batches.context import Context, QuotaExceeded
from services.edge.batches.gate import Gate
from services.edge.batches.leases import BatchLease
from services.edge.batches.objects import BatchRecord, FilePiece, FileRecord, make_id
from services.edge.batches.runner import BatchRunner
from services.edge.batches.settings import BatchSettings
from services.edge.batches.store import FileContent, TenantStore, tenant_key
from services.edge.intake.served import Executed
from services.edge.messages.base import HttpError
from tests.edge.batches.parts import EMBEDDINGS, lines

ANSWER = Executed(200, b'{"data":[]}')
Act = Callable[[str], Awaitable[Executed]]


async def identify(metadata: Metadata) -> str:
    return "red"


class Harness:
    """A storage and runners of its batches, each of which claims its batch.

    Attributes:
        sent: The texts that were sent.
        act: Answers a text.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.store: TenantStore = context.store.tenant(tenant_key("red"))
        self.sent: list[str] = []
        self.act: Act | None = None
        self._generation = 0

    def create(
        self, count: int, *, seconds: int = 3600, input_seconds: int = 3600, text: str = "text"
    ) -> BatchRecord:
        """Store an input with requests, and a batch that expires in `seconds`."""
        now, content = int(time.time()), lines(count, text)
        file = make_id("file-", now, "1" * 32)
        self.store.data(file).create("00000000", content)
        record = FileRecord(
            id=file,
            filename="in",
            purpose="batch",
            bytes=len(content),
            created_at=now,
            expires_at=now + input_seconds,
            folder=file,
        )
        self.store.create_file(record, [FilePiece("00000000", 0, len(content), len(content))])
        batch = BatchRecord(
            id=make_id("batch_", now, "2" * 32),
            endpoint=EMBEDDINGS,
            input_file_id=file,
            completion_window="24h",
            created_at=now,
            expires_at=now + seconds,
            output_id=make_id("file-", now, "3" * 32),
            errors_id=make_id("file-", now, "4" * 32),
            output_seconds=3600,
        )
        self.store.create_batch(batch)
        return batch

    def runner(self, identity: str) -> BatchRunner:
        """Claim a batch, of which the stored record is read."""
        record = self.store.batch(identity)
        active = self.context.store.active()
        lease = BatchLease.acquire(active, self.store.marker(identity), self._generation)
        assert record is not None
        assert lease is not None
        self._generation += 1
        return BatchRunner(
            self.context,
            self.store,
            record,
            lease,
            execute=self._execute,
            gate=Gate(8),
            max_line_bytes=1 << 20,
            max_seconds=10.0,
        )

    async def run(self, identity: str) -> BatchRecord:
        """Run a batch and return its stored record."""
        await asyncio.wait_for(self.runner(identity).run(), 60.0)
        return self.record(identity)

    def record(self, identity: str) -> BatchRecord:
        record = self.store.batch(identity)
        assert record is not None
        return record

    def results(self, file: str) -> list[dict[str, Any]]:
        """Return the lines of a file."""
        record = self.store.file(file, time.time())
        assert record is not None
        content = b"".join(FileContent(self.store, record).pieces())
        return [json.loads(text) for text in content.splitlines()]

    async def _execute(
        self, path: str, body: bytes, metadata: Metadata, request_id: str, seconds: float, /
    ) -> Executed:
        text = json.loads(body)["input"]
        self.sent.append(text)
        return ANSWER if self.act is None else await self.act(text)


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """Chunks have one request, and one is executed at a time."""
    monkeypatch.setattr(lines_of_batches, "CHUNK_REQUESTS", 1)
    monkeypatch.setattr(runners, "CHUNKS_IN_FLIGHT", 1)
    context = Context(BatchSettings(url=str(tmp_path / "files")), identify, vouches=False)
    yield Harness(context)
    context.close()


async def fail_later(text: str) -> Executed:
    """Answer the first text and fail for the others."""
    if text != "text 0":
        raise StorageError("the runner stops")
    return ANSWER


async def test_results_are_kept_if_the_input_is_gone(harness: Harness) -> None:
    batch, harness.act = harness.create(3), fail_later
    with pytest.raises(StorageError):
        await harness.run(batch.id)
    file = harness.store.file(batch.input_file_id, time.time())
    assert file is not None
    harness.store.delete_file(file)
    found = await harness.run(batch.id)
    assert (found.status, found.errors[0].param) == ("failed", "input_file_id")
    assert (found.counts.total, found.counts.completed) == (3, 1)
    (done,) = harness.results(batch.output_id)
    assert done["custom_id"] == "id-0"
    assert harness.store.stored_bytes() == found.stored_bytes > 0


async def test_cancelled_batch_without_its_input_keeps_results(harness: Harness) -> None:
    batch, harness.act = harness.create(3), fail_later
    with pytest.raises(StorageError):
        await harness.run(batch.id)
    harness.store.data(batch.id).create(runners.CANCEL, b"7")
    file = harness.store.input_file(batch.input_file_id)
    assert file is not None
    harness.store.delete_file(file)
    found = await harness.run(batch.id)
    assert (found.status, found.errors) == ("cancelled", [])
    assert len(harness.results(batch.output_id)) == 1


async def test_expired_input_of_an_active_batch_is_kept(harness: Harness) -> None:
    batch = harness.create(2, input_seconds=-1)
    harness.store.delete_expired(time.time(), 3600.0)
    assert harness.store.file(batch.input_file_id, time.time()) is None
    assert (await harness.run(batch.id)).status == "completed"
    harness.store.delete_expired(time.time(), 3600.0)
    assert harness.store.input_file(batch.input_file_id) is None


async def test_results_without_a_file_count_until_they_are_deleted(harness: Harness) -> None:
    batch = harness.create(1)
    found = await harness.run(batch.id)
    size = harness.store.stored_bytes()
    harness.context.store.folder(harness.store.key, "records").delete(f"{batch.output_id}.json")
    harness.context.store.forget(harness.store.key, f"{batch.output_id}.json")
    assert harness.store.stored_bytes() == size
    harness.store.delete_expired(time.time(), 3600.0)
    assert harness.store.stored_bytes() == size - found.stored_bytes
    assert batch.id not in harness.context.store.folder(harness.store.key).names()


@pytest.mark.parametrize("reason", ["cancelled", "expired"])
@pytest.mark.parametrize("at", ["credential", "read"])
async def test_batch_that_ends_while_a_chunk_is_prepared_sends_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, at: str, reason: runners.Stop
) -> None:
    batch = harness.create(2)
    runner, loop = harness.runner(batch.id), asyncio.get_running_loop()
    real_credential, real_read = harness.context.credential, FileContent.read

    async def credential(*args: Any, **kwargs: Any) -> Any:
        runner._set_stop(reason)
        return await real_credential(*args, **kwargs)

    def read(content: FileContent, offset: int, size: int) -> bytes:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(60.0)
        return real_read(content, offset, size)

    async def stop() -> None:
        runner._set_stop(reason)

    if at == "credential":
        monkeypatch.setattr(harness.context, "credential", credential)
    else:
        monkeypatch.setattr(FileContent, "read", read)
    await asyncio.wait_for(runner.run(), 60.0)
    found = harness.record(batch.id)
    assert (found.status, harness.sent) == (reason, [])
    assert found.counts.failed == (2 if reason == "expired" else 0)


async def test_batch_without_space_fails_also_after_a_restart(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edge dies after the files, and before the end of the batch, are committed. A frozen edge
    saves an earlier state then.
    """
    batch = harness.create(3)
    earlier = replace(harness.record(batch.id), status="in_progress")
    wide = Executed(200, json.dumps({"data": "x" * 2000}).encode())

    async def act(text: str) -> Executed:
        return wide if text == "text 1" else ANSWER

    harness.act = act
    settings = harness.context.settings
    harness.context.settings = BatchSettings(
        url=settings.url, file_bytes=1024, tenant_bytes=harness.store.stored_bytes() + 1500
    )
    real, ends = TenantStore.end_batch, 0

    def end_batch(store: TenantStore, record: BatchRecord) -> bool:
        nonlocal ends
        ends += 1
        if ends == 1:
            raise StorageError("the edge dies")
        return real(store, record)

    monkeypatch.setattr(TenantStore, "end_batch", end_batch)
    with pytest.raises(StorageError):
        await harness.run(batch.id)
    harness.context.settings = settings
    harness.store.save_batch(earlier)
    found = await harness.run(batch.id)
    assert (found.status, found.errors[0].code) == ("failed", "storage_quota_exceeded")
    assert (ends, harness.sent) == (2, ["text 0", "text 1"])
    assert len(harness.results(batch.output_id)) == found.counts.completed == 1


async def test_each_request_of_an_expired_batch_has_a_line_without_space(harness: Harness) -> None:
    batch = harness.create(20, seconds=0)
    harness.context.settings = BatchSettings(
        url=harness.context.settings.url, file_bytes=1024, tenant_bytes=1024
    )
    found = await harness.run(batch.id)
    assert (found.status, found.counts.failed) == ("expired", 20)
    assert {one["error"]["code"] for one in harness.results(batch.errors_id)} == {"batch_expired"}


async def test_size_of_files_is_read_again_only_if_results_do_not_fit(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "QUOTA_SECONDS", 600.0)
    batch, reads = harness.create(20), 0
    size = harness.store.stored_bytes()
    real = TenantStore.stored_bytes

    def stored_bytes(store: TenantStore, without: str = "") -> int:
        nonlocal reads
        reads += 1
        return real(store, without)

    monkeypatch.setattr(TenantStore, "stored_bytes", stored_bytes)
    assert (await harness.run(batch.id)).status == "completed"
    assert reads == 1
    context, store = harness.context, harness.store
    context.settings = BatchSettings(
        url=context.settings.url, file_bytes=1024, tenant_bytes=size + 1000
    )
    await context.check_quota(store, 1000, without=batch.id)
    with pytest.raises(QuotaExceeded):
        await context.check_quota(store, 1001, without=batch.id)
    assert reads == 2
    file = store.file(batch.input_file_id, time.time())
    assert file is not None
    store.delete_file(file)
    await context.check_quota(store, size + 1000, without=batch.id)
    assert reads == 3
    monkeypatch.setattr(contexts, "QUOTA_SECONDS", 0.0)
    await context.check_quota(store, 1000, without=batch.id)
    assert reads == 4


async def test_leases_are_renewed_while_the_storage_is_slow(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "BATCH_RENEW_SECONDS", 0.01)
    batch, is_free = harness.create(1), threading.Event()
    renewed, started = asyncio.Event(), asyncio.Event()
    real = BatchLease.renew
    loop = asyncio.get_running_loop()

    def renew(lease: BatchLease) -> None:
        real(lease)
        if is_blocked:
            loop.call_soon_threadsafe(renewed.set)

    async def act(text: str) -> Executed:
        started.set()
        await renewed.wait()
        return ANSWER

    is_blocked, harness.act = False, act
    monkeypatch.setattr(BatchLease, "renew", renew)
    running = asyncio.create_task(harness.run(batch.id))
    try:
        await asyncio.wait_for(started.wait(), 60.0)
        blocked = [asyncio.create_task(harness.context.io(is_free.wait)) for _ in range(8)]
        is_blocked = True
        await asyncio.wait_for(renewed.wait(), 60.0)
    finally:
        is_free.set()
    await asyncio.gather(*blocked)
    assert (await running).status == "completed"


async def test_preempted_batch_finishes_its_chunk(harness: Harness) -> None:
    batch = harness.create(3)
    runner = harness.runner(batch.id)

    async def act(text: str) -> Executed:
        runner.preempt()
        return ANSWER

    harness.act = act
    await asyncio.wait_for(runner.run(), 60.0)
    found = harness.record(batch.id)
    assert (found.status, found.counts.completed) == ("in_progress", 1)
    harness.act = None
    found = await harness.run(batch.id)
    assert (found.counts.total, found.counts.completed, found.counts.failed) == (3, 3, 0)
    assert harness.sent == ["text 0", "text 1", "text 2"]
    file = harness.store.file(found.output_id, time.time())
    assert file is not None
    assert file.bytes == found.output_bytes == found.stored_bytes > 0


async def test_preempted_batch_without_answers_stops_before_its_chunk_ends(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "PREEMPT_SECONDS", 0.05)
    batch = harness.create(1)
    runner = harness.runner(batch.id)

    async def act(text: str) -> Executed:
        runner.preempt()
        return Executed(429, b"{}", "RATE_LIMITED", "wait", 60.0)

    harness.act = act
    await asyncio.wait_for(runner.run(), 60.0)
    assert harness.record(batch.id).status == "in_progress"
    harness.act = None
    assert (await harness.run(batch.id)).status == "completed"


async def test_ended_batches_without_files_make_room_for_others(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = harness.create(1)
    monkeypatch.setattr(contexts, "MAX_RECORDS", 3)
    await harness.context.check_records(harness.store)
    found = await harness.run(batch.id)  # a file of results is the third record
    with pytest.raises(HttpError, match="delete files"):
        await harness.context.check_records(harness.store)
    file = harness.store.file(found.output_id, time.time())
    assert file is not None
    harness.store.delete_file(file)
    monkeypatch.setattr(contexts, "MAX_RECORDS", 2)
    await harness.context.check_records(harness.store)
    assert harness.store.batch(batch.id) is None
    assert harness.store.count() == 1


async def test_batch_that_no_edge_finds_is_found_again_or_deleted(harness: Harness) -> None:
    """Its edge was frozen while it created the batch, or since before another one ended it."""
    batch = harness.create(1)
    harness.store.deactivate(batch.id)
    harness.store.delete_expired(time.time(), 3600.0)
    assert harness.store.unfinished_ids() == [batch.id]
    assert (await harness.run(batch.id)).status == "completed"
    ended = make_id("batch_", 1, "5" * 32)
    stale = replace(batch, id=ended, status="in_progress", created_at=1, output_id="", errors_id="")
    harness.store.save_batch(stale)
    harness.store.delete_expired(time.time(), 3600.0)
    assert harness.store.batch_ids() == [batch.id]
    assert harness.store.unfinished_ids() == []


def test_results_are_in_memory_once_while_they_are_stored() -> None:
    size, count = 1 << 20, 8
    tracemalloc.start()
    try:
        results = lines_of_batches.Results()
        for number in range(count):
            results.add(number, b"x" * (size - 1) + b"\n", is_error=bool(number % 2))
        part = results.take_part()
        assert tracemalloc.get_traced_memory()[0] < 1.2 * count * size
        tracemalloc.reset_peak()
        counts = lines_of_batches.read_counts(part)
        assert tracemalloc.get_traced_memory()[1] < 1.2 * count * size
    finally:
        tracemalloc.stop()
    assert counts.output_bytes == counts.error_bytes == count * size // 2


async def test_request_in_flight_is_in_memory_without_its_line(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 8 << 20
    batch, held = harness.create(1, text="x" * size), list[int]()
    runner = harness.runner(batch.id)
    runner._max_line_bytes = 2 * size

    async def execute(path: str, body: bytes, *args: Any) -> Executed:
        assert len(body) > size
        for _ in range(1000):  # the thread that prepared the line can hold it a moment longer
            await asyncio.sleep(0.05)
            held.append(tracemalloc.get_traced_memory()[0])
            if held[-1] < 2.2 * size:
                break
        return ANSWER

    monkeypatch.setattr(runner, "_execute", execute)
    tracemalloc.start()
    try:
        await asyncio.wait_for(runner.run(), 120.0)
    finally:
        tracemalloc.stop()
    # The body, and the piece of the input that the next chunk may need.
    assert 1.9 * size < held[-1] < 2.2 * size
    assert harness.record(batch.id).counts.completed == 1


def test_credentials_of_all_tenants_have_limited_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(tenant: str, size: int) -> Metadata:
        return (("authorization", tenant.ljust(size)),)

    monkeypatch.setattr(contexts, "MAX_CREDENTIALS_BYTES", 10_000)
    kept = contexts.Credentials()
    for tenant in ("red", "blue"):
        kept.keep(tenant, sent(tenant, 2000))
    kept.keep("red", sent("new", 2000))  # replaces the one before, and is the newest
    assert kept.newest("blue") is not None
    kept.keep("green", sent("green", 5000))
    assert [kept.newest(one) is None for one in ("red", "blue", "green")] == [False, True, False]
    kept.keep("gold", sent("gold", 20_000))
    assert not any(kept.newest(one) for one in ("red", "blue", "green", "gold"))
    assert kept._bytes == 0
