"""`Client` and `AsyncClient`: the verbs of `shoal.verbs` over blocking gRPC and over grpc.aio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from types import TracebackType
from typing import Self, Unpack

from shoal.options import EncodeStreamOptions, StreamOptions, with_options
from shoal.requests import codec
from shoal.requests.encode import EncodeParts, EncodePlan, Encoding
from shoal.requests.extract import ExtractPlan
from shoal.results import DataType, Delta, EncodeResult, ExtractResult, Form
from shoal.status import Mesh
from shoal.tasks import Chunking, Items, ReadText, Role
from shoal.transport.aio import AsyncTransport
from shoal.transport.blocking import BlockingTransport, blocking
from shoal.transport.methods import ENCODE_STREAM, EXTRACT_STREAM, WATCH_MESH
from shoal.transport.trust import Tls
from shoal.v1 import mesh_pb2
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
    score = inference.score
    extract = inference.extract
    entities = inference.entities
    classify = inference.classify
    relations = inference.relations
    tokenize = tokens.tokenize
    detokenize = tokens.detokenize
    mesh = operation.mesh
    explain = operation.explain
    healthy = operation.healthy

    @property
    def models(self) -> AsyncModels:
        return AsyncModels(self)

    @property
    def aliases(self) -> AsyncAliases:
        return AsyncAliases(self)

    @with_options
    async def encode_stream(
        self,
        model: str,
        items: Items,
        *,
        role: Role | None = None,
        instruction: str = "",
        representations: Form | Sequence[Form] = (),
        data_type: DataType | None = None,
        dimensions: int = 0,
        normalize: bool | None = None,
        chunking: Chunking | None = None,
        expect_embedding_id: str = "",
        **options: Unpack[EncodeStreamOptions],
    ) -> AsyncGenerator[EncodeResult]:
        """Yield vectors as they are computed: of a long text or document in chunks, the first
        chunks while later pages are read.

        Each `EncodeResult` has the next rows. With `chunking`, `result.chunks[0]` is of item
        `result.first_item`, and the next result may have more of it; without, row 0 is of that
        item. The results add up to that of `encode`, which explains the arguments. The call is one
        request and is not retried. Raises ShoalError.
        """
        encoding = Encoding(
            role,
            representations,
            data_type,
            dimensions,
            normalize,
            instruction,
            chunking=chunking,
            expect_embedding_id=expect_embedding_id,
        )
        parts = EncodeParts(EncodePlan(items, encoding, model, options))
        with self._caller.streaming() as (address, metadata):
            seconds = self._caller.seconds(options.get("timeout"))
            replies = self._transport.stream(
                address, ENCODE_STREAM, parts.request(), timeout=seconds, metadata=metadata
            )
            async with aclosing(replies):
                async for reply in replies:
                    yield parts.take(reply)

    @with_options
    async def extract_stream(
        self,
        model: str,
        items: Items,
        task: ReadText,
        **options: Unpack[StreamOptions],
    ) -> AsyncGenerator[Delta | ExtractResult]:
        """Generate text and stream it: yield `Delta`s, and finally the whole `ExtractResult`.

        Models that generate no text, use beam search or return regions yield only the result. The
        call is one request and is not retried. Raises ShoalError.
        """
        plan = ExtractPlan(items, task, model, options)
        with self._caller.streaming() as (address, metadata):
            seconds = self._caller.seconds(options.get("timeout"))
            replies = self._transport.stream(
                address, EXTRACT_STREAM, plan.whole(), timeout=seconds, metadata=metadata
            )
            async with aclosing(replies):
                async for reply in replies:
                    for part in plan.written(reply):
                        yield part

    async def watch(self, interval_seconds: float = 1.0) -> AsyncIterator[Mesh]:
        """Yield the state of the mesh now and after each interval, 0.2 to 60 seconds, as one router
        sees it. Raises ShoalError when that router is lost; calling `watch` again then asks the
        next router, if there is one.
        """
        request = mesh_pb2.WatchMeshRequest(interval_seconds=interval_seconds)
        with self._caller.streaming() as (address, metadata):
            async for reply in self._transport.stream(
                address, WATCH_MESH, request, metadata=metadata
            ):
                yield codec.mesh(reply.mesh)

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
    score = blocking(inference.score)
    extract = blocking(inference.extract)
    entities = blocking(inference.entities)
    classify = blocking(inference.classify)
    relations = blocking(inference.relations)
    tokenize = blocking(tokens.tokenize)
    detokenize = blocking(tokens.detokenize)
    mesh = blocking(operation.mesh)
    explain = blocking(operation.explain)
    healthy = blocking(operation.healthy)

    @property
    def models(self) -> Models:
        return Models(self)

    @property
    def aliases(self) -> Aliases:
        return Aliases(self)

    @with_options
    def encode_stream(
        self,
        model: str,
        items: Items,
        *,
        role: Role | None = None,
        instruction: str = "",
        representations: Form | Sequence[Form] = (),
        data_type: DataType | None = None,
        dimensions: int = 0,
        normalize: bool | None = None,
        chunking: Chunking | None = None,
        expect_embedding_id: str = "",
        **options: Unpack[EncodeStreamOptions],
    ) -> Generator[EncodeResult]:
        """Yield vectors as they are computed: of a long text or document in chunks, the first
        chunks while later pages are read.

        Each `EncodeResult` has the next rows. With `chunking`, `result.chunks[0]` is of item
        `result.first_item`, and the next result may have more of it; without, row 0 is of that
        item. The results add up to that of `encode`, which explains the arguments. The call is one
        request and is not retried. Raises ShoalError.
        """
        encoding = Encoding(
            role,
            representations,
            data_type,
            dimensions,
            normalize,
            instruction,
            chunking=chunking,
            expect_embedding_id=expect_embedding_id,
        )
        parts = EncodeParts(EncodePlan(items, encoding, model, options))
        with self._caller.streaming() as (address, metadata):
            seconds = self._caller.seconds(options.get("timeout"))
            replies = self._transport.stream(
                address, ENCODE_STREAM, parts.request(), timeout=seconds, metadata=metadata
            )
            with closing(replies):
                for reply in replies:
                    yield parts.take(reply)

    @with_options
    def extract_stream(
        self,
        model: str,
        items: Items,
        task: ReadText,
        **options: Unpack[StreamOptions],
    ) -> Generator[Delta | ExtractResult]:
        """Generate text and stream it: yield `Delta`s, and finally the whole `ExtractResult`.

        Models that generate no text, use beam search or return regions yield only the result. The
        call is one request and is not retried. Raises ShoalError.
        """
        plan = ExtractPlan(items, task, model, options)
        with self._caller.streaming() as (address, metadata):
            seconds = self._caller.seconds(options.get("timeout"))
            replies = self._transport.stream(
                address, EXTRACT_STREAM, plan.whole(), timeout=seconds, metadata=metadata
            )
            with closing(replies):
                for reply in replies:
                    yield from plan.written(reply)

    def watch(self, interval_seconds: float = 1.0) -> Iterator[Mesh]:
        """Yield the state of the mesh now and after each interval, 0.2 to 60 seconds, as one router
        sees it. Raises ShoalError when that router is lost; calling `watch` again then asks the
        next router, if there is one.
        """
        request = mesh_pb2.WatchMeshRequest(interval_seconds=interval_seconds)
        with self._caller.streaming() as (address, metadata):
            for reply in self._transport.stream(address, WATCH_MESH, request, metadata=metadata):
                yield codec.mesh(reply.mesh)

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
