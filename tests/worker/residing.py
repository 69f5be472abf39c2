"""Shared parts of residency tests: checkpoints of any size, a loader that can be blocked or made to
fail, and helpers for the report.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from shoal.v1 import models_pb2, worker_pb2

from libs.eviction import Policy, cost_aware
from libs.models.runtime.graphs.graphs import Graphs, Owner
from libs.store import ModelStore
from services.worker.machine.device import Device
from services.worker.memory.files import ModelFiles
from services.worker.memory.residency import LOAD_SECONDS, Residency
from services.worker.memory.resident import Resident
from services.worker.settings import Shelf
from tests.worker.fakes import HANG_SECONDS, FakeModel, checkpoint, until


class Checkpoints:
    """Checkpoints of 100 bytes by default, and a loader.

    - `gate` blocks every load; `gates` block loads of a model, each load with its next gate.
    - `errors` fail loads.
    - `loads` lists models in the order in which their loads began.
    - `activations` are bytes per token, by model.
    - `has_copies`: models keep a copy in host memory.
    - `make` makes a model of a name and size.
    """

    def __init__(self, root: Path, *names: str) -> None:
        self.root = root
        self.gate = threading.Event()
        self.gate.set()
        self.gates: dict[str, list[threading.Event]] = {}
        self.errors: dict[str, Exception] = {}
        self.loads: list[str] = []
        self.sizes: dict[str, int] = {}
        self.activations: dict[str, float] = {}
        self.has_copies = False
        self.make: Callable[[str, int], FakeModel] = FakeModel
        for name in names:
            self.add(name)

    def add(self, name: str, size: int = 100) -> None:
        self.sizes[name] = size
        save_file(
            {"w": np.zeros(size // 4, np.float32)},
            checkpoint(self.root, name) / "model.safetensors",
        )

    def load(self, directory: Path, name: str, base: Path | None = None, /) -> FakeModel:
        self.loads.append(name)
        gate = self.gates[name].pop(0) if self.gates.get(name) else self.gate
        gate.wait(HANG_SECONDS)
        if name in self.errors:
            raise self.errors[name]
        model = self.make(name, self.sizes.get(name, 100))
        model.activation_bytes_per_token = self.activations.get(name, 0.0)
        model.host_bytes = model.bytes if self.has_copies else 0
        return model


class ManualClock:
    """A clock that only moves when set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def residency(
    store: Checkpoints,
    memory_bytes: int = 250,
    remote: ModelStore | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    trim: Callable[[], None] = lambda: None,
    batch_tokens: int = 0,
    host_bytes: int = 0,
    shares_memory: bool = True,
    policy: Policy = cost_aware,
    load_seconds: float = LOAD_SECONDS,
    graphs: Callable[[Owner], Graphs] | None = None,
    image_cache_bytes: int = 0,
) -> AsyncIterator[Residency]:
    device = Device(
        "fake",
        memory_bytes,
        batch_tokens,
        4,
        store.load,
        trim=trim,
        host_bytes=host_bytes,
        shares_memory=shares_memory,
        graphs=graphs,
    )
    files = ModelFiles((Shelf(store.root),), remote, item_bytes=device.item_bytes)
    async with asyncio.TaskGroup() as tasks:
        made = Residency(
            files,
            device,
            tasks,
            clock=clock,
            changed=lambda: None,
            policy=policy,
            load_seconds=load_seconds,
            image_cache_bytes=image_cache_bytes,
        )
        try:
            yield made
        finally:
            for gate in (store.gate, *(gate for gates in store.gates.values() for gate in gates)):
                gate.set()
            made.stop()


def line(residency: Residency, model: str) -> worker_pb2.WorkerModel:
    return next(one for one in residency.report() if one.model == model)


def state(residency: Residency, model: str) -> int:
    if model in (states := {one.model: one.state for one in residency.report()}):
        return states[model]
    is_on_disk = model in residency.on_disk
    return models_pb2.MODEL_STATE_COLD if is_on_disk else models_pb2.MODEL_STATE_ABSENT


async def failed(residency: Residency, model: str) -> str:
    """Wait for a load to fail, and return the reason."""
    await until(
        lambda: state(residency, model) == models_pb2.MODEL_STATE_FAILED, f"{model} to fail"
    )
    return line(residency, model).failure.message


async def unloaded(residency: Residency, *models: str) -> None:
    """Evict models, and wait until each has left and its memory is free."""
    for model in models:
        residency.evict(model)
        await until(
            lambda model=model: model not in residency._space.unloading,  # type: ignore[misc]
            f"{model} to leave",
        )
        assert state(residency, model) != models_pb2.MODEL_STATE_RESIDENT


def limit_loads(residency: Residency, seconds: float) -> None:
    """Set the time limit of the loads that begin from now on: a short one for a load that hangs,
    and none that matters for the others, which take as long as the machine needs.
    """
    residency._loader._load_seconds = residency._space._wait_seconds = seconds


async def loaded(residency: Residency, *models: str) -> None:
    for model in models:
        residency.load(model)
        await until(lambda model=model: residency.serving(model) is not None, f"{model} to load")  # type: ignore[misc]


def held(residency: Residency, model: str) -> Resident:
    """Return the model with one job held."""
    resident = residency.serving(model)
    assert resident is not None
    residency.hold(resident, 1)
    return resident
