"""Memory of CUDA graphs: part of the budget, granted only if free, and released before a model is
evicted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from libs.models import InputSequence, PackedModel, load_model
from libs.models.runtime.graphs.graphs import ROUGH_BYTES, Graphs, Owner
from libs.telemetry import metrics
from services.worker.memory.residency import Residency
from services.worker.settings import Settings
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.graphs import FakeCapture
from tests.worker.fakes import FakeModel, FakeParked, until
from tests.worker.residing import Checkpoints, loaded, residency, unloaded


class FakeGraphs:
    """Graphs that only take memory."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.bytes = 0

    def grow(self, size: int) -> bool:
        """Grow from a separate thread, as a forward pass does."""
        is_granted = self.owner.reserve(size)
        self.bytes = size if is_granted else self.bytes
        return is_granted

    def drop(self) -> None:
        self.bytes = 0
        self.owner.reserve(0)


class GraphedModel(FakeModel):
    """A model with fake graphs. `dropped` counts drops of its graphs."""

    graphs: FakeGraphs | None = None
    dropped = 0
    awaits_capture = False
    error: Exception | None = None

    def capture_graph(self) -> None:
        self.awaits_capture = False
        if self.error is not None:
            raise self.error

    def keep_graphs(self, graphs: Graphs) -> None:
        self.graphs = cast(FakeGraphs, graphs)

    def drop_graphs(self) -> None:
        self.dropped += 1
        if self.graphs is not None:
            self.graphs.drop()

    def park(self) -> FakeParked:
        self.drop_graphs()
        return super().park()


@asynccontextmanager
async def graphed(
    root: Path, memory_bytes: int = 300, host_bytes: int = 0
) -> AsyncIterator[tuple[Residency, Checkpoints]]:
    """Run a residency with models of 100 bytes that keep graphs."""
    store = Checkpoints(root, "org/a", "org/b", "org/c")
    store.make = GraphedModel
    graphs = cast("type[Graphs]", FakeGraphs)
    async with residency(
        store, memory_bytes, host_bytes=host_bytes, shares_memory=False, graphs=graphs
    ) as r:
        yield r, store


def model_of(r: Residency, name: str) -> GraphedModel:
    resident = r.serving(name)
    assert resident is not None
    return cast(GraphedModel, resident.model)


async def grow(r: Residency, name: str, size: int) -> bool:
    graphs = model_of(r, name).graphs
    assert graphs is not None
    return await asyncio.to_thread(graphs.grow, size)


async def test_graphs_count_in_the_budget_and_take_only_free_memory(tmp_path: Path) -> None:
    async with graphed(tmp_path) as (r, _):
        await loaded(r, "org/a")
        assert r.used_bytes == 100
        assert await grow(r, "org/a", 150)
        assert (r.used_bytes, r.peak_bytes) == (250, 250)
        assert not await grow(r, "org/a", 201)
        assert r.used_bytes == 250
        assert await grow(r, "org/a", 30)
        assert r.used_bytes == 130
        (resident,) = r.residents()
        assert resident.graph_bytes == 30
        assert r._space.candidate(r._space.models["org/a"]).bytes == 130, (
            "an eviction would free them too"
        )


async def test_graphs_are_dropped_before_models_are_evicted(tmp_path: Path) -> None:
    async with graphed(tmp_path) as (r, _):
        await loaded(r, "org/a")
        assert await grow(r, "org/a", 150)
        await loaded(r, "org/b")
        assert sorted(r.lanes()) == ["org/a", "org/b"]
        assert model_of(r, "org/a").dropped == 1
        assert r.used_bytes == 200
        assert await grow(r, "org/b", 100)
        assert not await grow(r, "org/a", 1)


async def test_graphs_of_pinned_models_do_not_block_loads(tmp_path: Path) -> None:
    async with graphed(tmp_path) as (r, _):
        await loaded(r, "org/a")
        r.pin("org/a", True)
        assert await grow(r, "org/a", 200)
        await loaded(r, "org/b")
        assert r.used_bytes == 200


async def test_no_memory_is_granted_while_a_load_waits(tmp_path: Path) -> None:
    async with graphed(tmp_path) as (r, _):
        await loaded(r, "org/a")
        async with r._space._turn:  # as a waiting load does
            assert not await grow(r, "org/a", 1)
        assert await grow(r, "org/a", 1)


async def test_eviction_frees_the_models_graphs(tmp_path: Path) -> None:
    async with graphed(tmp_path, host_bytes=300) as (r, _):
        await loaded(r, "org/a")
        before = model_of(r, "org/a")
        assert await grow(r, "org/a", 50)
        await unloaded(r, "org/a")
        assert (r.used_bytes, before.dropped) == (0, 1)
        assert r._space.host.models["org/a"].size.bytes == 100, "the memory it needs to return"
        assert before.graphs is not None
        assert not await asyncio.to_thread(before.graphs.grow, 10), "it is not on the device"
        await loaded(r, "org/a")
        assert r.used_bytes == 100
        assert await grow(r, "org/a", 10)


