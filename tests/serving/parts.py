"""A server with one method of each kind, and its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
from shoal.v1 import (
    mesh_pb2,
    mesh_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

from libs.serving import GrpcServer, Security, Service, current_call, serving
from libs.serving.calls.call import Call

LOAD = "/shoal.v1.ModelService/LoadModel"
LIST = "/shoal.v1.ModelService/ListModels"
GET_MESH = "/shoal.v1.MeshService/GetMesh"
WATCH = "/shoal.v1.MeshService/WatchMesh"
HEARTBEAT = "/shoal.v1.WorkerService/Heartbeat"
HEALTH = "/grpc.health.v1.Health/Check"

ADMIN = "admins-token-0123456789"
CLIENT = "clients-token-0123456789"
ROAMING = "gateways-token-0123456789"
WORKER = "workers-token-0123456789"


def write_tokens(path: Path, *tokens: str) -> Path:
    """Write the tokens above, or the named ones."""
    holders = {
        ADMIN: ("ops", "admin", "acme"),
        CLIENT: ("frontend", "client", "acme"),
        ROAMING: ("gateway", "client", "*"),
        WORKER: ("pool-a", "worker", "default"),
    }
    lines = ["tokens:"]
    for token in tokens or holders:
        subject, role, tenant = holders[token]
        lines.append(
            f"  - {{token: '{token}', subject: {subject}, role: {role}, tenant: '{tenant}'}}"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


class Calls:
    """Records calls. `go` lets heartbeats return and watches continue."""

    def __init__(self) -> None:
        self.seen: list[Call] = []
        self.waiting = 0
        self.go = asyncio.Event()

    def note(self) -> None:
        self.seen.append(current_call())

    async def wait(self) -> None:
        self.waiting += 1
        await self.go.wait()


class _Models(models_pb2_grpc.ModelServiceServicer):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def ListModels(self, request: Any, context: Any) -> models_pb2.ListModelsResponse:
        self._calls.note()
        return models_pb2.ListModelsResponse()

    async def LoadModel(self, request: Any, context: Any) -> models_pb2.LoadModelResponse:
        self._calls.note()
        return models_pb2.LoadModelResponse()


class _Mesh(mesh_pb2_grpc.MeshServiceServicer):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def GetMesh(self, request: Any, context: Any) -> mesh_pb2.GetMeshResponse:
        self._calls.note()
        return mesh_pb2.GetMeshResponse()

    async def WatchMesh(
        self, request: Any, context: Any
    ) -> AsyncIterator[mesh_pb2.WatchMeshResponse]:
        self._calls.note()
        yield mesh_pb2.WatchMeshResponse()
        await self._calls.wait()
        yield mesh_pb2.WatchMeshResponse()


class _Workers(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def Heartbeat(self, request: Any, context: Any) -> worker_pb2.HeartbeatResponse:
        self._calls.note()
        await self._calls.wait()
        return worker_pb2.HeartbeatResponse()


@asynccontextmanager
async def running_server(
    calls: Calls, security: Security | None = None, **options: Any
) -> AsyncIterator[GrpcServer]:
    # Only the methods of each service that tests call.
    models, mesh, workers = _Models(calls), _Mesh(calls), _Workers(calls)  # type: ignore[abstract]
    add_models = partial(models_pb2_grpc.add_ModelServiceServicer_to_server, models)
    add_mesh = partial(mesh_pb2_grpc.add_MeshServiceServicer_to_server, mesh)
    add_workers = partial(worker_pb2_grpc.add_WorkerServiceServicer_to_server, workers)
    services = [
        Service("shoal.v1.ModelService", add_models),
        Service("shoal.v1.MeshService", add_mesh),
        Service("shoal.v1.WorkerService", add_workers, is_internal=True),
    ]
    async with serving(
        "127.0.0.1:0", services, security=security, grace_seconds=1.0, **options
    ) as server:
        await server.set_health(True)
        yield server


class Caller:
    """One connection, and the metadata that it sends with each call."""

    def __init__(self, channel: grpc.aio.Channel, token: str = "", tenant: str = "") -> None:
        self.channel = channel
        self.metadata: list[tuple[str, str]] = []
        if token:
            self.metadata.append(("authorization", f"Bearer {token}"))
        if tenant:
            self.metadata.append(("x-shoal-tenant", tenant))

    async def call(
        self, method: str, request: Any = b"", timeout: float = 120.0, **more: Any
    ) -> bytes:
        """Return the reply's bytes."""
        return cast(bytes, await self.start(method, request, timeout, **more))

    def start(self, method: str, request: Any = b"", timeout: float = 120.0, **more: Any) -> Any:
        body = request if isinstance(request, bytes) else request.SerializeToString()
        said: Any = self.channel.unary_unary(method)
        return said(body, timeout=timeout, metadata=self.metadata, **more)

    def without_request(self, method: str) -> Any:
        """Start a call without a request."""
        said: Any = self.channel.stream_unary(method)
        return said(timeout=120.0, metadata=self.metadata)

    def stream(self, method: str, request: bytes = b"", timeout: float = 120.0) -> Any:
        said: Any = self.channel.unary_stream(method)
        return said(request, timeout=timeout, metadata=self.metadata)

    async def code(
        self,
        method: str,
        request: Any = b"",
        timeout: float = 120.0,
        *,
        is_stream: bool | None = None,
    ) -> grpc.StatusCode:
        """Return the status of the call; OK for a stream that has begun to reply."""
        try:
            if method == WATCH if is_stream is None else is_stream:
                call = self.stream(method, request, timeout)
                if await call.read() is grpc.aio.EOF:
                    return cast(grpc.StatusCode, await call.code())
                call.cancel()
            else:
                await self.call(method, request, timeout)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@asynccontextmanager
async def connected(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    *,
    token: str = "",
    tenant: str = "",
) -> AsyncIterator[Caller]:
    """Open a separate connection."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    async with AsyncExitStack() as stack:
        made = (
            grpc.aio.secure_channel(address, credentials, options=options)
            if credentials is not None
            else grpc.aio.insecure_channel(address, options=options)
        )
        yield Caller(await stack.enter_async_context(made), token, tenant)
