"""The object graph of the local mesh: Redis, then router and scheduler, then the workers; stopped in the opposite order."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc.aio
from shoal.v1 import mesh_pb2, mesh_pb2_grpc

from libs.errors import NoCapacity
from services.local.process import Child
from services.local.redis_server import find_redis_server, redis_arguments
from services.local.settings import Settings, check_port_is_free, free_port

START_SECONDS = 60.0
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class LocalMesh:
    """A running mesh. `address` is where clients call, `scheduler_address` where KEDA would ask (empty: no scheduler); `children`
    are its processes, Redis first."""

    address: str
    scheduler_address: str
    directory: Path
    children: tuple[Child, ...]

    async def wait_for_failure(self) -> Child:
        """Returns the first child that ends by itself."""
        waits = {asyncio.create_task(child.process.wait()): child for child in self.children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return waits[done.pop()]


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[LocalMesh]:
    """Starts the mesh, yields when its router answers and all workers have reported, and stops it on the way out.

    Raises InvalidInput if the port is taken, NoCapacity if a process does not come up (with the end of its output).
    """
    port = settings.port or free_port()
    check_port_is_free(port)
    address = f"127.0.0.1:{port}"
    scheduler_address = f"127.0.0.1:{free_port()}" if settings.has_scheduler else ""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True)))
        environment = _environment(settings, address, scheduler_address, directory)
        redis = redis_arguments(find_redis_server(), directory)
        children = [await stack.enter_async_context(Child("redis", redis, dict(os.environ), directory / "redis.log"))]
        for name, command, extra in _services(settings):
            child = Child(name, command, environment | extra, directory / f"{name}.log")
            children.append(await stack.enter_async_context(child))
        mesh = LocalMesh(address, scheduler_address, directory, tuple(children))
        await _or_failure(mesh, _ready(mesh, settings.workers))
        yield mesh


def _environment(settings: Settings, address: str, scheduler_address: str, directory: Path) -> dict[str, str]:
    return (
        dict(os.environ)
        | {
            "SHOAL_ADDRESS": address,
            "SHOAL_SCHEDULER_ADDRESS": scheduler_address,
            "SHOAL_ROUTERS": address,
            "SHOAL_REDIS_URL": f"unix://{directory / 'redis.sock'}",
            "SHOAL_MODELS": settings.models,
            "SHOAL_STORES": settings.stores,
            "SHOAL_DTYPE": settings.dtype,
            "SHOAL_THREADS": str(settings.threads),
            "PYTHONUNBUFFERED": "1",
        }
        | dict(settings.environment)
    )


def _services(settings: Settings) -> list[tuple[str, list[str], dict[str, str]]]:
    python = [sys.executable, "-m"]
    workers = [
        (f"worker-{number}", [*python, "services.worker"], {"SHOAL_WORKER_ID": f"worker-{number}"})
        for number in range(settings.workers)
    ]
    services: list[tuple[str, list[str], dict[str, str]]] = [("router", [*python, "services.router"], {})]
    if settings.has_scheduler:
        services.append(("scheduler", [*python, "services.scheduler"], {}))
    return [*services, *workers]


async def _or_failure(mesh: LocalMesh, work: Coroutine[None, None, Answer]) -> Answer:
    """The result of `work`, unless a child ends or START_SECONDS pass first."""
    task = asyncio.create_task(work)
    failure = asyncio.create_task(mesh.wait_for_failure())
    try:
        await asyncio.wait({task, failure}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if failure.done():
            child = failure.result()
            raise NoCapacity(f"{child.name} ended with status {child.process.returncode}; its last words:\n{child.last_words()}")
        words = "\n".join(f"--- {child.name}\n{child.last_words(5)}" for child in mesh.children)
        raise NoCapacity(f"the mesh was not ready after {START_SECONDS:.0f} s:\n{words}")
    finally:
        task.cancel()
        failure.cancel()


async def _ready(mesh: LocalMesh, workers: int) -> None:
    """Returns when the router answers and all workers have reported to it."""
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        watch: mesh_pb2_grpc.MeshServiceAsyncStub = mesh_pb2_grpc.MeshServiceStub(channel)  # type: ignore[assignment]
        async for look in watch.WatchMesh(mesh_pb2.WatchMeshRequest(interval_seconds=0.2), wait_for_ready=True):
            if len(look.mesh.workers) >= workers:
                return