async def test_model_with_graphs_is_freed_when_it_is_dropped(tmp_path: Path) -> None:
    """It is freed immediately, without a collection of cycles."""
    async with graphed(tmp_path) as (r, _):
        await loaded(r, "org/a")
        assert await grow(r, "org/a", 50)
        model = weakref.ref(model_of(r, "org/a"))
        await unloaded(r, "org/a")
        await until(lambda: r.used_bytes == 0)
        assert model() is None


async def test_out_of_memory_frees_graphs_first(tmp_path: Path) -> None:
    async with graphed(tmp_path) as (r, _):
        await loaded(r, "org/a")
        await loaded(r, "org/b")
        assert await grow(r, "org/a", 50)
        assert await r.relieve("org/a")
        assert (r.used_bytes, model_of(r, "org/a").dropped, model_of(r, "org/b").dropped) == (
            200,
            1,
            0,
        )
        assert await r.relieve("org/a"), "org/b is idle"
        assert not await r.relieve("org/a")


async def test_models_and_devices_without_graphs_are_ignored(tmp_path: Path) -> None:
    async with graphed(tmp_path) as (r, store):
        store.make = FakeModel
        await loaded(r, "org/a")
        assert not await r._space.graphs.shed()
    plain = Checkpoints(tmp_path / "plain", "org/a")
    plain.make = GraphedModel
    async with residency(plain) as r:
        await loaded(r, "org/a")
        assert model_of(r, "org/a").graphs is None


async def test_real_model_captures_and_replays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Capture, replay, and a difference that disables graphs are visible in metrics and the log."""
    directory = write_checkpoint("bert", tmp_path / "checkpoint", sentence=SentenceFiles())
    capture = FakeCapture(size=5000)
    store = Checkpoints(tmp_path / "models", "org/a")

    def load(_: Path, name: str, base: Path | None = None, /) -> PackedModel:
        return load_model(directory, name, torch.device("cpu"), torch.float32, base=base)

    store.load = load  # type: ignore[method-assign,assignment]

    def graphs(owner: Owner) -> Graphs:
        return Graphs(capture, owner, most=4, after=1, check_every=2)

    batch = [InputSequence(np.arange(5, 12, dtype=np.int32))]
    counted = {event: _count(event) for event in ("captured", "replayed", "checked", "differed")}
    async with residency(store, 2 * ROUGH_BYTES, shares_memory=False, graphs=graphs) as r:
        await loaded(r, "org/a")
        resident = r.serving("org/a")
        assert resident is not None
        weights = r.used_bytes
        assert r.graphs.is_pending, "the shapes that most batches have"
        model = cast(PackedModel, resident.model)
        model.drop_graphs()
        forwards = []
        for _ in range(4):
            forwards.append(await asyncio.to_thread(model.forward, "dense", batch))
            while r.graphs.is_pending:
                await asyncio.to_thread(r.graphs.run)
        assert [
            np.allclose(cast("np.ndarray", one[0]), cast("np.ndarray", forwards[0][0]), atol=1e-5)
            for one in forwards
        ] == [True] * 4
        assert (r.used_bytes, resident.graph_bytes) == (weights + 5000, 5000)
        (made,) = capture.made
        made.replay = lambda fill: made._output.add_(1)  # type: ignore[method-assign]
        with caplog.at_level(logging.ERROR):
            await asyncio.to_thread(model.forward, "dense", batch)
            await asyncio.to_thread(model.forward, "dense", batch)
        assert "graphs are disabled for this model" in caplog.text
        assert (r.used_bytes, resident.graph_bytes) == (weights, 0)
    assert {event: _count(event) - before for event, before in counted.items()} == {
        "captured": 1,
        "replayed": 4,
        "checked": 3,
        "differed": 1,
    }


def _count(event: str) -> float:
    return metrics.GRAPH_EVENTS.labels(event)._value.get()


async def test_stopped_worker_grants_no_memory(tmp_path: Path) -> None:
    """Its event loop is closed, and a forward may still be in progress on a daemon thread."""
    owners: list[Owner] = []

    def end() -> None:
        async def run() -> None:
            async with graphed(tmp_path) as (r, _):
                await loaded(r, "org/a")
                graphs = model_of(r, "org/a").graphs
                assert graphs is not None
                owners.append(graphs.owner)

        asyncio.run(run())

    thread = threading.Thread(target=end)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert not owners[0].reserve(10)


async def test_leaving_model_captures_nothing_and_a_failure_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with graphed(tmp_path) as (r, _):
        await loaded(r, "org/a", "org/b")
        assert [r.graphs.is_pending] == [False]
        r.graphs.run()
        a, b = (model_of(r, name) for name in ("org/a", "org/b"))
        a.awaits_capture = True
        resident = r.serving("org/a")
        assert resident is not None
        resident.leaving = True
        assert [r.graphs.is_pending] == [False]
        r.graphs.run()
        assert a.awaits_capture
        b.awaits_capture, b.error = True, RuntimeError("reset failed")
        assert [r.graphs.is_pending] == [True]
        with caplog.at_level(logging.ERROR):
            r.graphs.run()
        assert "capturing a CUDA graph failed" in caplog.text
        assert not r.graphs.is_pending


def test_graphs_are_on_by_default() -> None:
    assert Settings.from_env({}).cuda_graphs == 48
    assert Settings.from_env({"SHOAL_CUDA_GRAPHS": "16"}).cuda_graphs == 16
