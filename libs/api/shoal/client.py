"""`Client` and `AsyncClient`: the verbs of `shoal.verbs` over blocking gRPC and over grpc.aio."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from shoal.transport.aio import AsyncTransport
from shoal.transport.blocking import BlockingTransport, blocking, blocking_stream
from shoal.transport.trust import Tls
from shoal.verbs import aliases, inference, operation, tokens
from shoal.verbs.base import AliasesBase, ClientBase, ModelsBase


class AsyncModels(ModelsBase):
    list = operation.list_models
    get = operation.get_model
    load = operation.load_model
    evict = operation.evict_model
    pin = operation.pin_model


class AsyncAliases(AliasesBase):
    list = aliases.list_aliases
    get = aliases.get_alias
    set = aliases.set_alias
    remove = aliases.remove_alias
    start = aliases.start
    switch = aliases.switch
    rollback = aliases.rollback
    finish = aliases.finish


class AsyncClient(ClientBase):
    """A client for asyncio; belongs to the event loop of its first call. Close it, or use `async
    with`.
    """

    encode = inference.encode
    encode_stream = inference.encode_stream
    score = inference.score
    extract = inference.extract
    extract_stream = inference.extract_stream
    entities = inference.entities
    classify = inference.classify
    relations = inference.relations
    tokenize = tokens.tokenize
    detokenize = tokens.detokenize
    mesh = operation.mesh
    explain = operation.explain
    healthy = operation.healthy
    watch = operation.watch

    @property
    def models(self) -> AsyncModels:
        return AsyncModels(self)

    @property
    def aliases(self) -> AsyncAliases:
        return AsyncAliases(self)

    def _open_transport(self, tls: Tls | None) -> AsyncTransport:
        self._transport = AsyncTransport(tls)
        return self._transport

    async def close(self) -> None:
        """End calls in flight and close the connections. Idempotent."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class Models(ModelsBase):
    list = blocking(operation.list_models)
    get = blocking(operation.get_model)
    load = blocking(operation.load_model)
    evict = blocking(operation.evict_model)
    pin = blocking(operation.pin_model)


class Aliases(AliasesBase):
    list = blocking(aliases.list_aliases)
    get = blocking(aliases.get_alias)
    set = blocking(aliases.set_alias)
    remove = blocking(aliases.remove_alias)
    start = blocking(aliases.start)
    switch = blocking(aliases.switch)
    rollback = blocking(aliases.rollback)
    finish = blocking(aliases.finish)


class Client(ClientBase):
    """A blocking client, which threads may share. Close it, or use `with`. Create it after forking,
    not before.
    """

    encode = blocking(inference.encode)
    encode_stream = blocking_stream(inference.encode_stream)
    score = blocking(inference.score)
    extract = blocking(inference.extract)
    extract_stream = blocking_stream(inference.extract_stream)
    entities = blocking(inference.entities)
    classify = blocking(inference.classify)
    relations = blocking(inference.relations)
    tokenize = blocking(tokens.tokenize)
    detokenize = blocking(tokens.detokenize)
    mesh = blocking(operation.mesh)
    explain = blocking(operation.explain)
    healthy = blocking(operation.healthy)
    watch = blocking_stream(operation.watch)

    @property
    def models(self) -> Models:
        return Models(self)

    @property
    def aliases(self) -> Aliases:
        return Aliases(self)

    def _open_transport(self, tls: Tls | None) -> BlockingTransport:
        self._transport = BlockingTransport(tls)
        return self._transport

    def close(self) -> None:
        """End calls in flight and close the connections. Idempotent."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
