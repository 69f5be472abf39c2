"""`Client` and `AsyncClient`: the verbs of `shoal.verbs` over blocking gRPC and over grpc.aio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

from shoal import codec, verbs
from shoal.aio import AsyncTransport
from shoal.blocking import BlockingTransport, blocking
from shoal.status import Mesh
from shoal.transport import WATCH_MESH
from shoal.trust import Tls
from shoal.v1 import mesh_pb2
from shoal.verbs import ClientBase, ModelsBase


class AsyncModels(ModelsBase):
    list = verbs.list_models
    get = verbs.get_model
    load = verbs.load_model
    evict = verbs.evict_model
    pin = verbs.pin_model


class AsyncClient(ClientBase):
    """Talks to the mesh from an event loop: the one of its first call. Close it, or use `async with`."""

    encode = verbs.encode
    score = verbs.score
    extract = verbs.extract
    entities = verbs.entities
    classify = verbs.classify
    relations = verbs.relations
    mesh = verbs.mesh
    explain = verbs.explain
    healthy = verbs.healthy

    @property
    def models(self) -> AsyncModels:
        return AsyncModels(self)

    async def watch(self, interval_seconds: float = 1.0) -> AsyncIterator[Mesh]:
        """The mesh now and again after each interval, 0.2 to 60 seconds, as one router sees it. Raises ShoalError when that router
        goes; watch again then, and another is asked, if there is one."""
        request = mesh_pb2.WatchMeshRequest(interval_seconds=interval_seconds)
        with self._caller.following() as (address, metadata):
            async for reply in self._transport.stream(address, WATCH_MESH, request, metadata=metadata):
                yield codec.mesh(reply.mesh)

    def _open_transport(self, tls: Tls | None) -> AsyncTransport:
        self._transport = AsyncTransport(tls)
        return self._transport

    async def close(self) -> None:
        """Ends calls in flight and closes the connections. Idempotent."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class Models(ModelsBase):
    list = blocking(verbs.list_models)
    get = blocking(verbs.get_model)
    load = blocking(verbs.load_model)
    evict = blocking(verbs.evict_model)
    pin = blocking(verbs.pin_model)


class Client(ClientBase):
    """Talks to the mesh and waits for answers. Threads may share one. Close it, or use `with`. Make it after forking."""

    encode = blocking(verbs.encode)
    score = blocking(verbs.score)
    extract = blocking(verbs.extract)
    entities = blocking(verbs.entities)
    classify = blocking(verbs.classify)
    relations = blocking(verbs.relations)
    mesh = blocking(verbs.mesh)
    explain = blocking(verbs.explain)
    healthy = blocking(verbs.healthy)

    @property
    def models(self) -> Models:
        return Models(self)

    def watch(self, interval_seconds: float = 1.0) -> Iterator[Mesh]:
        """The mesh now and again after each interval, 0.2 to 60 seconds, as one router sees it. Raises ShoalError when that router
        goes; watch again then, and another is asked, if there is one."""
        request = mesh_pb2.WatchMeshRequest(interval_seconds=interval_seconds)
        with self._caller.following() as (address, metadata):
            for reply in self._transport.stream(address, WATCH_MESH, request, metadata=metadata):
                yield codec.mesh(reply.mesh)

    def _open_transport(self, tls: Tls | None) -> BlockingTransport:
        self._transport = BlockingTransport(tls)
        return self._transport

    def close(self) -> None:
        """Ends calls in flight and closes the connections. Idempotent."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
