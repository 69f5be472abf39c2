"""The transport of `Client`: blocking gRPC in the caller's thread, and a few threads for the parts of a long list."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from shoal.channels import Channels, Line
from shoal.errors import CannotConnect, ShoalError
from shoal.transport import Metadata, Method, Wire, channel_options, translate
from shoal.trust import Tls

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
        self._process = 0
        self._channels = Channels(self._open, tls)

    async def send(self, address: str, method: Method[Q, R], request: Q, *, timeout: float, metadata: Metadata) -> R:
        line = self.take(address)
        try:
            reply: R = line.method(method)(request, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise self.failed(line, error, address) from None
        finally:
            self.give_back(line)
        return reply

    async def receive(
        self, address: str, method: Method[Q, R], request: Q, take: Callable[[R], None], *, timeout: float, metadata: Metadata
    ) -> None:
        with closing(self.stream(address, method, request, timeout=timeout, metadata=metadata)) as replies:
            for reply in replies:
                take(reply)

    def stream(
        self, address: str, method: Method[Q, R], request: Q, *, timeout: float | None = None, metadata: Metadata
    ) -> Generator[R]:
        """The replies to a request, one after another, until somebody ends that. Raises ShoalError."""
        line = self.take(address)
        call = line.stream(method)(request, timeout=timeout, metadata=metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self.failed(line, error, address) from None
        finally:
            call.cancel()
            self.give_back(line)

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
        channels = self._channels.close()
        if self._process == os.getpid():
            for channel in channels:
                channel.close()

    def take(self, address: str) -> Line[grpc.Channel]:
        """What carries one call to `address`; to be given back after it."""
        self._check()
        return self._channels.take(address)

    def give_back(self, line: Line[grpc.Channel]) -> None:
        for channel in self._channels.give_back(line):
            channel.close()

    def failed(self, line: Line[grpc.Channel], error: grpc.RpcError, address: str) -> ShoalError:
        """What the error means. A line that cannot connect is given up: blocking gRPC gets on with connecting only while a call
        waits for it, and a channel that has failed once lets no call wait, so it might never connect again."""
        meant = translate(error, address)
        if isinstance(meant, CannotConnect):
            self._channels.lost(line)
        return meant

    def _check(self) -> None:
        if self._process not in (0, os.getpid()):
            raise RuntimeError("this client was used before the process forked, which connections do not survive; make one here")
        self._process = os.getpid()

    def _open(self, address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
        options = channel_options(address, self._tls)
        if credentials is None:
            return grpc.insecure_channel(address, options)
        return grpc.secure_channel(address, credentials, options)


class _Group:
    """The Wire of parts that run together: when one fails, the calls and waits of the others end at once."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._calls: set[grpc.Future[Any]] = set()

    async def send(self, address: str, method: Method[Q, R], request: Q, *, timeout: float, metadata: Metadata) -> R:
        with (
            self._line(address) as line,
            self._begun(lambda: line.method(method).future(request, timeout=timeout, metadata=metadata)) as call,
        ):
            reply: R = call.result()
        return reply

    async def receive(
        self, address: str, method: Method[Q, R], request: Q, take: Callable[[R], None], *, timeout: float, metadata: Metadata
    ) -> None:
        with (
            self._line(address) as line,
            self._begun(lambda: line.stream(method)(request, timeout=timeout, metadata=metadata)) as call,
        ):
            for reply in call:
                take(reply)

    @contextmanager
    def _line(self, address: str) -> Iterator[Line[grpc.Channel]]:
        line = self._transport.take(address)
        try:
            yield line
        except grpc.RpcError as error:
            self._check()  # a stream that `stop` has ended says so by an error of the call
            raise self._transport.failed(line, error, address) from None
        finally:
            self._transport.give_back(line)

    @contextmanager
    def _begun(self, begin: Callable[[], Any]) -> Iterator[Any]:
        """A call that `stop` ends."""
        with self._lock:
            self._check()
            call = begin()
            self._calls.add(call)
        try:
            yield call
        finally:
            call.cancel()  # one that has ended does not mind
            with self._lock:
                self._calls.discard(call)

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
