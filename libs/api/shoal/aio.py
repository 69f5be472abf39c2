"""The transport of `AsyncClient`: grpc.aio channels on the event loop of the first call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from shoal.transport import Metadata, Method, Tls, Wire, channel_options, translate

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


class AsyncTransport:
    """See `Transport`. Belongs to one event loop."""

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}
        # By address and path; the value's message types are those of the Method with that path.
        self._callables: dict[tuple[str, str], grpc.aio.UnaryUnaryMultiCallable[Any, Any]] = {}
        self._closed = False

    async def send(self, address: str, method: Method[Q, R], request: Q, *, timeout: float, metadata: Metadata) -> R:
        try:
            reply: R = await self._callable(address, method)(request, timeout=timeout, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise translate(error, address) from None
        return reply

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def gather(
        self, jobs: Sequence[Callable[[Wire], Awaitable[T]]], *, limit: int, on_done: Callable[[int], None]
    ) -> list[T]:
        results: dict[int, T] = {}

        async def work(waiting: Iterator[tuple[int, Callable[[Wire], Awaitable[T]]]]) -> None:
            for index, job in waiting:  # One iterator for all workers: each takes the next job.
                results[index] = await job(self)
                on_done(index)

        waiting = iter(enumerate(jobs))
        workers = [asyncio.create_task(work(waiting)) for _ in range(min(limit, len(jobs)))]
        try:
            await asyncio.gather(*workers)
        except BaseException:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            raise
        return [results[index] for index in range(len(jobs))]

    async def close(self) -> None:
        """Ends calls in flight. Idempotent."""
        self._closed = True
        channels = list(self._channels.values())
        self._channels.clear()
        self._callables.clear()
        for channel in channels:
            await channel.close()

    def _callable(self, address: str, method: Method[Q, R]) -> grpc.aio.UnaryUnaryMultiCallable[Any, Any]:
        self._check()
        key = (address, method.path)
        if key not in self._callables:
            if address not in self._channels:
                self._channels[address] = self._open(address)
            self._callables[key] = self._channels[address].unary_unary(
                method.path, request_serializer=method.serialize, response_deserializer=method.parse
            )
        return self._callables[key]

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("this client is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise RuntimeError("an AsyncClient belongs to the event loop of its first call; make one for each loop")

    def _open(self, address: str) -> grpc.aio.Channel:
        options = channel_options(self._tls)
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, self._tls.credentials(), options)
