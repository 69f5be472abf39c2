"""Adapters of a resident model: loading, eviction, pulling, and failed loads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shoal.v1 import worker_pb2

from libs.errors import InvalidInput, ModelBroken, ModelNotFound, NoCapacity
from libs.store import Copy
from libs.store.digests import FileDigests, FilesDigest, list_files
from services.worker import app
from services.worker.heartbeat import Heartbeat
from services.worker.machine.disk import find, find_adapter, listing
from services.worker.machine.tasks import Tasks
from services.worker.memory.adapters import AdapterLoader
from services.worker.memory.resident import UNUSED_SECONDS, Resident
from services.worker.settings import Shelf
from tests.worker.fakes import (
    HANG_SECONDS,
    FakeLanes,
    FakeModel,
    checkpoint,
    encode_job,
    routers,
    until,
    vector,
    vectors,
)
from tests.worker.residing import ManualClock
from tests.worker.running import MODEL, worker


def digest(directory: Path) -> FilesDigest:
    return FileDigests().hash_files([list_files(directory, is_adapter=True)])


def adapter_directory(root: Path, name: str) -> Path:
    directory = root / name
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")
    return directory


class Bench:
    """A resident FakeModel and its loader, with `limit` adapter slots and `free` bytes. `clock` is
    manual.
    """

    def __init__(self, root: Path, tasks: asyncio.TaskGroup, limit: int, free: int) -> None:
        self.clock = ManualClock()
        self.model = FakeModel()
        self.resident = Resident("org/fake", self.model, 1.0, self.clock.now, self.clock.now)
        self.cache = self.resident.adapters
        self.free = free
        self.changes = 0
        self._root = root
        self.tasks = Tasks(tasks)
        self.loader = AdapterLoader(
            self._find,
            digest,
            self._claim,
            self.tasks,
            clock=self.clock,
            changed=self._changed,
            limit=limit,
        )

    def _find(self, name: str) -> Copy:
        return Copy(find_adapter((Shelf(self._root),), name))

    def _claim(self, name: str, size: int):  # type: ignore[no-untyped-def]
        if size > self.free:
            return None
        self.free -= size

        def release() -> None:
            self.free += size

        return release

    def _changed(self) -> None:
        self.changes += 1

    async def load(self, *names: str) -> None:
        for name in names:
            self.loader.load(self.resident, name)
            await until(lambda: not self.cache.loading, f"{name} to load")

    def serve(self, name: str) -> None:
        """Pull and answer one job, a second later."""
        self.clock.now += 1
        self.cache.hold(name, 1, self.clock.now)
        self.cache.release(name)


@asynccontextmanager
async def bench(root: Path, *names: str, limit: int = 2, free: int = 1000) -> AsyncIterator[Bench]:
    for name in names:
        adapter_directory(root, name)
    async with asyncio.TaskGroup() as tasks:
        made = Bench(root, tasks, limit, free)
        yield made
        made.tasks.cancel()


async def test_least_recently_used_idle_adapter_is_evicted(tmp_path: Path) -> None:
    async with bench(tmp_path, "org/a", "org/b", "org/c") as b:
        await b.load("org/a", "org/b")
        b.serve("org/b")
        b.serve("org/a")
        await b.load("org/c")
        assert b.cache.names() == ["org/a", "org/c"]
        assert sorted(b.model.adapters) == ["org/a", "org/c"]
        assert b.cache.bytes == 20
        assert b.free == 980


async def test_busy_adapter_takes_no_new_work_and_is_evicted_when_done(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, "org/a", "org/b", limit=1) as b:
        await b.load("org/a")
        b.cache.hold("org/a", 2, b.clock.now)
        b.loader.load(b.resident, "org/b")
        await until(lambda: not b.cache.serves("org/a"), "a to leave")
        assert "org/a" in b.model.adapters
        assert b.cache.lanes() == [""]
        b.cache.release("org/a")
        assert "org/a" in b.model.adapters
        b.cache.release("org/a")
        await until(lambda: b.cache.names() == ["org/b"], "b to take its place")
        assert list(b.model.adapters) == ["org/b"]


async def test_new_adapter_is_kept_until_its_first_job(tmp_path: Path) -> None:
    async with bench(tmp_path, "org/a", "org/b", limit=1) as b:
        await b.load("org/a")
        b.loader.load(b.resident, "org/b")
        await asyncio.sleep(0)
        await until(lambda: "org/b" in b.cache.loading)
        assert b.cache.victim(b.clock.now) is None
        b.clock.now += UNUSED_SECONDS
        b.cache.changed.set()
        await until(lambda: b.cache.names() == ["org/b"], "b to take its place")


async def test_concurrent_loads_never_exceed_the_limit(tmp_path: Path) -> None:
    names = [f"org/{number}" for number in range(6)]
    async with bench(tmp_path, *names) as b:
        seen: list[int] = []
        for name in names:
            b.loader.load(b.resident, name)
        while b.cache.loading:
            seen.append(len(b.model.adapters))
            for name in b.cache.names():
                b.serve(name)
            await asyncio.sleep(0.001)
        assert max(seen) <= 2
        assert len(b.cache.names()) == 2
        assert not b.cache.failed


async def test_failures_are_reported_for_a_minute_and_can_be_retried(tmp_path: Path) -> None:
    async with bench(tmp_path, "org/broken") as b:
        (tmp_path / "org/broken/broken").touch()
        await b.load("org/broken", "org/unknown", "../../etc")
        failures = b.cache.failures(b.clock.now)
        assert isinstance(failures["org/broken"], ModelBroken)
        assert "tensor 'w'" in failures["org/broken"].message
        for name in ("org/unknown", "../../etc"):
            assert isinstance(failures[name], ModelNotFound)
            assert failures[name].field == "adapter"
        (tmp_path / "org/broken/broken").unlink()
        await b.load("org/broken")
        assert b.cache.names() == ["org/broken"]
        assert "org/broken" not in b.cache.failures(b.clock.now)
        b.clock.now += 61
        assert b.cache.failures(b.clock.now) == {}


async def test_adapter_without_memory_is_refused_temporarily(tmp_path: Path) -> None:
    async with bench(tmp_path, "org/a", "org/b", free=15) as b:
        await b.load("org/a", "org/b")
        assert b.cache.names() == ["org/a"]
        assert list(b.model.adapters) == ["org/a"]
        assert isinstance(b.cache.failures(b.clock.now)["org/b"], NoCapacity)
        b.cache.clear()
        assert b.free == 15


async def test_adapter_loaded_after_its_model_was_evicted_is_dropped(tmp_path: Path) -> None:
    async with bench(tmp_path, "org/a") as b:
        b.resident.leaving = True
        await b.load("org/a")
        assert b.model.adapters == {}
        assert b.cache.names() == []


async def test_lanes_are_ordered_by_last_use(tmp_path: Path) -> None:
    async with bench(tmp_path, "org/a", "org/b") as b:
        await b.load("org/a", "org/b")
        served = []
        for _ in range(6):
            served.append(b.cache.lanes()[0])
            b.serve(served[-1])
        assert set(served[:3]) == {"", "org/a", "org/b"}
        assert served[:3] == served[3:]


def test_adapters_are_found_like_models_but_are_not_models(tmp_path: Path) -> None:
    adapter_directory(tmp_path, "org/adapter")
    with_config = adapter_directory(tmp_path, "org/with-config")
    (with_config / "config.json").write_text("{}")
    checkpoint(tmp_path, "org/model")
    merged = checkpoint(tmp_path, "org/merged")
    (merged / "adapter_config.json").write_text("{}")
    (merged / "model.safetensors").touch()
    shelves = (Shelf(tmp_path),)
    assert sorted(listing(shelves)) == ["org/merged", "org/model"]
    assert find_adapter(shelves, "org/adapter") == tmp_path / "org/adapter"
    assert find_adapter((Shelf(with_config, "own/name"),), "own/name") == with_config
    assert find(shelves, "org/merged") == merged


async def test_worker_serves_several_adapters_and_the_plain_model(tmp_path: Path) -> None:
    lanes = FakeLanes()
    names = ("org/one", "org/three", "")
    for name in filter(None, names):
        adapter_directory(tmp_path, name)
    async with routers(lanes) as running, worker(tmp_path, running) as bay:
        for number, name in enumerate(names * 4):
            lanes.put(MODEL, encode_job(f"j{number}", f"text {number}"), adapter=name)
        await until(lambda: len(lanes.answers) == 12, "the answers")
        for number, name in enumerate(names * 4):
            tokens, total = vector(f"text {number}")
            assert vectors(lanes.answer_of(f"j{number}")) == [[tokens, total + len(name)]]
        assert sorted(bay.model.adapters) == ["org/one", "org/three"]
        await until(
            lambda: list(lanes.heartbeats[-1].models[0].adapters) == ["org/one", "org/three"],
            "the report",
        )
        # It follows once the pulls for some of the lanes have ended.
        every = {(MODEL, name) for name in names}
        await until(
            lambda: {(lane.model, lane.adapter) for lane in lanes.pulls[-1].lanes} == every,
            "a pull for all lanes",
        )
        assert sorted(lanes.handed_back) == []


async def test_worker_serves_more_adapters_than_it_can_keep(tmp_path: Path) -> None:
    lanes = FakeLanes()
    names = [f"org/{number}" for number in range(5)]
    for name in names:
        adapter_directory(tmp_path, name)

    def is_done() -> bool:
        lanes.claimed.difference_update(
            {lane for lane in lanes.claimed if "+" in lane}
        )  # simulates exhausted claims
        lanes.rung.set()
        return len(lanes.answers) == 10

    async with routers(lanes) as running, worker(tmp_path, running, adapters=2) as bay:
        for number, name in enumerate(names * 2):
            lanes.put(MODEL, encode_job(f"j{number}", "text"), adapter=name)
        await until(is_done, "the answers")
        assert len(bay.model.adapters) <= 2


async def test_batch_for_an_evicted_adapter_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pull was sent while the adapter was still loaded."""
    lanes = FakeLanes()
    adapter_directory(tmp_path, "org/a")
    async with routers(lanes) as running, worker(tmp_path, running):
        lanes.put(MODEL, encode_job("first", "text"))
        await until(lambda: len(lanes.answers) == 1)
        lease = lanes.lease

        def late(request: worker_pb2.PullRequest) -> worker_pb2.PullResponse | None:
            request.lanes.add(pool="cpu", model=MODEL, adapter="org/a")
            return lease(request)

        monkeypatch.setattr(lanes, "lease", late)
        lanes.put(MODEL, encode_job("second", "text"), adapter="org/a")
        await until(lambda: lanes.handed_back == ["second"], "the batch to be handed back")


