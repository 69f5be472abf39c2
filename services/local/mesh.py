"""The object graph of the local mesh: Redis, then router, scheduler, workers and edge, and their
supervisor.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import grpc.aio
from shoal.v1 import mesh_pb2, mesh_pb2_grpc

from libs.errors import InvalidInput, NoCapacity
from libs.telemetry.exposition import serving_metrics
from libs.telemetry.gathering import gather
from services.local.devices import VISIBLE
from services.local.redis_server import find_redis_server, redis_arguments
from services.local.settings import Settings, check_port_is_free, free_port
from services.local.supervision import launch
from services.local.supervision.child import Child
from services.local.supervision.environment import child_environment
from services.local.supervision.policy import Role, ending
from services.local.supervision.supervisor import Notify, Supervisor
from services.local.trust.certificates import (
    Party,
    caller_variables,
    edge_variables,
    issue_all,
    server_variables,
)
from services.local.workplace import Workplace, workplace

MESH_START_SECONDS: Final = 120.0
"""Maximum duration of the start, even of a worker that imports torch for CUDA from a slow disk."""
STOP_ORDER: Final[tuple[Role, ...]] = ("edge", "router", "worker", "scheduler", "redis")


NAMELESS: Final = ("embed", "rerank", "predict")
"""Aliases that stand for the model of requests that name none (docs/http.md)."""

_Service: TypeAlias = tuple[Role, str, list[str], dict[str, str]]
"""A child that is one of our services: role, name, command, and the variables that it alone has."""


@dataclass(frozen=True, slots=True)
class LocalMesh:
    """A running mesh.

    Attributes:
        address: The router's address, for clients.
        scheduler_address: The address of KEDA's external scaler; empty without a scheduler.
        http_address: The edge's address for HTTP; empty without an edge.
        tei_grpc_address: The edge's address for TEI's gRPC; empty without it.
        metrics_address: The address of one page with the metrics of all processes; empty without
            it.
        logs: The folder with a log file for each process.
        certificates: The folder of the certificates, if the mesh uses TLS.
    """

    address: str
    scheduler_address: str
    http_address: str
    logs: Path
    certificates: Path | None
    supervisor: Supervisor
    tei_grpc_address: str = ""
    metrics_address: str = ""
    has_console: bool = False


def to_stderr(message: str) -> None:
    print(message, file=sys.stderr)


@asynccontextmanager
async def running(settings: Settings, notify: Notify = to_stderr) -> AsyncIterator[LocalMesh]:
    """Start the mesh, yield when its router answers and all workers have reported, and stop it on
    exit. A process that ends before is restarted, and `notify` is called with a message.

    Raises InvalidInput if the port is taken, NoCapacity if a process does not start (with the end
    of its output).
    """
    port = settings.port or free_port()
    check_port_is_free(port)
    address = f"127.0.0.1:{port}"
    scheduler_address = f"127.0.0.1:{free_port()}" if settings.has_scheduler else ""
    http_address = _http_address(settings)
    tei_address = _free_address(settings.tei_grpc_port, "tei-grpc-port")
    async with AsyncExitStack() as stack:
        place = stack.enter_context(workplace(settings.keep_logs))
        certificates = place.certificates if settings.tls else None
        if certificates is not None:
            issue_all(certificates, [Party("client", "*")])
        common = _common_variables(settings, address, scheduler_address, place, http_address)
        if tei_address:
            common["SHOAL_TEI_GRPC_ADDRESSES"] = tei_address
        services = _services(settings, certificates)
        sources = (
            {name: f"127.0.0.1:{free_port()}" for _, name, _, _ in services}
            if settings.metrics_address
            else {}
        )
        metrics = serving_metrics(
            settings.metrics_address, partial(gather, sources), with_own=False
        )
        metrics_address = await stack.enter_async_context(metrics)
        children = _children(services, common, sources, place)
        stack.push_async_callback(_stop, children)
        for _, child in children:
            await child.start()
        await _or_failure(
            [child for _, child in children],
            _ready(address, certificates, settings.workers, http_address),
        )
        supervisor = await stack.enter_async_context(Supervisor(children, place.processes, notify))
        yield LocalMesh(
            address,
            scheduler_address,
            http_address,
            place.logs,
            certificates,
            supervisor,
            tei_grpc_address=tei_address,
            metrics_address=metrics_address,
            has_console=_has_console(settings),
        )


def _children(
    services: Sequence[_Service],
    common: dict[str, str],
    metrics: Mapping[str, str],
    place: Workplace,
) -> list[tuple[Role, Child]]:
    """Return the children, in start order. `metrics`: the address of each service's own metrics, by
    its name.
    """
    redis = redis_arguments(find_redis_server(), place.redis, is_durable=True)
    children: list[tuple[Role, Child]] = [
        (
            "redis",
            Child("redis", redis, child_environment("redis", os.environ), place.logs / "redis.log"),
        )
    ]
    for role, name, command, extra in services:
        variables = (
            child_environment(role, os.environ)
            | {"SHOAL_METRICS_ADDRESS": metrics.get(name, "")}
            | common
            | extra
        )
        children.append((role, Child(name, command, variables, place.logs / f"{name}.log")))
    return children


async def _stop(children: Sequence[tuple[Role, Child]]) -> None:
    """Stop the edge and then the router first: they drain, which needs all other processes to
    answer the calls in flight.
    """
    for role in STOP_ORDER:
        await asyncio.gather(*(child.stop() for own, child in children if own == role))


def _has_console(settings: Settings) -> bool:
    return settings.has_console and settings.http_port is not None and not settings.tls


def _http_address(settings: Settings) -> str:
    return _free_address(settings.http_port, "http-port")


def _free_address(port: int | None, option: str) -> str:
    """Return an address with this port, or with a free one for 0; empty for None. Raises
    InvalidInput if something listens there.
    """
    if port is None:
        return ""
    port = port or free_port()
    check_port_is_free(port, option)
    return f"127.0.0.1:{port}"


def _aliases(settings: Settings, place: Workplace) -> dict[str, str]:
    """Write the edge's file of aliases for a mesh with a default model, and return its variable.
    Raises InvalidInput.
    """
    if not settings.default_model:
        return {}
    if os.environ.get("SHOAL_ALIASES"):
        names = ", ".join(NAMELESS)
        raise InvalidInput(
            f"SHOAL_ALIASES is set: name {settings.default_model} as {names} in that file",
            field="SHOAL_ALIASES",
        )
    place.aliases.write_text(
        json.dumps({"aliases": dict.fromkeys(NAMELESS, settings.default_model)})
    )
    return {"SHOAL_ALIASES": str(place.aliases)}


def _common_variables(
    settings: Settings,
    address: str,
    scheduler_address: str,
    place: Workplace,
    http_address: str = "",
) -> dict[str, str]:
    """Return the variables of all services, which override this shell's."""
    device = {"SHOAL_DEVICE": settings.device} if settings.device != "auto" else {}
    return {
        "SHOAL_ADDRESS": address,
        "SHOAL_SCHEDULER_ADDRESS": scheduler_address,
        "SHOAL_HTTP_ADDRESS": http_address,
        "SHOAL_CONSOLE": "1" if _has_console(settings) else "0",
        "SHOAL_ROUTERS": address,
        "SHOAL_REDIS_URL": f"unix://{place.redis / 'redis.sock'}",
        "SHOAL_PROCESSES": str(place.processes),
        "SHOAL_MODELS": settings.models,
        "SHOAL_STORES": settings.stores,
        "SHOAL_DTYPE": settings.dtype,
        **device,
        "SHOAL_THREADS": str(settings.threads),
        "PYTHONUNBUFFERED": "1",
        **_aliases(settings, place),
        **dict(settings.environment),
    }


