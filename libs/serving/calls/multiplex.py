"""Many calls of one client or worker on one stream (the method `Multiplex` of a service) instead of
a gRPC call for each. `shoal.transport.multiplex` is the other side.

Each call goes through the interceptor's behaviour of its method, as a separate call would:
authentication, limits, drain, errors, metrics, spans and audit are therefore the same. Only the
transport differs: a message on an open stream takes a third of the CPU of a unary call of grpc.aio,
and concurrent calls and answers share a message.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, cast

import grpc
from google.protobuf.message import Message
from shoal.v1 import multiplex_pb2 as pb

from libs.errors import InvalidInput
from libs.serving.calls.call import REQUEST_ID_HEADER
from libs.serving.calls.guard import abort
from libs.serving.calls.status import DETAILS_HEADER
from libs.serving.security.authentication import AuthContext, Metadata
from libs.telemetry.traces import TRACEPARENT

MAX_STREAM_MESSAGE_BYTES: Final = 4 << 20
"""Maximum bytes of a message from a client."""

MAX_STREAM_SECONDS: Final = 240.0
"""Maximum age of a stream, so that its peer finds new routers. Shoal's clients and workers replace
streams earlier.
"""

MESSAGE_CALLS: Final = 10_000
REQUEST_ID_CHARACTERS: Final = 128
TRACEPARENT_CHARACTERS: Final = 256
TRACESTATE_CHARACTERS: Final = 512

_MAX_CALLS_PER_STREAM: Final = 256
"""Maximum calls in progress and unwritten answers of one stream. At the maximum no more calls are
started, so that a client that does not read its answers cannot fill the memory.
"""

_MAX_BYTES_PER_STREAM: Final = 16 << 20
"""Requests in progress and unwritten answers of this size together stop the reading, too."""

_ANSWER_BYTES: Final = 1 << 20
"""Maximum size of the answers of a message that has several: a client that can read each of them
alone can read the message.
"""

_TEXT_LIMITS: Final = (
    ("request_id", REQUEST_ID_CHARACTERS),
    ("traceparent", TRACEPARENT_CHARACTERS),
    ("tracestate", TRACESTATE_CHARACTERS),
)
_TRACESTATE: Final = "tracestate"
_PER_CALL_METADATA: Final = frozenset({REQUEST_ID_HEADER, TRACEPARENT, _TRACESTATE})
"""Metadata that is specific to a call."""

Context = grpc.aio.ServicerContext[Any, Any]
Unary = Callable[[object, Any], Awaitable[Message | None]]
Pairs = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class StreamCall:
    """A call that the stream of a service carries."""

    name: str
    """Its name within the service, such as `Encode`, for permissions, limits and reports."""
    request: type[Message]
    handle: Callable[[Any, Any], Message | Awaitable[Message]]
    """A coroutine function of the request and a context, typed as by the stubs of gRPC."""


class Carrier(Protocol):
    """The part of a stream's context that its calls use."""

    def auth_context(self) -> AuthContext: ...

    def peer(self) -> str: ...


class _AbortedError(Exception):
    """A call has ended with a status other than OK."""

    def __init__(self, code: grpc.StatusCode, message: str, details: bytes) -> None:
        super().__init__(message)
        self.failure = pb.MultiplexedFailure(code=code.value[0], message=message, details=details)