async def test_broken_adapter_is_reported_and_its_model_keeps_serving(tmp_path: Path) -> None:
    lanes = FakeLanes()
    (adapter_directory(tmp_path, "org/broken") / "broken").touch()
    async with routers(lanes) as running, worker(tmp_path, running):
        lanes.put(MODEL, encode_job("adapted", "text"), adapter="org/broken")
        await until(
            lambda: any(
                model.failed_adapters for beat in lanes.heartbeats[-1:] for model in beat.models
            ),
            "the report",
        )
        failure = lanes.heartbeats[-1].models[0].failed_adapters["org/broken"]
        assert failure.reason == "MODEL_LOAD_FAILED"
        assert "tensor 'w'" in failure.message
        lanes.put(MODEL, encode_job("plain", "text"))
        await until(lambda: len(lanes.answers) == 1)
        assert vectors(lanes.answer_of("plain")) == [vector("text")]


async def test_pull_reply_can_request_a_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other heartbeat is due before the test would have failed."""

    def rare(*arguments: Any, **options: Any) -> Heartbeat:
        return Heartbeat(*arguments, **options | {"interval_seconds": 10 * HANG_SECONDS})

    monkeypatch.setattr(app, "Heartbeat", rare)
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running):
        await until(lambda: bool(lanes.pulls))
        await until(lambda: bool(lanes.heartbeats), "the first heartbeat")
        before = len(lanes.heartbeats)
        lanes.must_beat = True
        lanes.rung.set()
        await until(lambda: len(lanes.heartbeats) > before, "a heartbeat")


async def test_built_in_adapters_need_no_files_memory_or_slots(tmp_path: Path) -> None:
    async with bench(tmp_path, "org/a", "org/b", limit=1, free=10) as b:
        b.model.card = replace(b.model.card, own_adapters=("retrieval.query", "text-matching"))
        await b.load("org/a", "retrieval.query", "text-matching")
        assert b.cache.names() == ["org/a", "retrieval.query", "text-matching"]
        assert (b.cache.bytes, b.free) == (10, 0)
        b.serve("org/a")
        await b.load("org/b")
        assert b.cache.names() == ["org/b", "retrieval.query", "text-matching"]


async def test_unknown_task_error_lists_the_tasks(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        b.model.card = replace(b.model.card, own_adapters=("retrieval.query", "text-matching"))
        await b.load("summary")
        error = b.cache.failures(b.clock.now)["summary"]
        assert isinstance(error, InvalidInput)
        assert error.field == "adapter"
        assert "'summary'" in error.message
        assert "retrieval.query, text-matching" in error.message


async def test_error_for_a_model_without_tasks_says_so(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.load("text-matching")
        assert "it has none" in b.cache.failures(b.clock.now)["text-matching"].message
