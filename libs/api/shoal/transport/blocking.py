"""The transport of `Client`: blocking gRPC in the caller's thread, and a thread pool for the parts
of a long list.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from shoal.errors import CannotConnect, ShoalError
from shoal.transport.channels import Channels, PooledChannel, channel_options
from shoal.transport.failures import translate
from shoal.transport.methods import Method
from shoal.transport.trust import Tls
from shoal.transport.wire import Metadata, Transport, Wire

S = TypeVar("S")
P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


def finish(coroutine: Awaitable[T]) -> T:
    """Run a coroutine that never suspends to completion; every verb over a BlockingTransport is
    one.
    """
    steps = coroutine.__await__()
    try:
        next(steps)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError(
        "a coroutine suspended over the blocking transport; this is a fault of the client, "
        "please report it"
    )


def blocking(
    verb: Callable[Concatenate[S, P], Coroutine[object, None, T]],
) -> Callable[Concatenate[S, P], T]:
    """Return the coroutine method `verb` as a method that blocks until it has the result; signature
    and documentation are kept.
    """

    @wraps(verb)
    def call(client: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return finish(verb(client, *args, **kwargs))

    return call


def blocking_stream(
    verb: Callable[Concatenate[S, P], AsyncGenerator[T]],
) -> Callable[Concatenate[S, P], Generator[T]]:
    """Return the method `verb`, an asynchronous generator, as a generator that blocks until it has
    the next item; signature and documentation are kept.
    """

    @wraps(verb)
    def call(client: S, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T]:
        return _blocking_items(verb(client, *args, **kwargs))

    declared = signature(verb)
    returns = declared.return_annotation.removeprefix("Async")
    call.__signature__ = declared.replace(return_annotation=returns)  # type: ignore[attr-defined]
    return call


def _blocking_items(items: AsyncGenerator[T]) -> Generator[T]:
    try:
        while True:
            yield finish(anext(items))
    except StopAsyncIteration:
        return
    finally:
        finish(items.aclose())


class BlockingTransport(Transport):
    """A `Transport` that threads may share; a forked child process may not."""

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls
        self._process = 0
        self._channels = Channels(self._open, tls)

    async def send(
        self, address: str, method: Method[Q, R], request: Q, *, timeout: float, metadata: Metadata
    ) -> R:
        pooled = self.acquire(address)
        try:
            reply: R = pooled.method(method)(request, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise self.failed(pooled, error, address) from None
        finally:
            self.release(pooled)
        return reply

    async def stream(
        self,
        address: str,
        method: Method[Q, R],
        request: Q,
        *,
        timeout: float | None = None,
        metadata: Metadata,
    ) -> AsyncGenerator[R]:
        pooled = self.acquire(address)
        call = pooled.stream(method)(request, timeout=timeout, metadata=metadata)
        try:
            for reply in call:
                yield reply
        except grpc.RpcError as error:
            raise self.failed(pooled, error, address) from None
        finally:
            call.cancel()
            self.release(pooled)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 -- this is the blocking transport; see `finish`

    async def gather(
        self,
        jobs: Sequence[Callable[[Wire], Awaitable[T]]],
        *,
        limit: int,
        on_done: Callable[[int], None],
    ) -> list[T]:
        group = _Group(self)

        def run(job: Callable[[Wire], Awaitable[T]]) -> T:
            return finish(job(group))

        with ThreadPoolExecutor(min(limit, len(jobs)), thread_name_prefix="shoal") as threads:
            futures: dict[Future[T], int] = {
                threads.submit(run, job): index for index, job in enumerate(jobs)
            }
            try:
                for future in as_completed(futures):
                    future.result()
                    on_done(futures[future])
            except BaseException:  # KeyboardInterrupt, too: the threads must not wait any longer
                threads.shutdown(wait=False, cancel_futures=True)
                group.stop()
                raise
        return [future.result() for future in futures]

    def close(self) -> None:
        """Close the channels, which ends calls in flight. Idempotent."""
        channels = self._channels.close()
        if self._process == os.getpid():
            for channel in channels:
                channel.close()

    def acquire(self, address: str) -> PooledChannel[grpc.Channel]:
        """Return the channel for one call to `address`; `release` it after the call."""
        self._check_process()
        return self._channels.acquire(address)

    def release(self, pooled: PooledChannel[grpc.Channel]) -> None:
        for channel in self._channels.release(pooled):
            channel.close()

    def failed(
        self, pooled: PooledChannel[grpc.Channel], error: grpc.RpcError, address: str
    ) -> ShoalError:
        """Return the ShoalError of a failed call. A channel that cannot connect is replaced:
        blocking gRPC connects only while a call waits for the channel, and one that has failed once
        fails calls at once, so it might never connect again.
        """
        failure = translate(error, address)
        if isinstance(failure, CannotConnect):
            self._channels.discard(pooled)
        return failure

    def _check_process(self) -> None:
        if self._process not in (0, os.getpid()):
            raise RuntimeError(
                "this client was used before the process forked, and connections do not survive "
                "that; create a new client"
            )
        self._process = os.getpid()

    def _open(self, address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
        options = channel_options(address, self._tls)
        if credentials is None:
            return grpc.insecure_channel(address, options)
        return grpc.secure_channel(address, credentials, options)


class _Group:
    """The Wire of the requests of one `gather`: when one fails, the calls and waits of the others
    end at once.
    """

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._calls: set[grpc.Future[Any]] = set()

    async def send(
        self, address: str, method: Method[Q, R], request: Q, *, timeout: float, metadata: Metadata
    ) -> R:
        with (
            self._channel(address) as pooled,
            self._cancellable(
                lambda: pooled.method(method).future(request, timeout=timeout, metadata=metadata)
            ) as call,
        ):
            reply: R = call.result()
        return reply

    async def receive(
        self,
        address: str,
        method: Method[Q, R],
        request: Q,
        take: Callable[[R], None],
        *,
        timeout: float,
        metadata: Metadata,
    ) -> None:
        with (
            self._channel(address) as pooled,
            self._cancellable(
                lambda: pooled.stream(method)(request, timeout=timeout, metadata=metadata)
            ) as call,
        ):
            for reply in call:
                take(reply)

    @contextmanager
    def _channel(self, address: str) -> Iterator[PooledChannel[grpc.Channel]]:
        pooled = self._transport.acquire(address)
        try:
            yield pooled
        except grpc.RpcError as error:
            self._check_stopped()  # a stream that `stop` has cancelled fails with an RpcError, too
            raise self._transport.failed(pooled, error, address) from None
        finally:
            self._transport.release(pooled)

    @contextmanager
    def _cancellable(self, begin: Callable[[], Any]) -> Iterator[Any]:
        """Begin a call that `stop` can cancel."""
        with self._lock:
            self._check_stopped()
            call = begin()
            self._calls.add(call)
        try:
            yield call
        finally:
            call.cancel()  # no effect on a call that has ended
            with self._lock:
                self._calls.discard(call)

    async def sleep(self, seconds: float) -> None:
        self._stopped.wait(seconds)
        self._check_stopped()

    def stop(self) -> None:
        """Cancel the calls in flight and refuse new ones."""
        with self._lock:
            self._stopped.set()
            for call in self._calls:
                call.cancel()

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise grpc.FutureCancelledError
