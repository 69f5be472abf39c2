"""The transport of `Client`: blocking gRPC in the caller's thread, and a few threads for the parts of a long list."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from shoal.transport import Metadata, Method, Tls, Wire, channel_options, translate

S = TypeVar("S")
P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")


def finish(work: Awaitable[T]) -> T:
    """Runs a coroutine that never suspends, which is what every verb is over a BlockingTransport."""
    steps = work.__await__()
    try:
        next(steps)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("a verb suspended over a blocking transport. This is a bug.")


def blocking(verb: Callable[Concatenate[S, P], Coroutine[object, None, T]]) -> Callable[Concatenate[S, P], T]:
    """The same method, as a function that returns its answer; signature and documentation are kept."""

    @wraps(verb)
    def call(client: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return finish(verb(client, *args, **kwargs))

    return call


class BlockingTransport:
    """See `Transport`. Threads may share one; a forked child may not."""

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._process = 0
        self._channels: dict[str, grpc.Channel] = {}
        # By address and path; the value's message types are those of the Method with that path.
        self._callables: dict[tuple[str, str], grpc.UnaryUnaryMultiCallable[Any, Any]] = {}
        self._closed = False

    async def send(self, address: str, method: Method[Q, R], request: Q, *, timeout: float, metadata: Metadata) -> R:
        try:
            reply: R = self.callable(address, method)(request, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise translate(error, address) from None
        return reply

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 -- this is the blocking transport; see `finish`

    async def gather(
        self, jobs: Sequence[Callable[[Wire], Awaitable[T]]], *, limit: int, on_done: Callable[[int], None]
    ) -> list[T]:
        group = _Group(self)

        def run(job: Callable[[Wire], Awaitable[T]]) -> T:
            return finish(job(group))

        with ThreadPoolExecutor(min(limit, len(jobs)), thread_name_prefix="shoal") as threads:
            futures: dict[Future[T], int] = {threads.submit(run, job): index for index, job in enumerate(jobs)}
            try:
                for future in as_completed(futures):
                    future.result()
                    on_done(futures[future])
            except BaseException:  # Also an interrupt: the threads must not wait for answers that nobody wants.
                threads.shutdown(wait=False, cancel_futures=True)
                group.stop()
                raise
        return [future.result() for future in futures]

    def close(self) -> None:
        """Ends calls in flight. Idempotent."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
            self._channels.clear()
            self._callables.clear()
        if self._process == os.getpid():
            for channel in channels:
                channel.close()

    def callable(self, address: str, method: Method[Q, R]) -> grpc.UnaryUnaryMultiCallable[Any, Any]:
        """What sends a request of `method` to `address`."""
        found = self._callables.get((address, method.path))
        if found is not None and self._process == os.getpid():
            return found
        with self._lock:
            self._check()
            if address not in self._channels:
                self._channels[address] = self._open(address)
            found = self._channels[address].unary_unary(
                method.path, request_serializer=method.serialize, response_deserializer=method.parse
            )
            self._callables[address, method.path] = found
            return found

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("this client is closed")
        if self._process not in (0, os.getpid()):
            raise RuntimeError("this client was used before the process forked, which connections do not survive; make one here")
        self._process = os.getpid()

    def _open(self, address: str) -> grpc.Channel:
        options = channel_options(self._tls)
        if self._tls is None:
            return grpc.insecure_channel(address, options)
        return grpc.secure_channel(address, self._tls.credentials(), options)


class _Group:
    """The Wire of parts that run together: when one fails, the calls and waits of the others end at once."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._calls: set[grpc.Future[Any]] = set()

    async def send(self, address: str, method: Method[Q, R], request: Q, *, timeout: float, metadata: Metadata) -> R:
        with self._lock:
            self._check()
            call = self._transport.callable(address, method).future(request, timeout=timeout, metadata=metadata)
            self._calls.add(call)
        try:
            reply: R = call.result()
        except grpc.RpcError as error:
            raise translate(error, address) from None
        finally:
            with self._lock:
                self._calls.discard(call)
        return reply

    async def sleep(self, seconds: float) -> None:
        self._stopped.wait(seconds)
        self._check()

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()
            for call in self._calls:
                call.cancel()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise grpc.FutureCancelledError
