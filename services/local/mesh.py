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
from services.local.certs import caller_variables, issue_all, server_variables
from services.local.environment import environment_of
from services.local.process import Child
from services.local.redis_server import find_redis_server, redis_arguments
from services.local.settings import Settings, check_port_is_free, free_port

START_SECONDS = 60.0
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class LocalMesh:
    """A running mesh. `address` is where clients call, `scheduler_address` where KEDA would ask (empty: no scheduler); `children`
    are its processes, Redis first. `certificates`: where its certificates are, if it uses TLS."""

    address: str
    scheduler_address: str
    directory: Path
    children: tuple[Child, ...]
    certificates: Path | None = None

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
        told = _told(settings, address, scheduler_address, directory)
        certificates = directory / "tls" if settings.tls else None
        if certificates is not None:
            issue_all(certificates, [])
        redis = redis_arguments(find_redis_server(), directory)
        children = [
            await stack.enter_async_context(Child("redis", redis, environment_of("redis", os.environ), directory / "redis.log"))
        ]
        for name, command, extra in _services(settings, certificates):
            environment = environment_of(name.partition("-")[0], os.environ) | told | extra
            child = Child(name, command, environment, directory / f"{name}.log")
            children.append(await stack.enter_async_context(child))
        mesh = LocalMesh(address, scheduler_address, directory, tuple(children), certificates)
        await _or_failure(mesh, _ready(mesh, settings.workers))
        yield mesh


def _told(settings: Settings, address: str, scheduler_address: str, directory: Path) -> dict[str, str]:
    """What all services are told, whatever this shell says."""
    return {
        "SHOAL_ADDRESS": address,
        "SHOAL_SCHEDULER_ADDRESS": scheduler_address,
        "SHOAL_ROUTERS": address,
        "SHOAL_REDIS_URL": f"unix://{directory / 'redis.sock'}",
        "SHOAL_MODELS": settings.models,
        "SHOAL_STORES": settings.stores,
        "SHOAL_DTYPE": settings.dtype,
        "SHOAL_THREADS": str(settings.threads),
        "PYTHONUNBUFFERED": "1",
        **dict(settings.environment),
    }


def _services(settings: Settings, certificates: Path | None) -> list[tuple[str, list[str], dict[str, str]]]:
    python = [sys.executable, "-m"]

    def service(role: str, name: str, more: dict[str, str]) -> tuple[str, list[str], dict[str, str]]:
        make = caller_variables if role == "worker" else server_variables
        return name, [*python, f"services.{role}"], more | (make(certificates, role) if certificates is not None else {})

    names = [f"worker-{number}" for number in range(settings.workers)]
    return [
        service("router", "router", {}),
        *([service("scheduler", "scheduler", {})] if settings.has_scheduler else []),
        *(service("worker", name, {"SHOAL_WORKER_ID": name}) for name in names),
    ]


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
    async with _channel(mesh) as channel:
        watch: mesh_pb2_grpc.MeshServiceAsyncStub = mesh_pb2_grpc.MeshServiceStub(channel)  # type: ignore[assignment]
        async for look in watch.WatchMesh(mesh_pb2.WatchMeshRequest(interval_seconds=0.2), wait_for_ready=True):
            if len(look.mesh.workers) >= workers:
                return


def _channel(mesh: LocalMesh) -> grpc.aio.Channel:
    if mesh.certificates is None:
        return grpc.aio.insecure_channel(mesh.address)
    ca, key, chain = ((mesh.certificates / name).read_bytes() for name in ("ca.pem", "admin.key", "admin.pem"))
    return grpc.aio.secure_channel(mesh.address, grpc.ssl_channel_credentials(ca, key, chain))
