"""A mesh within this process for targets that call it: real Redis, router, scheduler, and a worker
with a tiny model.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop

from services.router import app as router_app
from services.router.settings import Settings as RouterSettings
from services.scheduler import app as scheduler_app
from services.scheduler.settings import Settings as SchedulerSettings
from services.worker.app import serve
from services.worker.machine.device import open_device
from services.worker.settings import Settings as WorkerSettings
from services.worker.settings import Shelf
from tests.fuzz import tiny
from tests.support.redis import RedisServer

MODEL: Final = "tiny/fuzz"
WORKER: Final = "w-good"


@dataclass(frozen=True, slots=True)
class Mesh:
    """The addresses of the mesh's servers and the path of its model. `ended` is done if a part has
    died.
    """

    router: str
    scheduler: str
    model: Path
    ended: Future[None]


@contextmanager
def serving(*, has_worker: bool = True) -> Iterator[Mesh]:
    """Run the mesh on an event loop in a separate thread."""
    with tempfile.TemporaryDirectory() as folder, RedisServer() as redis:
        model = tiny.write(Path(folder) / MODEL)
        ready: Future[tuple[str, str]] = Future()
        ended: Future[None] = Future()
        loop = uvloop.new_event_loop()
        stop = asyncio.Event()

        def run() -> None:
            try:
                loop.run_until_complete(_serve(redis.url, Path(folder), ready, stop, has_worker))
                ended.set_result(None)
            except BaseException as error:
                for future in (ready, ended):
                    if not future.done():
                        future.set_exception(error)

        sys.setswitchinterval(
            0.0005
        )  # the caller and the mesh alternate thousands of times a second
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        router, scheduler = ready.result(60)
        try:
            yield Mesh(router, scheduler, model, ended)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(30)


async def _serve(
    redis_url: str,
    shelf: Path,
    ready: Future[tuple[str, str]],
    stop: asyncio.Event,
    has_worker: bool,
) -> None:
    async with AsyncExitStack() as stack:
        # Leases are short, so that jobs of a faulty worker are soon given to another.
        router = await stack.enter_async_context(
            router_app.running(
                RouterSettings(
                    router_id="fuzz",
                    address="127.0.0.1:0",
                    redis_url=redis_url,
                    default_deadline_seconds=5.0,
                    lease_ms=1000,
                    max_attempts=100,
                    grace_seconds=0.0,
                )
            )
        )
        settings = SchedulerSettings(
            scheduler_id="fuzz", address="127.0.0.1:0", redis_url=redis_url, grace_seconds=0.0
        )
        scheduler = (await stack.enter_async_context(scheduler_app.running(settings))).grpc
        worker_stop = asyncio.Event()
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        if has_worker:
            worker = WorkerSettings(
                worker_id=WORKER,
                routers=(router,),
                models=(Shelf(shelf),),
                dtype="float32",
                heartbeat_seconds=0.5,
                grace_seconds=1.0,
            )
            tasks.create_task(serve(worker, open_device(worker), worker_stop))
        ready.set_result((router, scheduler))
        await stop.wait()
        worker_stop.set()
