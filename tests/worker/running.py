"""A whole worker against the tests' routers, in this process or in a separate one.

`python -m tests.worker.running` is the real entry point with a FakeModel on its device.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from services.worker import app
from services.worker.__main__ import main
from services.worker.app import serve
from services.worker.machine.device import Device
from services.worker.mesh import link
from services.worker.settings import Settings, Shelf
from tests.worker.fakes import HANG_SECONDS, FakeModel, FakeRouter, checkpoint

MODEL = "org/fake"


class RunningWorker:
    """A running worker. `models` has loaded models by ID; set `stop` to end it; `done` is set at
    its end.
    """

    def __init__(self) -> None:
        self.models: dict[str, FakeModel] = {}
        self.stop = asyncio.Event()
        self.done: asyncio.Task[None] | None = None
        self.is_lost = False

    @property
    def model(self) -> FakeModel:
        return self.models[MODEL]

    def load(self, directory: Path, name: str, base: Path | None = None, /) -> FakeModel:
        self.models[name] = FakeModel(name)
        return self.models[name]

    def recover(self) -> None:
        if self.is_lost:
            raise RuntimeError("device lost")


def fake_device(bay: RunningWorker) -> Device:
    return Device(
        name="fake",
        memory_bytes=1000,
        batch_tokens=500,
        item_bytes=4,
        load=bay.load,
        recover=bay.recover,
    )


@asynccontextmanager
async def worker(
    root: Path, routers: list[FakeRouter], *names: str, **changes: float
) -> AsyncIterator[RunningWorker]:
    """Run a worker in this process with the named models (and MODEL) on disk."""
    for name in (MODEL, *names):
        checkpoint(root, name)
    settings = Settings(
        worker_id="w1",
        routers=tuple(router.address for router in routers),
        models=(Shelf(root),),
        heartbeat_seconds=0.2,
        pull_wait_seconds=2.0,
    )
    bay = RunningWorker()
    bay.done = asyncio.create_task(serve(replace(settings, **changes), fake_device(bay), bay.stop))  # type: ignore[arg-type]
    try:
        yield bay
    finally:
        for model in bay.models.values():
            model.gate.set()
        bay.stop.set()
        await bay.done


if __name__ == "__main__":
    # The test and its routers share the cores with this process (tests/worker/conftest.py).
    app._HAND_BACK_SECONDS = app._GOODBYE_SECONDS = HANG_SECONDS  # type: ignore[misc]
    link.HEARTBEAT_SECONDS = link.COMPLETE_SECONDS = HANG_SECONDS  # type: ignore[misc]
    link.PULL_MARGIN_SECONDS = HANG_SECONDS  # type: ignore[misc]
    main(lambda settings: fake_device(RunningWorker()))
