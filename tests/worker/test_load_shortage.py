"""A load or a resume that runs out of memory although its budget has room."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from shoal.v1 import models_pb2

from services.worker.memory.loading import RELIEFS_FOR_A_LOAD, UNMEASURED_ACTIVATION_BYTES_PER_TOKEN
from services.worker.memory.residency import LOAD_SECONDS, Residency
from tests.worker.fakes import FakeModel, FakeParked
from tests.worker.residing import (
    Checkpoints,
    ManualClock,
    failed,
    held,
    limit_loads,
    line,
    loaded,
    residency,
    state,
    unloaded,
)

WARM, RESIDENT = models_pb2.MODEL_STATE_WARM, models_pb2.MODEL_STATE_RESIDENT
NAMES = ("org/a", "org/b", "org/c", "org/d")


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.25 GiB.\n"
        "See the documentation for Memory Management"
    )


class FakeFullDevice(Checkpoints):
    """A device on which loads of a model run out of memory while `is_full(model)`."""

    def __init__(self, root: Path, *names: str) -> None:
        super().__init__(root, *names)
        self.is_full: Callable[[str], bool] = lambda model: False

    def load(self, directory: Path, name: str, base: Path | None = None, /) -> FakeModel:
        model = super().load(directory, name, base)
        if self.is_full(name):
            raise out_of_memory()
        return model


def resident(r: Residency) -> set[str]:
    return {one.name for one in r.residents()}


async def test_load_is_retried_after_freeing_caches(tmp_path: Path) -> None:
    store = FakeFullDevice(tmp_path, *NAMES)
    trims: list[int] = []
    async with residency(
        store, 400, trim=lambda: trims.append(len(store.loads)), shares_memory=False
    ) as r:
        await loaded(r, "org/a", "org/b")
        before = len(trims)
        store.is_full = lambda model: len(trims) == before
        await loaded(r, "org/c")
        assert store.loads == ["org/a", "org/b", "org/c", "org/c"]
        assert resident(r) == {"org/a", "org/b", "org/c"}, "no model had to leave"
        assert r.used_bytes == 300


async def test_load_is_retried_after_evicting_an_idle_model(tmp_path: Path) -> None:
    store = FakeFullDevice(tmp_path, *NAMES)
    store.has_copies = True
    clock = ManualClock()
    async with residency(store, 400, host_bytes=400, clock=clock, shares_memory=False) as r:
        for model in ("org/a", "org/b"):
            await loaded(r, model)
            clock.now += 1
        r.pin("org/a", True)
        store.is_full = lambda model: "org/b" in resident(r)
        await loaded(r, "org/c")
        assert resident(r) == {"org/a", "org/c"}
        assert state(r, "org/b") == WARM
        assert r.used_bytes == 200


async def test_failed_load_evicts_few_models_and_can_be_retried(
    tmp_path: Path,
) -> None:
    store = FakeFullDevice(tmp_path, *NAMES)
    async with residency(store, 400, shares_memory=False) as r:
        await loaded(r, "org/a", "org/b", "org/c")
        store.is_full = lambda model: True
        r.load("org/d")
        message = await failed(r, "org/d")
        assert message == (
            "org/d ran out of memory on its worker although its budget has room: "
            "CUDA out of memory. Tried to allocate 1.25 GiB."
        )
        assert line(r, "org/d").failure.reason == "NO_CAPACITY"
        assert len(resident(r)) == 3 - RELIEFS_FOR_A_LOAD
        assert r.used_bytes == 100 * len(resident(r))
        store.is_full = lambda model: False
        await loaded(r, "org/d")


async def test_load_without_idle_models_fails_after_freeing_caches(tmp_path: Path) -> None:
    store = FakeFullDevice(tmp_path, *NAMES)
    async with residency(store, 400, shares_memory=False) as r:
        await loaded(r, "org/a")
        r.pin("org/a", True)
        store.is_full = lambda model: True
        r.load("org/d")
        await failed(r, "org/d")
        assert store.loads == ["org/a", "org/d", "org/d"]
        assert resident(r) == {"org/a"}


async def test_failed_attempt_is_freed_before_the_retry(tmp_path: Path) -> None:
    read: list[weakref.ref[FakeModel]] = []
    alive: list[int] = []

    class FakeSmallDevice(Checkpoints):
        def load(self, directory: Path, name: str, base: Path | None = None, /) -> FakeModel:
            alive.append(sum(one() is not None for one in read))
            model = super().load(directory, name)
            read.append(weakref.ref(model))
            if len(read) < 3:
                try:
                    raise KeyError(model.bytes)
                except KeyError as error:
                    raise out_of_memory() from error
            return model

    gc.disable()
    try:
        async with residency(
            FakeSmallDevice(tmp_path, "org/a", "org/b"), 400, shares_memory=False
        ) as r:
            r._space.relieve = lambda keep: _true()  # type: ignore[method-assign]  # nothing is idle, and yet there is more room
            await loaded(r, "org/a")
    finally:
        gc.enable()
    assert alive == [0, 0, 0]


async def _true() -> bool:
    return True


async def test_failed_resume_keeps_the_host_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Checkpoints(tmp_path, "org/a", "org/b")
    store.has_copies = True
    attempts: list[str] = []

    def full(parked: FakeParked) -> FakeModel:
        attempts.append(parked.model.card.model)
        raise out_of_memory()

    async with residency(store, 400, host_bytes=400, shares_memory=False) as r:
        await loaded(r, "org/a")
        await unloaded(r, "org/a")
        with monkeypatch.context() as patched:
            patched.setattr(FakeParked, "resume", full)
            r.load("org/a")
            await failed(r, "org/a")
        assert len(attempts) == 2
        found = line(r, "org/a")
        assert (found.failure.reason, found.host_bytes) == ("NO_CAPACITY", 100)
        assert (r.used_bytes, r.host_used_bytes) == (0, 100)
        await loaded(r, "org/a")
        assert store.loads == ["org/a"], "it was not read from disk again"
        assert (r.used_bytes, r.host_used_bytes) == (100, 100)


async def test_resume_is_retried_after_evicting_an_idle_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Checkpoints(tmp_path, "org/a", "org/b")
    store.has_copies = True
    async with residency(store, 400, host_bytes=400, shares_memory=False) as r:
        await loaded(r, "org/a", "org/b")
        await unloaded(r, "org/a")

        def resume(parked: FakeParked) -> FakeModel:
            if "org/b" in resident(r):
                raise out_of_memory()
            return parked.model

        monkeypatch.setattr(FakeParked, "resume", resume)
        await loaded(r, "org/a")
        assert store.loads == ["org/a", "org/b"]
        assert state(r, "org/b") == WARM
        assert (r.used_bytes, r.host_used_bytes) == (100, 200)


async def test_warm_model_stays_warm_if_memory_is_not_free_in_time(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a", "org/b")
    store.has_copies = True
    async with residency(store, 100, host_bytes=400, shares_memory=False) as r:
        await loaded(r, "org/a", "org/b")
        busy = held(r, "org/b")
        limit_loads(r, 0.05)
        r.load("org/a")
        await failed(r, "org/a")
        limit_loads(r, LOAD_SECONDS)
        found = line(r, "org/a")
        assert (found.failure.reason, found.host_bytes) == ("NO_CAPACITY", 100)
        r.release(busy)
        await loaded(r, "org/a")
        assert store.loads == ["org/a", "org/b"]


async def test_probe_is_retried_after_running_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[str] = []

    def probe(model: FakeModel) -> float:
        probes.append(model.card.model)
        if len(probes) == 1:
            raise out_of_memory()
        return 3.0

    monkeypatch.setattr(FakeModel, "probe", probe)
    async with residency(Checkpoints(tmp_path, "org/a"), batch_tokens=10) as r:
        await loaded(r, "org/a")
        assert len(probes) == 2
        assert line(r, "org/a").activation_bytes_per_token == 3


async def test_model_without_a_probe_result_counts_as_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(model: FakeModel) -> float:
        if model.card.model == "org/c":
            return 7.0
        raise RuntimeError("no such sequence")

    monkeypatch.setattr(FakeModel, "probe", probe)
    async with residency(Checkpoints(tmp_path, "org/a", "org/c", "org/d")) as r:
        await loaded(r, "org/a")
        assert line(r, "org/a").activation_bytes_per_token == UNMEASURED_ACTIVATION_BYTES_PER_TOKEN
    async with residency(Checkpoints(tmp_path / "again", "org/c", "org/d")) as r:
        await loaded(r, "org/c", "org/d")
        assert line(r, "org/d").activation_bytes_per_token == 7
