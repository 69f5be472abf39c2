"""The memory budget under random operations, loads that fail or hang, and fairness between
models.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.v1 import models_pb2

from libs.errors import ModelBroken, NoCapacity
from libs.eviction import lru
from services.worker.memory.residency import LOAD_SECONDS, Residency
from services.worker.memory.resident import Resident
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.worker.fakes import HANG_SECONDS, FakeModel, until
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

LOADING, FAILED = models_pb2.MODEL_STATE_LOADING, models_pb2.MODEL_STATE_FAILED


# Activations


async def test_activations_of_one_batch_are_part_of_the_budget(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a", "org/b", "org/c")
    store.activations = {"org/a": 0.25, "org/b": 0.5}
    async with residency(store, 250, batch_tokens=100, policy=lru) as r:
        await loaded(r, "org/a", "org/b")
        assert (r.used_bytes, r.peak_bytes) == (200, 250), "50 for the larger of both"
        assert line(r, "org/b").activation_bytes_per_token == 0.5
        await loaded(r, "org/c")
        assert "org/a" not in r.lanes()
        assert r.peak_bytes <= 250


async def test_model_larger_than_estimated_waits_without_memory(tmp_path: Path) -> None:
    """It frees its weights while it waits, and is not measured again."""
    store = Checkpoints(tmp_path, "org/a", "org/b")
    store.activations = {"org/b": 1.0}
    clock = ManualClock()
    async with residency(store, 250, clock=clock, batch_tokens=100) as r:
        await loaded(r, "org/a")
        busy = held(r, "org/a")
        busy.held_tokens = 1e6
        r.load("org/b")
        await until(lambda: "org/b" in store.loads and line(r, "org/b").bytes == 0)
        await until(lambda: not r.can_load(), "it to wait")
        assert (r.used_bytes, state(r, "org/b")) == (100, LOADING)
        r.release(busy)
        clock.now += 1
        await until(lambda: r.serving("org/b") is not None)
        assert store.loads == ["org/a", "org/b", "org/b"]
        assert r.lanes() == ["org/b"]


async def test_measured_model_that_cannot_fit_is_refused_without_a_load(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")
    store.activations = {"org/a": 2.0}
    async with residency(store, 250, batch_tokens=100) as r:
        for _ in range(2):
            r.load("org/a")
            why = await failed(r, "org/a")
            assert "100 bytes and 200 for a batch" in why
            assert "250" in why
        assert store.loads == ["org/a"]
        assert r.used_bytes == 0


# Any interleaving

MODELS = [f"org/m{number}" for number in range(6)]
OPERATIONS = st.one_of(
    st.tuples(
        st.sampled_from(
            ["load", "load", "load", "hold", "release", "evict", "plan", "pin", "unpin"]
        ),
        st.sampled_from(MODELS),
    ),
    st.tuples(st.just("pass"), st.sampled_from(["", "time"])),
)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(OPERATIONS, min_size=5, max_size=30),
    st.lists(st.integers(1, 30), min_size=6, max_size=6),
    st.lists(st.sampled_from([0.0, 0.1, 0.4]), min_size=6, max_size=6),
    st.sampled_from([(0, True), (150, True), (150, False)]),
)
def test_no_interleaving_exceeds_the_budget(
    operations: list[tuple[str, str]],
    sizes: list[int],
    activations: list[float],
    tier: tuple[int, bool],
) -> None:
    async def main(root: Path) -> None:
        clock = ManualClock()
        store = Checkpoints(root)
        for model, size, activation in zip(MODELS, sizes, activations, strict=True):
            store.add(model, size * 4)
            store.activations[model] = activation
        host_bytes, shares_memory = tier
        store.has_copies = not shares_memory
        async with residency(
            store,
            250,
            clock=clock,
            batch_tokens=100,
            host_bytes=host_bytes,
            shares_memory=shares_memory,
        ) as r:
            jobs: list[Resident] = []
            for what, model in operations:
                _do(r, what, model, jobs, clock)
                await asyncio.sleep(0.001 if what == "pass" else 0)
                _check(r, jobs)
            for resident in jobs:
                r.release(resident)
            for model in MODELS:
                r.pin(model, False)
            end = time.monotonic() + HANG_SECONDS
            while time.monotonic() < end:
                _check(r, [])
                if _is_settled(r):
                    break
                if _only_time_helps(r):
                    clock.now += 1
                await asyncio.sleep(0.001)
            assert _is_settled(r), (
                "every load and every unloading ends, and nothing else takes memory then"
            )
            for one in r.report():
                assert one.state != FAILED or "are pinned" in one.failure.message, (
                    one.failure.message
                )
            assert 0 < r.peak_bytes <= 250 or not store.loads

    with tempfile.TemporaryDirectory() as root:
        asyncio.run(main(Path(root)))


def _is_settled(r: Residency) -> bool:
    serving = [r.serving(model) for model in r.lanes()]
    took = sum(one.model.bytes for one in serving if one is not None)
    return (
        all(one.state != LOADING and not one.leaving for one in r.report()) and r.used_bytes == took
    )


def _only_time_helps(r: Residency) -> bool:
    """Return whether no thread of a load or an unloading is at work, and a load waits until the
    rules permit evictions. The time limit of that load must not depend on how long threads take.
    """
    held = {one.name for one in r.residents() if one.held_jobs}
    is_working = any(one.bytes for one in r._loading.values()) or r._space.unloading.keys() - held
    return r._space.is_crowded and not is_working


def _do(r: Residency, what: str, model: str, jobs: list[Resident], clock: ManualClock) -> None:
    match what:
        case "load":
            r.load(model)
        case "hold" if (resident := r.serving(model)) is not None:
            r.hold(resident, 1, 10)
            jobs.append(resident)
        case "release" if jobs:
            r.release(jobs.pop(0))
        case "evict" | "plan":
            r.evict(model, by_plan=what == "plan")
        case "pin" | "unpin":
            r.pin(model, what == "pin")
        case "pass" if model:
            clock.now += 5


def _check(r: Residency, jobs: list[Resident]) -> None:
    assert r.used_bytes <= r.peak_bytes <= 250
    assert r.host_used_bytes <= r.host_bytes
    for resident in jobs:
        assert r._space.models[resident.name].resident is resident, "a model in flight stays"


# Turns


def _waits_for_work_only(r: Residency) -> bool:
    """Return whether no load can go on before a job ends or time passes."""
    if any(one.leaving and not one.held_jobs for one in r.residents()):
        return False
    return (
        all(one.state != LOADING for one in r.report())
        or any(one.leaving for one in r.residents())
        or r._space.is_crowded
    )


async def test_five_busy_models_with_room_for_four_all_get_served(tmp_path: Path) -> None:
    """Each always has waiting and running work. Time passes only between loads, so that turns do
    not depend on how long a load takes here.
    """
    names = MODELS[:5]
    clock = ManualClock()
    served: Counter[str] = Counter()
    store = Checkpoints(tmp_path, *names)
    async with residency(store, 400, clock=clock) as r:
        in_flight: dict[str, Resident] = {}
        for _ in range(5000):
            r.set_backlog(dict.fromkeys(names, 3000))
            for name in names:
                before, resident = in_flight.pop(name, None), r.serving(name)
                if resident is None:
                    r.load(name)
                else:
                    r.hold(resident, 1, 1000)
                    in_flight[name] = resident
                if before is not None:
                    served[name] += 1
                    r.release(before)
            clock.now += 0.2
            await asyncio.sleep(0.001)
            await until(lambda: _waits_for_work_only(r))
            if len(store.loads) >= 20:
                break
        for resident in in_flight.values():
            r.release(resident)
        assert len(store.loads) >= 20, "they change places again and again"
        assert min(served[name] for name in names) >= max(served.values()) / 10, served
        assert r.peak_bytes == 400


async def test_long_wait_takes_precedence_over_any_amount_of_work(tmp_path: Path) -> None:
    clock = ManualClock()
    async with residency(Checkpoints(tmp_path, "org/a", "org/b"), 100, clock=clock) as r:
        await loaded(r, "org/a")
        resident = held(r, "org/a")
        r.set_backlog({"org/a": 10**12})
        r.load("org/b")
        await until(lambda: not r.can_load())
        clock.now += 59
        await asyncio.sleep(0.1)
        assert not resident.leaving
        clock.now += 2
        await until(lambda: resident.leaving)
        assert r.used_bytes == 100
        assert "org/b" not in r.lanes(), "the job in flight is waited for"
        r.release(resident)
        await until(lambda: r.lanes() == ["org/b"])


async def test_load_fails_if_evictions_do_not_finish(tmp_path: Path) -> None:
    clock = ManualClock()
    async with residency(
        Checkpoints(tmp_path, "org/a", "org/b", "org/c"), 100, clock=clock, load_seconds=500.0
    ) as r:
        await loaded(r, "org/a")
        resident = held(r, "org/a")
        r.load("org/b")
        clock.now += 1
        await until(lambda: resident.leaving)
        clock.now += 501
        r.load("org/c")
        assert "500 seconds" in await failed(r, "org/b")
        assert line(r, "org/b").failure.reason == NoCapacity.reason
        r.release(resident)
        await until(lambda: r.lanes() == ["org/c"])


async def test_loads_get_memory_in_request_order(tmp_path: Path) -> None:
    clock = ManualClock()
    store = Checkpoints(tmp_path, "org/a", "org/small")
    store.add("org/large", 200)
    async with residency(store, 200, clock=clock) as r:
        await loaded(r, "org/a")
        resident = held(r, "org/a")
        resident.held_tokens = 1e9
        r.load("org/large")
        await until(lambda: not r.can_load())
        r.load("org/small")
        await asyncio.sleep(0.1)
        assert store.loads == ["org/a"], (
            "there is room for the small one, but the large one would never have its turn"
        )
        clock.now += 1
        r.release(resident)
        await until(lambda: r.lanes() == ["org/small"])
        assert store.loads == ["org/a", "org/large", "org/small"]


async def test_plan_does_not_evict_pinned_or_busy_models(tmp_path: Path) -> None:
    async with residency(Checkpoints(tmp_path, "org/a", "org/b", "org/c", "org/d"), 400) as r:
        await loaded(r, "org/a", "org/b", "org/c", "org/d")
        r.pin("org/a", True)
        busy = held(r, "org/b")
        r.set_backlog({"org/c": 1})
        for model in ("org/a", "org/b", "org/c", "org/d"):
            r.evict(model, by_plan=True)
        assert sorted(r.lanes()) == ["org/a", "org/b", "org/c"]
        r.release(busy)
        r.evict("org/a")
        assert "org/a" not in r.lanes(), "an operator's order outranks the pin"


# Loads that fail or hang


async def test_hanging_load_is_abandoned_but_keeps_its_memory(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a", "org/b")
    hung, free = threading.Event(), threading.Event()
    free.set()
    store.gates["org/a"] = [hung, free]
    async with residency(store, 250) as r:
        limit_loads(r, 0.05)
        r.load("org/a")
        why = await failed(r, "org/a")
        limit_loads(r, LOAD_SECONDS)
        assert "0.05 seconds" in why
        assert line(r, "org/a").failure.reason == ModelBroken.reason
        assert r.used_bytes == 100
        await loaded(r, "org/b")
        assert r.used_bytes == 200
        r.load("org/a")
        await until(lambda: r.serving("org/a") is not None)
        assert "org/b" not in r.lanes(), "there was no room for a third"
        hung.set()
        await until(lambda: r.used_bytes == 100, "the late result to be dropped")
        assert r.lanes() == ["org/a"]


async def test_error_reports_memory_held_by_hanging_loads(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, "org/a")
    store.add("org/large", 200)
    hung = threading.Event()
    store.gates["org/a"] = [hung]
    async with residency(store, 250) as r:
        limit_loads(r, 0.05)
        r.load("org/a")
        await failed(r, "org/a")
        limit_loads(r, LOAD_SECONDS)
        r.load("org/large")
        assert "100 are held by hanging loads" in await failed(r, "org/large")
        hung.set()
        await until(lambda: r.used_bytes == 0)
        await loaded(r, "org/large")


async def test_warm_model_that_hangs_is_then_read_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()
    store = Checkpoints(tmp_path, "org/a")
    async with residency(store, 250, host_bytes=100) as r:
        await loaded(r, "org/a")
        await unloaded(r, "org/a")
        limit_loads(r, 0.05)
        with monkeypatch.context() as patched:
            patched.setattr(
                "tests.worker.fakes.FakeParked.resume",
                lambda parked: hung.wait(HANG_SECONDS) and parked.model,
            )
            r.load("org/a")
            await failed(r, "org/a")
        limit_loads(r, LOAD_SECONDS)
        await loaded(r, "org/a")
        assert store.loads == ["org/a", "org/a"]
        assert r.used_bytes == 200
        hung.set()
        await until(lambda: r.used_bytes == 100)
        assert r.host_used_bytes == 0


async def test_failed_load_frees_its_weights(tmp_path: Path) -> None:
    read: list[weakref.ref[FakeModel]] = []

    class Failing(Checkpoints):
        def load(self, directory: Path, name: str, base: Path | None = None, /) -> FakeModel:
            model = super().load(directory, name)
            read.append(weakref.ref(model))
            try:
                raise KeyError(model.bytes)
            except KeyError as error:
                raise ModelBroken("half of it is missing") from error

    async with residency(Failing(tmp_path, "org/a")) as r:
        r.load("org/a")
        assert await failed(r, "org/a") == "half of it is missing"
        assert r.used_bytes == 0
        assert len(read) == 1
        await until(lambda: read[0]() is None, "the memory to be given back")


def test_loading_and_unloading_does_not_grow_the_process(tmp_path: Path) -> None:
    """Load and unload a real checkpoint of 8 MB repeatedly. If every load leaked, the process would
    grow by the size of 20 models. Each of the two loading threads has its own arena, and malloc may
    keep a freed model's pages in it.
    """
    write_checkpoint(
        "bert",
        tmp_path / "org" / "real",
        hidden=256,
        layers=4,
        vocabulary=400,
        sentence=SentenceFiles(),
    )
    size = sum(file.stat().st_size for file in (tmp_path / "org" / "real").rglob("*.safetensors"))
    command = [sys.executable, "-m", "tests.worker.growth", str(tmp_path)]
    taken = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    )
    # The minimum of several: a loading thread may end a little later, and keeps the model until
    # then.
    assert min(taken[-8:]) - min(taken[4:12]) < 3 * size, [one >> 20 for one in taken]
