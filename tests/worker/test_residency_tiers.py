"""Warm models: moves from the device to host memory and back, and evictions from host memory."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path

import pytest
from shoal.v1 import models_pb2

from libs.eviction import lru
from tests.worker.fakes import FakeModel, until
from tests.worker.residing import (
    Checkpoints,
    ManualClock,
    held,
    line,
    loaded,
    residency,
    state,
    unloaded,
)
from tests.worker.test_residency import FakeSource, make_store

WARM, COLD, RESIDENT = (
    models_pb2.MODEL_STATE_WARM,
    models_pb2.MODEL_STATE_COLD,
    models_pb2.MODEL_STATE_RESIDENT,
)


async def test_evicted_model_is_warm_and_resumes_without_a_load(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")
    async with residency(store, host_bytes=100) as r:
        await loaded(r, "org/a")
        before = r.serving("org/a")
        assert before is not None
        await unloaded(r, "org/a")
        warm = line(r, "org/a")
        assert (warm.state, warm.host_bytes, warm.bytes) == (WARM, 100, 100)
        assert (r.used_bytes, r.host_used_bytes) == (0, 100)
        await loaded(r, "org/a")
        again = r.serving("org/a")
        assert again is not None
        assert again is not before
        assert again.model is before.model
        assert again.meter is before.meter, "what was measured stays known"
        assert store.loads == ["org/a"]
        assert (r.used_bytes, r.host_used_bytes) == (100, 0)


async def test_model_that_does_not_fit_host_memory_is_dropped(tmp_path: Path) -> None:
    async with residency(Checkpoints(tmp_path, "org/a"), host_bytes=99) as r:
        await loaded(r, "org/a")
        model = weakref.ref(r._space.models["org/a"].resident.model)
        await unloaded(r, "org/a")
        await until(lambda: r.used_bytes == 0)
        gc.collect()
        assert model() is None
        assert r.host_used_bytes == 0


async def test_warm_model_of_least_value_is_dropped(tmp_path: Path) -> None:
    clock = ManualClock()
    async with residency(
        Checkpoints(tmp_path, "org/a", "org/b", "org/c"),
        300,
        clock=clock,
        host_bytes=200,
        policy=lru,
    ) as r:
        for model in ("org/a", "org/b", "org/c"):
            await loaded(r, model)
            clock.now += 1
        await unloaded(r, "org/b", "org/a")
        assert {model: state(r, model) for model in ("org/a", "org/b")} == {
            "org/a": WARM,
            "org/b": WARM,
        }
        await unloaded(r, "org/c")
        assert (state(r, "org/b"), state(r, "org/c")) == (WARM, WARM)
        assert state(r, "org/a") != WARM, "used longest ago"
        assert r.host_used_bytes == 200


async def test_evicted_model_of_least_value_is_not_kept_warm(tmp_path: Path) -> None:
    clock = ManualClock()
    async with residency(
        Checkpoints(tmp_path, "org/a", "org/b"), clock=clock, host_bytes=100, policy=lru
    ) as r:
        await loaded(r, "org/a")
        clock.now += 1
        await loaded(r, "org/b")
        await unloaded(r, "org/b")
        await unloaded(r, "org/a")
        assert state(r, "org/b") == WARM
        assert state(r, "org/a") != WARM


async def test_two_models_swap_with_host_memory_for_one(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a", "org/b")
    async with residency(store, 100, host_bytes=100) as r:
        await loaded(r, "org/a", "org/b", "org/a", "org/b")
        assert store.loads == ["org/a", "org/b"]
        assert (state(r, "org/a"), state(r, "org/b")) == (WARM, RESIDENT)
        assert (r.used_bytes, r.host_used_bytes) == (100, 100)


async def test_order_drops_a_warm_model(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")
    async with residency(store, host_bytes=100) as r:
        await loaded(r, "org/a")
        await unloaded(r, "org/a")
        r.evict("org/a")
        assert state(r, "org/a") != WARM
        assert r.host_used_bytes == 0
        await loaded(r, "org/a")
        assert store.loads == ["org/a", "org/a"]


async def test_warm_model_stays_on_disk(tmp_path: Path) -> None:
    source = FakeSource(tmp_path / "remote", "org/a", "org/b")
    source.gate.set()
    remote = make_store(tmp_path / "store", source, budget_bytes=300)
    async with residency(Checkpoints(tmp_path / "folder"), remote=remote, host_bytes=100) as r:
        await loaded(r, "org/a")
        await unloaded(r, "org/a")
        r.load("org/b")
        await until(lambda: line(r, "org/b").failure.reason == "NO_CAPACITY")
        r.evict("org/a")
        await loaded(r, "org/b")


async def test_model_that_cannot_be_parked_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: FakeModel) -> None:
        raise RuntimeError("no pinned memory")

    store = Checkpoints(tmp_path, "org/a")
    async with residency(store, host_bytes=100) as r:
        await loaded(r, "org/a")
        with monkeypatch.context() as patched:
            patched.setattr(FakeModel, "park", broken)
            await unloaded(r, "org/a")
            await until(lambda: r.used_bytes == 0)
        assert r.host_used_bytes == 0
        await loaded(r, "org/a")
        assert store.loads == ["org/a", "org/a"]


# On an accelerator a resident model keeps a copy in host memory if it fits.


async def test_copy_in_host_memory_counts_while_the_model_is_resident(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")
    store.has_copies = True
    async with residency(store, host_bytes=100, shares_memory=False) as r:
        await loaded(r, "org/a")
        assert (r.used_bytes, r.host_used_bytes, line(r, "org/a").host_bytes) == (100, 100, 100)
        await unloaded(r, "org/a")
        assert (r.used_bytes, r.host_used_bytes, state(r, "org/a")) == (0, 100, WARM)
        await loaded(r, "org/a")
        assert (r.used_bytes, r.host_used_bytes) == (100, 100)
        assert store.loads == ["org/a"]
        await unloaded(r, "org/a")
        r.evict("org/a")
        assert r.host_used_bytes == 0


async def test_host_copies_are_kept_only_while_they_fit(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a", "org/b")
    store.has_copies = True
    async with residency(store, host_bytes=150, shares_memory=False) as r:
        await loaded(r, "org/a", "org/b")
        assert (line(r, "org/a").host_bytes, line(r, "org/b").host_bytes, r.host_used_bytes) == (
            100,
            0,
            100,
        )
        b = r.serving("org/b")
        assert b is not None
        assert b.model.host_bytes == 0
        await unloaded(r, "org/b")
        assert state(r, "org/b") != WARM, "its place is taken by a resident model's copy"
        await unloaded(r, "org/a")
        await loaded(r, "org/b")
        assert state(r, "org/a") in (WARM, COLD, models_pb2.MODEL_STATE_ABSENT)
        assert r.host_used_bytes <= 150


# Relief for a device that is out of memory


async def test_relief_evicts_an_idle_unpinned_model(tmp_path: Path) -> None:
    clock = ManualClock()
    async with residency(
        Checkpoints(tmp_path, "org/a", "org/b", "org/c", "org/d"), 400, clock=clock
    ) as r:
        for model in ("org/a", "org/b", "org/c", "org/d"):
            await loaded(r, model)
            clock.now += 1
        r.pin("org/a", True)
        busy = held(r, "org/b")
        assert await r.relieve("org/c")
        assert r.lanes() == ["org/a", "org/c", "org/b"]
        assert r.used_bytes == 300
        assert not await r.relieve("org/c")
        r.release(busy)
        assert await r.relieve("org/c")
        assert r.lanes() == ["org/a", "org/c"]


async def test_relief_drops_warm_models_first_in_shared_memory(
    tmp_path: Path,
) -> None:
    async with residency(
        Checkpoints(tmp_path, "org/a", "org/b", "org/c"), 300, host_bytes=100
    ) as r:
        await loaded(r, "org/a", "org/b", "org/c")
        await unloaded(r, "org/a")
        assert await r.relieve("org/c")
        assert (r.used_bytes, r.host_used_bytes) == (200, 0)
        assert await r.relieve("org/c")
        assert (r.used_bytes, r.host_used_bytes) == (100, 0), (
            "making it warm would have freed nothing"
        )


async def test_relief_parks_on_an_accelerator(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a", "org/b")
    store.has_copies = True
    async with residency(store, host_bytes=200, shares_memory=False) as r:
        await loaded(r, "org/a", "org/b")
        assert await r.relieve("org/b")
        assert state(r, "org/a") == WARM
        assert r.used_bytes == 100


async def test_failed_resume_releases_all_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: object) -> None:
        raise RuntimeError("the copy failed")

    store = Checkpoints(tmp_path, "org/a")
    async with residency(store, host_bytes=100) as r:
        await loaded(r, "org/a")
        await unloaded(r, "org/a")
        with monkeypatch.context() as patched:
            patched.setattr("tests.worker.fakes.FakeParked.resume", broken)
            r.load("org/a")
            await until(lambda: state(r, "org/a") == models_pb2.MODEL_STATE_FAILED)
        await asyncio.sleep(0)
        assert (r.used_bytes, r.host_used_bytes) == (0, 0)
        await loaded(r, "org/a")


async def test_model_leaves_after_its_last_batch_on_the_device(tmp_path: Path) -> None:
    """This also holds if its jobs were cancelled while their batch was on the device."""
    computing = {"org/a"}
    async with residency(Checkpoints(tmp_path, "org/a", "org/b"), host_bytes=100) as r:
        await loaded(r, "org/a")
        await loaded(r, "org/b")
        asked: list[str] = []

        def is_computing(model: str) -> bool:
            asked.append(model)
            return model in computing

        r.watch_device(is_computing)
        r.evict("org/a")
        await until(lambda: asked.count("org/a") > 2)
        assert line(r, "org/a").state == RESIDENT
        computing.clear()
        await until(lambda: line(r, "org/a").state == WARM)
