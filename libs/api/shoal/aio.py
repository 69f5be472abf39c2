"""The transport of `AsyncClient`: grpc.aio channels on the event loop of the first call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import TypeVar

import grpc
import grpc.aio

from shoal.channels import Channels
from shoal.transport import Metadata, Method, Wire, channel_options, translate
from shoal.trust import Tls

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


class AsyncTransport:
    """See `Transport`. Belongs to one event loop."""

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels = Channels(self._open, tls)

    async def send(self, address: str, method: Method[Q, R], request: Q, *, timeout: float, metadata: Metadata) -> R:
        self._check()
        line = self._channels.take(address)
        try:
            reply: R = await line.method(method)(request, timeout=timeout, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise translate(error, address) from None
        finally:
            for channel in self._channels.give_back(line):
                await channel.close()
        return reply

    async def receive(
        self, address: str, method: Method[Q, R], request: Q, take: Callable[[R], None], *, timeout: float, metadata: Metadata
    ) -> None:
        async with aclosing(self.stream(address, method, request, timeout=timeout, metadata=metadata)) as replies:
            async for reply in replies:
                take(reply)

    async def stream(
        self, address: str, method: Method[Q, R], request: Q, *, timeout: float | None = None, metadata: Metadata
    ) -> AsyncGenerator[R]:
        """The replies to a request, one after another, until somebody ends that. Raises ShoalError."""
        self._check()
        line = self._channels.take(address)
        call = line.stream(method)(request, timeout=timeout, metadata=metadata)
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as error:
            raise translate(error, address) from None
        finally:
            call.cancel()
            for channel in self._channels.give_back(line):
                await channel.close()

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
        for channel in self._channels.close():
            await channel.close()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise RuntimeError("an AsyncClient belongs to the event loop of its first call; make one for each loop")

    def _open(self, address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        options = channel_options(address, self._tls)
        if credentials is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, credentials, options)
