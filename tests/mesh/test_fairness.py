"""A light client next to a heavy one, through a real router and a real Redis: how many batches of
the heavy client precede the light client's.

The worker is in this process, with models that run one batch when the test says so. The device is
thus as slow as possible, and the counts do not depend on this machine's speed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from shoal.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    mesh_pb2,
    mesh_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)

from libs.models import Head, InputSequence, Output, YieldPoint
from libs.models.interface.sequences import never_yield
from services.worker.app import serve
from services.worker.jobs.execution.runner import DeviceRunner
from services.worker.jobs.held import HeldJob
from services.worker.machine.device import Device
from services.worker.settings import Settings, Shelf
from tests.support.cluster import Cluster
from tests.worker.fakes import FakeModel, checkpoint, until

HOT, LIGHT = "fake/hot", "fake/light"
BATCH_TOKENS = 500
HEAVY_TEXT, LIGHT_TEXT = "h" * 50, "light"
SLOW_SECONDS = 0.02
"""Duration of the smallest batch. The largest batch is then not quick, so that the lane has one
pull instead of two.
"""
HEAVY_REQUESTS = 200
"""Requests for twenty batches."""
REQUEST_SECONDS = 600.0
WAIT_SECONDS = 60.0


class SteppedModel(FakeModel):
    """Waits for permission before each batch, and records begun work."""

    def __init__(self, name: str, device: SteppedDevice) -> None:
        super().__init__(name)
        self._device = device

    def forward(
        self, head: Head, sequences: list[InputSequence], yield_point: YieldPoint = never_yield
    ) -> list[Output]:
        self._device.begun.append([sequence.tokens for sequence in sequences])
        self._device.leave.acquire()
        time.sleep(SLOW_SECONDS)
        return super().forward(head, sequences)


class SteppedDevice:
    """`begun` has the lengths in each batch, in order. The last one is running or was the last.
    `queued` has the lengths of all texts that wait or waited for the device.
    """

    def __init__(self) -> None:
        self.leave = threading.Semaphore(0)
        self.queued: list[int] = []
        self.begun: list[list[int]] = []

    def load(self, directory: Path, name: str, base: Path | None = None, /) -> FakeModel:
        return SteppedModel(name, self)

    def let_all_go(self) -> None:
        self.leave.release(10**6)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # However long the device waits for permission, the router refuses nothing as too late.
    patient = {"SHOAL_MAX_QUEUED_SECONDS": str(REQUEST_SECONDS)}
    directory = tmp_path_factory.mktemp("fair")
    with Cluster(directory, models="", workers=0, environment=patient) as cluster:
        yield cluster


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SteppedDevice:
    """Return a device that notes the texts that the worker's runner has queued for it."""
    made, add = SteppedDevice(), DeviceRunner.add

    def noted(runner: DeviceRunner, jobs: Collection[HeldJob]) -> list[HeldJob]:
        lengths = [sequence.tokens for held in jobs for sequence in held.ready.sequences]
        complete = add(runner, jobs)
        made.queued.extend(lengths)
        return complete

    monkeypatch.setattr(DeviceRunner, "add", noted)
    return made


class Clients:
    """Clients of the mesh, by model and tenant."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._inference: inference_pb2_grpc.InferenceServiceAsyncStub = (
            inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[assignment]
        )
        self._models: models_pb2_grpc.ModelServiceAsyncStub = models_pb2_grpc.ModelServiceStub(
            channel
        )  # type: ignore[assignment]
        self._mesh: mesh_pb2_grpc.MeshServiceAsyncStub = mesh_pb2_grpc.MeshServiceStub(channel)  # type: ignore[assignment]

    def ask(self, model: str, tenant: str, text: str) -> Awaitable[inference_pb2.EncodeResponse]:
        """Send a request. It is on its way on return."""
        request = inference_pb2.EncodeRequest(model=model, items=[inference_pb2.Item(text=text)])
        return self._inference.Encode(
            request, timeout=REQUEST_SECONDS, metadata=(("x-shoal-tenant", tenant),)
        )

    async def enqueued(self, model: str, at_least: int = 0) -> int:
        """Wait until `at_least` jobs were ever enqueued, and return their number."""
        while True:
            mesh = (await self._mesh.GetMesh(mesh_pb2.GetMeshRequest())).mesh
            jobs = sum(lane.enqueued_jobs for lane in mesh.lanes if lane.model == model)
            if jobs >= at_least:
                return jobs
            await asyncio.sleep(0.05)

    async def priced(self) -> None:
        """Wait until the router knows that a token of these models is a letter."""
        while True:
            cards = [
                (await self._models.GetModel(models_pb2.GetModelRequest(model=model))).model.card
                for model in (HOT, LIGHT)
            ]
            if all(card.tokens_per_byte == 1.0 for card in cards):
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def worker(root: Path, router: Cluster, device: SteppedDevice) -> AsyncIterator[None]:
    for name in (HOT, LIGHT):
        checkpoint(root, name)
    settings = Settings(
        worker_id="stepped",
        routers=tuple(router.addresses),
        models=(Shelf(root),),
        heartbeat_seconds=0.2,
        grace_seconds=1.0,
        batch_seconds=60.0,  # waiting for permission must not make a model count as slow
    )
    stop = asyncio.Event()
    described = Device(
        name="stepped", memory_bytes=1000, batch_tokens=BATCH_TOKENS, item_bytes=4, load=device.load
    )
    running = asyncio.create_task(serve(settings, described, stop))
    try:
        yield
    finally:
        device.let_all_go()
        stop.set()
        await running


@pytest.mark.parametrize(("model", "tenant"), [(LIGHT, "a"), (LIGHT, "b"), (HOT, "b")])
async def test_light_client_is_served_after_the_running_batch(
    tmp_path: Path, router: Cluster, device: SteppedDevice, model: str, tenant: str
) -> None:
    """The light client uses another model, or is another tenant of the model. It is pulled despite
    the backlog.
    """
    async with AsyncExitStack() as stack:
        clients = Clients(
            await stack.enter_async_context(grpc.aio.insecure_channel(router.address))
        )
        await stack.enter_async_context(worker(tmp_path, router, device))
        device.leave.release(2)
        for name in (HOT, LIGHT):
            # Of a third tenant: how long these two take must not count for the others' turns.
            await clients.ask(name, "first", HEAVY_TEXT)
        await asyncio.wait_for(clients.priced(), WAIT_SECONDS)
        before = {name: await clients.enqueued(name, 1) for name in (HOT, LIGHT)}
        heavy = [clients.ask(HOT, "a", HEAVY_TEXT) for _ in range(HEAVY_REQUESTS)]
        await asyncio.wait_for(clients.enqueued(HOT, before[HOT] + HEAVY_REQUESTS), WAIT_SECONDS)
        before[HOT] += HEAVY_REQUESTS
        await until(lambda: len(device.begun) == 3, "a heavy batch to run", WAIT_SECONDS)
        light = clients.ask(model, tenant, LIGHT_TEXT)
        await asyncio.wait_for(clients.enqueued(model, before[model] + 1), WAIT_SECONDS)
        await until(lambda: len(LIGHT_TEXT) in device.queued, "the light text", WAIT_SECONDS)
        assert len(device.begun) == 3, "the heavy batch waits for permission"
        device.leave.release()
        await until(lambda: len(device.begun) == 4, "the next batch", WAIT_SECONDS)
        assert device.begun[-1] == [len(LIGHT_TEXT)], (
            "its batch is the next, and is not filled with the work of others"
        )
        device.let_all_go()
        await asyncio.gather(light, *heavy)