class MultiplexedRpc:
    """The context of one call: the part of grpc.aio.ServicerContext that the interceptor and unary
    handlers use.
    """

    def __init__(
        self, carrier: Carrier, metadata: Metadata, body: bytes, until: float | None
    ) -> None:
        self._carrier = carrier
        self._metadata = metadata
        self.body = body
        """The complete serialised request."""
        self._until = until
        # Mutable state: callbacks for after the answer was written.
        self._on_done: list[Callable[[Any], None]] = []

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def auth_context(self) -> AuthContext:
        return self._carrier.auth_context()

    def peer(self) -> str:
        return self._carrier.peer()

    def time_remaining(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def set_trailing_metadata(self, metadata: Pairs) -> None:
        """Ignore the request ID, which the client has chosen."""

    async def send_initial_metadata(self, metadata: Pairs) -> None:
        """Ignore the request ID, as `set_trailing_metadata` does."""

    async def abort(self, code: grpc.StatusCode, message: str, trailing: Pairs) -> None:
        raise _AbortedError(
            code,
            message,
            next((cast(bytes, value) for key, value in trailing if key == DETAILS_HEADER), b""),
        )

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._on_done.append(callback)

    def done(self) -> None:
        """Mark the answer as written or dropped."""
        callbacks, self._on_done = self._on_done, []
        for callback in callbacks:
            callback(self)


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer to write, and its call."""

    rpc: MultiplexedRpc
    number: int
    response: bytes = b""
    failure: pb.MultiplexedFailure | None = None

    @property
    def size(self) -> int:
        return len(self.response) if self.failure is None else self.failure.ByteSize()


class Multiplexer:
    """The handler of the stream, for the interceptor. `unary` has the wrapped behaviour of each
    call, by the field of MultiplexedCall.
    """

    request_streaming: Final = True
    response_streaming: Final = True

    def __init__(self, unary: Mapping[str, Unary]) -> None:
        self.response_serializer = pb.MultiplexResponse.SerializeToString
        self._unary = unary

    def stream_stream(
        self, requests: AsyncIterator[pb.MultiplexRequest], context: Context
    ) -> AsyncGenerator[Message]:
        return _Stream(self._unary, context).run(requests)


class _Stream:
    """One stream, and its calls in progress."""

    def __init__(self, unary: Mapping[str, Unary], context: Context) -> None:
        self._unary = unary
        self._carrier = cast(Carrier, context)
        metadata = cast(Metadata, context.invocation_metadata() or ())
        self._metadata = tuple(pair for pair in metadata if pair[0] not in _PER_CALL_METADATA)
        # Mutable state: calls in progress, by number; answers to write; the number of answers that
        # are not written, with those of the message that is being written; the size of these
        # answers and of the requests in progress.
        self._calls: dict[int, asyncio.Task[_Answer]] = {}
        self._answers: list[_Answer] = []
        self._unwritten = 0
        self._bytes = 0
        self._news = asyncio.Event()
        self._slot_free = asyncio.Event()
        # The next message, if it was asked for while a call waited for a slot.
        self._ahead: asyncio.Future[pb.MultiplexRequest | None] | None = None

    async def run(
        self, requests: AsyncIterator[pb.MultiplexRequest]
    ) -> AsyncGenerator[pb.MultiplexResponse]:
        """Yield answers until the client has closed its side and all calls are answered, or the
        stream is too old.

        Leaving it cancels the calls in progress. Raises InvalidInput for an invalid message,
        Unauthenticated once the credential is invalid.
        """
        reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda _: self._news.set())
        expiry = asyncio.get_running_loop().call_later(MAX_STREAM_SECONDS, reading.cancel)
        written: list[_Answer] = []
        try:
            while not reading.done() or self._calls or self._answers:
                await self._news.wait()
                self._news.clear()
                while self._answers:
                    written = self._take()
                    yield _message(written)
                    for answer in written:
                        answer.rpc.done()
                        self._bytes -= answer.size
                    self._unwritten -= len(written)
                    self._slot_free.set()
                if reading.done() and not reading.cancelled() and reading.exception():
                    break
            if not reading.cancelled():
                await reading
        finally:
            expiry.cancel()
            tasks = [reading, *self._calls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for answer in (*written, *self._answers):
                answer.rpc.done()

    async def _read(self, requests: AsyncIterator[pb.MultiplexRequest]) -> None:
        try:
            while True:
                ahead, self._ahead = self._ahead, None
                request = await (ahead or anext(requests, None))
                if request is None:
                    return
                _check(request)
                await self._start_all(request.calls, time.monotonic(), requests)
                del ahead, request  # Free it while waiting for the next one.
        finally:
            if self._ahead is not None:
                self._ahead.cancel()

    async def _start_all(
        self,
        calls: Sequence[pb.MultiplexedCall],
        arrived: float,
        requests: AsyncIterator[pb.MultiplexRequest],
    ) -> None:
        is_searched = False
        for index, call in enumerate(calls):
            kind = call.WhichOneof("call") or ""
            if kind == "cancelled":
                self._cancel(call.number)
                continue
            while self._is_full():
                self._slot_free.clear()
                if not is_searched:
                    is_searched = True
                    self._cancel_all(calls[index:])
                    self._read_ahead(requests)
                await self._slot_free.wait()
            self._start(call, kind, arrived)

    def _read_ahead(self, requests: AsyncIterator[pb.MultiplexRequest]) -> None:
        """Read the next message while a call waits for a slot, because it may cancel those that
        have one. Its own calls wait for their turn.
        """

        def arrived(ahead: asyncio.Future[pb.MultiplexRequest | None]) -> None:
            if not ahead.cancelled() and not ahead.exception() and (request := ahead.result()):
                self._cancel_all(request.calls)

        self._ahead = asyncio.ensure_future(anext(requests, None))
        self._ahead.add_done_callback(arrived)

    def _cancel_all(self, calls: Iterable[pb.MultiplexedCall]) -> None:
        for call in calls:
            if call.cancelled:
                self._cancel(call.number)

    def _is_full(self) -> bool:
        return (
            len(self._calls) + self._unwritten >= _MAX_CALLS_PER_STREAM
            or self._bytes >= _MAX_BYTES_PER_STREAM
        )

    def _cancel(self, number: int) -> None:
        if (task := self._calls.get(number)) is not None:
            task.cancel()

    def _start(self, call: pb.MultiplexedCall, kind: str, arrived: float) -> None:
        number = call.number
        if number in self._calls:
            raise InvalidInput("a call of the stream has a number that is in use", field="calls")
        until = arrived + call.timeout_seconds if call.HasField("timeout_seconds") else None
        body = getattr(call, kind) if kind else b""
        rpc = MultiplexedRpc(self._carrier, (*_headers(call), *self._metadata), body, until)
        task = self._calls[number] = asyncio.create_task(
            _run_call(number, self._unary.get(kind, _unknown), rpc)
        )
        self._bytes += len(body)
        # As gRPC does. The client stops waiting by itself.
        late = (
            None
            if until is None
            else asyncio.get_running_loop().call_later(until - time.monotonic(), task.cancel)
        )
        # Not at the coroutine's end, which is not reached if cancelled before it begins.
        task.add_done_callback(partial(self._ended, number, rpc, late))

    def _ended(
        self,
        number: int,
        rpc: MultiplexedRpc,
        late: asyncio.TimerHandle | None,
        task: asyncio.Task[_Answer],
    ) -> None:
        del self._calls[number]
        self._bytes -= len(rpc.body)
        if late is not None:
            late.cancel()
        if task.cancelled():
            rpc.done()
        else:
            answer = task.result()
            self._answers.append(answer)
            self._unwritten += 1
            self._bytes += answer.size
        self._slot_free.set()
        self._news.set()

    def _take(self) -> list[_Answer]:
        """Remove and return the answers for one message."""
        size, taken = 0, 0
        for answer in self._answers:
            size += answer.size
            if taken and size > _ANSWER_BYTES:
                break
            taken += 1
        answers = self._answers[:taken]
        del self._answers[:taken]
        return answers


async def _run_call(number: int, unary: Unary, rpc: MultiplexedRpc) -> _Answer:
    try:
        response = await unary(None, rpc)
    except _AbortedError as aborted:
        return _Answer(rpc, number, failure=aborted.failure)
    return _Answer(rpc, number, response.SerializeToString() if response is not None else b"")


async def _unknown(_: object, rpc: Any) -> None:
    """Refuse a call of a later version."""
    await abort(rpc, InvalidInput("this stream does not carry calls of this kind", field="calls"))


def _message(answers: Sequence[_Answer]) -> pb.MultiplexResponse:
    message = pb.MultiplexResponse()
    for answer in answers:
        if answer.failure is None:
            message.answers.add(number=answer.number, response=answer.response)
        else:
            message.answers.add(number=answer.number, failure=answer.failure)
    return message


def _check(request: pb.MultiplexRequest) -> None:
    """Raise InvalidInput for values that a separate gRPC call could not have."""
    if len(request.calls) > MESSAGE_CALLS:
        raise InvalidInput(
            f"a message has {len(request.calls):,} calls; at most {MESSAGE_CALLS:,} are allowed",
            field="calls",
        )
    for index, call in enumerate(request.calls):
        if not math.isfinite(call.timeout_seconds):
            path = f"calls[{index}].timeout_seconds"
            raise InvalidInput(f"{path} is {call.timeout_seconds}; it must be finite", field=path)
        for name, most in _TEXT_LIMITS:
            length = len(getattr(call, name))
            if length > most:
                path = f"calls[{index}].{name}"
                raise InvalidInput(
                    f"{path} has {length:,} characters; at most {most:,} are allowed", field=path
                )


def _headers(call: pb.MultiplexedCall) -> list[tuple[str, str]]:
    headers = [(REQUEST_ID_HEADER, call.request_id)]
    if call.traceparent:
        headers += ((TRACEPARENT, call.traceparent), (_TRACESTATE, call.tracestate))
    return headers