def _services(settings: Settings, certificates: Path | None) -> list[_Service]:
    def service(role: Role, name: str, more: dict[str, str]) -> _Service:
        command = [sys.executable, "-P", launch.__file__, f"services.{role}"]
        return (
            role,
            name,
            command,
            more | (_trust(certificates, role) if certificates is not None else {}),
        )

    names = [f"worker-{number}" for number in range(settings.workers)]
    return [
        service("router", "router", {}),
        *([service("scheduler", "scheduler", {})] if settings.has_scheduler else []),
        *(
            service("worker", name, {"SHOAL_WORKER_ID": name, **_device(settings, at)})
            for at, name in enumerate(names)
        ),
        *([service("edge", "edge", {})] if settings.http_port is not None else []),
    ]


def _trust(certificates: Path, role: Role) -> dict[str, str]:
    if role == "worker":
        return caller_variables(certificates, role)
    # The edge calls routers for any tenant: that of its caller's certificate.
    as_caller = edge_variables(certificates, "client-any") if role == "edge" else {}
    return server_variables(certificates, role) | as_caller


def _device(settings: Settings, worker: int) -> dict[str, str]:
    """Return the variables that make only its own accelerator visible to a worker."""
    return (
        {"SHOAL_DEVICE": "cuda", VISIBLE: settings.accelerators[worker]}
        if settings.accelerators
        else {}
    )


async def _or_failure(children: Sequence[Child], work: Coroutine[None, None, None]) -> None:
    """Run `work`. Raises NoCapacity if a child ends first, or MESH_START_SECONDS pass: a child
    that fails at the start would fail again.
    """
    working = asyncio.create_task(work)
    exits = {asyncio.create_task(child.wait()): child for child in children}
    try:
        done, _ = await asyncio.wait(
            {working, *exits}, timeout=MESH_START_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if working in done:
            return working.result()
        for exited, child in exits.items():
            if exited in done:
                raise NoCapacity(
                    f"{child.name} {ending(exited.result())} during the start. The end of its "
                    f"log ({child.log}):\n{child.log_end()}"
                )
        ends = "\n".join(f"--- {child.log}\n{child.log_end(5)}" for child in children)
        raise NoCapacity(
            f"the mesh was not ready after {MESH_START_SECONDS:.0f} s. "
            f"The ends of the logs:\n{ends}"
        )
    finally:
        for task in (working, *exits):
            task.cancel()


async def _ready(address: str, certificates: Path | None, workers: int, http_address: str) -> None:
    """Return when the router answers, all workers have reported to it, and the edge listens."""
    if http_address:
        await _listens(http_address)
    async with _channel(address, certificates) as channel:
        watch: mesh_pb2_grpc.MeshServiceAsyncStub = mesh_pb2_grpc.MeshServiceStub(channel)  # type: ignore[assignment]
        async for look in watch.WatchMesh(
            mesh_pb2.WatchMeshRequest(interval_seconds=0.2), wait_for_ready=True
        ):
            if len(look.mesh.workers) >= workers:
                return


async def _listens(address: str) -> None:
    """Wait until a server listens on the address."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return


def _channel(address: str, certificates: Path | None) -> grpc.aio.Channel:
    if certificates is None:
        return grpc.aio.insecure_channel(address)
    ca, key, chain = (
        (certificates / name).read_bytes() for name in ("ca.pem", "admin.key", "admin.pem")
    )
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, chain))
