"""Loads, unloads, and the memory budget."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fsspec.implementations.local import LocalFileSystem
from safetensors.numpy import save_file
from shoal.v1 import models_pb2

from libs.errors import ModelBroken, ModelNotFound
from libs.eviction import lru
from libs.store import ModelStore, Remote, RemoteFile
from libs.store.cache import Cache
from libs.store.download import Transfer
from libs.store.objects import ObjectStore
from services.worker.memory.residency import MAX_DOWNLOADS
from tests.worker.fakes import HANG_SECONDS, checkpoint, until
from tests.worker.residing import Checkpoints, ManualClock, held, line, loaded, residency, state


async def test_model_is_loaded_while_others_serve(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a", "org/b")
    async with residency(store) as r:
        await loaded(r, "org/a")
        store.gate.clear()
        r.load("org/b")
        r.load("org/b")
        await until(lambda: "org/b" in store.loads)
        assert state(r, "org/b") == models_pb2.MODEL_STATE_LOADING
        assert r.lanes() == ["org/a"]
        store.gate.set()
        await until(lambda: r.serving("org/b") is not None)
        assert store.loads == ["org/a", "org/b"]
        assert line(r, "org/b").card.data_type == "float32"
        assert r.used_bytes == 200


async def test_unknown_model_is_reported_as_not_found(tmp_path: Path) -> None:
    async with residency(Checkpoints(tmp_path)) as r:
        for model in ("org/unknown", "../../etc"):
            r.load(model)
            await until(lambda model=model: state(r, model) == models_pb2.MODEL_STATE_FAILED)  # type: ignore[misc]
            assert line(r, model).failure.reason == "MODEL_NOT_FOUND"


async def test_broken_model_reports_why_and_can_be_retried(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a", "org/b")
    store.errors = {"org/a": ModelBroken("config.json: no family"), "org/b": ValueError("odd")}
    async with residency(store) as r:
        for model, why in (("org/a", "config.json: no family"), ("org/b", "odd")):
            r.load(model)
            await until(lambda model=model: state(r, model) == models_pb2.MODEL_STATE_FAILED)  # type: ignore[misc]
            assert line(r, model).failure.reason == "MODEL_LOAD_FAILED"
            assert why in line(r, model).failure.message
        assert r.used_bytes == 0
        store.errors.clear()
        await loaded(r, "org/a")


async def test_model_that_can_never_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")
    store.add("org/huge", size=1000)
    async with residency(store) as r:
        await loaded(r, "org/a")
        r.load("org/huge")
        await until(lambda: state(r, "org/huge") == models_pb2.MODEL_STATE_FAILED)
        assert "1,000" in line(r, "org/huge").failure.message
        assert "250" in line(r, "org/huge").failure.message
        assert store.loads == ["org/a"]
        assert r.serving("org/a") is not None


async def test_least_recently_used_model_is_evicted(tmp_path: Path) -> None:
    async with residency(Checkpoints(tmp_path, "org/a", "org/b", "org/c"), policy=lru) as r:
        await loaded(r, "org/a", "org/b")
        r.release(held(r, "org/a"))
        await loaded(r, "org/c")
        assert r.lanes() == ["org/a", "org/c"]
        assert r.used_bytes == 200


async def test_no_further_eviction_while_memory_is_being_freed(
    tmp_path: Path,
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def trim() -> None:
        begun.set()
        may_end.wait(HANG_SECONDS)

    async with residency(
        Checkpoints(tmp_path, "org/a", "org/b", "org/c"), trim=trim, policy=lru
    ) as r:
        await loaded(r, "org/a", "org/b")
        r.load("org/c")
        await until(begun.is_set)
        for _ in range(20):
            r.set_backlog({})  # makes the load recheck
            await asyncio.sleep(0)
        assert r.lanes() == ["org/b"]
        may_end.set()
        await until(lambda: r.serving("org/c") is not None)
        assert r.lanes() == ["org/b", "org/c"]


async def test_pinned_model_stays(tmp_path: Path) -> None:
    async with residency(Checkpoints(tmp_path, "org/a", "org/b", "org/c", "org/d")) as r:
        await loaded(r, "org/a", "org/b")
        r.pin("org/a", True)
        await loaded(r, "org/c")
        assert r.lanes() == ["org/a", "org/c"]
        assert line(r, "org/a").pinned
        r.pin("org/c", True)
        r.load("org/d")
        await until(lambda: state(r, "org/d") == models_pb2.MODEL_STATE_FAILED)
        assert "200 are pinned" in line(r, "org/d").failure.message
        r.pin("org/a", False)
        await loaded(r, "org/d")


async def test_evicted_model_leaves_after_its_last_job(tmp_path: Path) -> None:
    async with residency(Checkpoints(tmp_path, "org/a")) as r:
        await loaded(r, "org/a")
        resident = held(r, "org/a")
        r.evict("org/a")
        assert r.lanes() == []
        assert r.serving("org/a") is None
        await asyncio.sleep(0)
        assert state(r, "org/a") == models_pb2.MODEL_STATE_RESIDENT
        r.load("org/a")
        r.release(resident)
        await until(lambda: r.serving("org/a") not in (None, resident))
        assert r.used_bytes == 100


async def test_loads_that_need_each_others_memory_all_end(tmp_path: Path) -> None:
    names = [f"org/m{number}" for number in range(8)]
    store = Checkpoints(tmp_path, *names)
    async with residency(store) as r:
        for name in names:
            r.load(name)
        await until(lambda: sorted(store.loads) == names and r.can_load(), "every load to end")
        await until(lambda: all(one.state != models_pb2.MODEL_STATE_LOADING for one in r.report()))
        assert all(one.state != models_pb2.MODEL_STATE_FAILED for one in r.report())
        assert r.used_bytes <= 250


async def test_models_are_offered_only_if_memory_is_available(tmp_path: Path) -> None:
    async with residency(
        Checkpoints(tmp_path, "org/a", "org/b"), memory_bytes=200, clock=ManualClock()
    ) as r:
        assert r.can_load()
        await loaded(r, "org/a", "org/b")
        assert r.can_load(), "an idle model may go"
        residents = [held(r, "org/a"), held(r, "org/b")]
        assert not r.can_load(), "both are young and in use"
        for resident in residents:
            r.release(resident)


async def test_lanes_are_ordered_by_service(tmp_path: Path) -> None:
    async with residency(Checkpoints(tmp_path, "org/a", "org/b")) as r:
        await loaded(r, "org/a", "org/b")
        r.release(held(r, "org/a"))
        assert r.lanes() == ["org/b", "org/a"]
        r.release(held(r, "org/b"))
        assert r.lanes() == ["org/a", "org/b"]


async def test_load_in_progress_does_not_delay_shutdown(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")
    store.gate.clear()
    async with residency(store) as r:
        r.load("org/a")
        await until(lambda: store.loads == ["org/a"])
        r.stop()
        r.load("org/a")
    assert store.loads == ["org/a"]


class FakeSource:
    """A store of checkpoints. Reads of weights wait for `gate`."""

    def __init__(self, root: Path, *names: str) -> None:
        self.gate = threading.Event()
        for name in names:
            save_file({"w": np.zeros(25, np.float32)}, checkpoint(root, name) / "model.safetensors")
        self._source = ObjectStore("file://", LocalFileSystem(), str(root))

    def find(self, model: str) -> Remote:
        return _Slow(self._source.find(model), self.gate)


@dataclass(frozen=True)
class _Slow:
    """`remote` with blocked reads."""

    remote: Remote
    gate: threading.Event

    @property
    def origin(self) -> str:
        return self.remote.origin

    @property
    def revision(self) -> str:
        return self.remote.revision

    @property
    def files(self) -> Sequence[RemoteFile]:
        return self.remote.files

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        if file.path.endswith(".safetensors"):
            assert self.gate.wait(HANG_SECONDS)
        return self.remote.read(file, start, end)

    def on_disk(self, files: Sequence[RemoteFile]) -> Path | None:
        return None


def make_store(root: Path, source: FakeSource, budget_bytes: int = 1 << 30) -> ModelStore:
    return ModelStore([source], Cache(root), budget_bytes, Transfer(retry_seconds=()))


async def test_model_of_a_store_is_fetched_and_loaded(tmp_path: Path) -> None:
    source = FakeSource(tmp_path / "remote", "org/far")
    store = make_store(tmp_path / "store", source)
    async with residency(Checkpoints(tmp_path / "folder", "org/near"), remote=store) as r:
        r.load("org/far")
        await until(
            lambda: (
                state(r, "org/far") == models_pb2.MODEL_STATE_DOWNLOADING
                and line(r, "org/far").downloaded_bytes > 0
            )
        )
        assert 0 < line(r, "org/far").downloaded_bytes < line(r, "org/far").download_bytes
        assert r.can_load()
        await loaded(r, "org/near")
        source.gate.set()
        await until(lambda: r.serving("org/far") is not None)
        assert line(r, "org/far").download_bytes == 0


async def test_resident_model_stays_on_disk(tmp_path: Path) -> None:
    source = FakeSource(tmp_path / "remote", "org/a", "org/b")
    source.gate.set()
    store = make_store(tmp_path / "store", source, budget_bytes=300)
    async with residency(Checkpoints(tmp_path / "folder"), remote=store) as r:
        await loaded(r, "org/a")
        r.load("org/b")
        await until(lambda: state(r, "org/b") == models_pb2.MODEL_STATE_FAILED)
        assert line(r, "org/b").failure.reason == "NO_CAPACITY"
        assert "SHOAL_STORE_BYTES" in line(r, "org/b").failure.message
        r.evict("org/a")
        await until(lambda: state(r, "org/a") == models_pb2.MODEL_STATE_ABSENT)
        await loaded(r, "org/b")


async def test_model_that_failed_to_load_may_be_deleted_from_disk(tmp_path: Path) -> None:
    source = FakeSource(tmp_path / "remote", "org/a")
    source.gate.set()
    checkpoints = Checkpoints(tmp_path / "folder")
    checkpoints.errors = {"org/a": ModelBroken("no family")}
    store = make_store(tmp_path / "store", source)
    async with residency(checkpoints, remote=store) as r:
        r.load("org/a")
        await until(lambda: state(r, "org/a") == models_pb2.MODEL_STATE_FAILED)
        assert line(r, "org/a").failure.message == "no family"
        lock = Cache(tmp_path / "store").lock("org/a")
        assert lock.try_exclusive()
        lock.close()


async def test_model_in_no_store_is_not_found(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", FakeSource(tmp_path / "remote"))
    async with residency(Checkpoints(tmp_path / "folder"), remote=store) as r:
        for model in ("org/unknown", "../../etc"):
            r.load(model)
            await until(lambda model=model: state(r, model) == models_pb2.MODEL_STATE_FAILED)  # type: ignore[misc]
            assert line(r, model).failure.reason == ModelNotFound.reason


async def test_concurrent_downloads_are_limited(tmp_path: Path) -> None:
    names = [f"org/m{number}" for number in range(MAX_DOWNLOADS)]
    source = FakeSource(tmp_path / "remote", *names)
    async with residency(
        Checkpoints(tmp_path / "folder"), 1000, make_store(tmp_path / "store", source)
    ) as r:
        for name in names:
            assert r.can_load()
            r.load(name)
            await until(lambda name=name: state(r, name) == models_pb2.MODEL_STATE_DOWNLOADING)  # type: ignore[misc]
        assert not r.can_load()
        source.gate.set()
        await until(lambda: all(r.serving(name) is not None for name in names))
        assert r.can_load()


async def test_fetched_model_is_on_disk_after_a_restart(tmp_path: Path) -> None:
    source = FakeSource(tmp_path / "remote", "org/a")
    source.gate.set()
    store = make_store(tmp_path / "store", source)
    store.get("org/a", lambda progress: None).close()
    async with residency(Checkpoints(tmp_path / "folder"), remote=store) as r:
        await r.list_disk()
        assert state(r, "org/a") == models_pb2.MODEL_STATE_COLD
