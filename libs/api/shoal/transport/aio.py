"""The transport of `AsyncClient`: grpc.aio channels, on the event loop of the first call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeVar

import grpc
import grpc.aio

from shoal.transport.channels import Channels, PooledChannel, channel_options
from shoal.transport.failures import translate
from shoal.transport.methods import ENCODE, EXTRACT, MULTIPLEX, SCORE, Method
from shoal.transport.multiplex import Streams
from shoal.transport.trust import Tls
from shoal.transport.wire import Metadata, Transport, Wire

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

MAX_STREAMED_BYTES: Final = 8 << 10
"""Larger requests are not for the stream: those behind them, and behind their answers, would
wait.
"""

_KINDS: Final = {ENCODE.path: "encode", SCORE.path: "score", EXTRACT.path: "extract"}
"""Methods of calls that may share a stream, and their fields of MultiplexedCall."""


class AsyncTransport(Transport):
    """A `Transport` that belongs to one event loop."""

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels = Channels(self._open, tls)
        self._streams = Streams(MULTIPLEX)

    async def send(
        self, address: str, method: Method[Q, R], request: Q, *, timeout: float, metadata: Metadata
    ) -> R:
        self._check_loop()
        pooled = self._channels.acquire(address)
        kind = _KINDS.get(method.path)
        try:
            if kind is not None:
                return await self._send_with_others(
                    pooled, kind, method, request, timeout, metadata
                )
            reply: R = await pooled.method(method)(request, timeout=timeout, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise translate(error, address) from None
        finally:
            for channel in self._channels.release(pooled):
                await channel.close()
        return reply

    async def _send_with_others(
        self,
        pooled: PooledChannel[grpc.aio.Channel],
        kind: str,
        method: Method[Q, R],
        request: Q,
        timeout: float,
        metadata: Metadata,
    ) -> R:
        """Send a call on a stream if other calls are in flight, else as `pooled.method` does."""
        group = self._streams.enter(pooled, metadata)
        try:
            stream = self._streams.find(group)
            if stream is None and group.calls > 1 and not group.is_limited:
                stream = self._streams.open(pooled, group)
            if stream is not None and len(body := method.serialize(request)) <= MAX_STREAMED_BYTES:
                return method.parse(await stream.call(kind, body, timeout, metadata))
            reply: R = await pooled.method(method)(request, timeout=timeout, metadata=metadata)
            return reply
        finally:
            self._streams.leave(pooled, group)

    async def stream(
        self,
        address: str,
        method: Method[Q, R],
        request: Q,
        *,
        timeout: float | None = None,
        metadata: Metadata,
    ) -> AsyncGenerator[R]:
        self._check_loop()
        pooled = self._channels.acquire(address)
        call = pooled.stream(method)(request, timeout=timeout, metadata=metadata)
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as error:
            raise translate(error, address) from None
        finally:
            call.cancel()
            for channel in self._channels.release(pooled):
                await channel.close()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def gather(
        self,
        jobs: Sequence[Callable[[Wire], Awaitable[T]]],
        *,
        limit: int,
        on_done: Callable[[int], None],
    ) -> list[T]:
        results: dict[int, T] = {}

        async def work(queue: Iterator[tuple[int, Callable[[Wire], Awaitable[T]]]]) -> None:
            for index, job in queue:  # All tasks share one iterator: each takes the next job.
                results[index] = await job(self)
                on_done(index)

        queue = iter(enumerate(jobs))
        tasks = [asyncio.create_task(work(queue)) for _ in range(min(limit, len(jobs)))]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return [results[index] for index in range(len(jobs))]

    async def close(self) -> None:
        """Close the channels, which ends calls in flight. Idempotent."""
        await self._streams.close()
        for channel in self._channels.close():
            await channel.close()

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise RuntimeError(
                "this AsyncClient belongs to another event loop, that of its first call; create "
                "one client for each event loop"
            )

    def _open(self, address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        options = channel_options(address, self._tls)
        if credentials is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, credentials, options)
