"""Concurrent calls of one asyncio client or worker to one router on one stream (the method
`Multiplex` of a service) instead of a gRPC call for each: it costs both sides a third of the CPU.
`libs/serving/calls/multiplex.py` is the other side.

Below `aio.py` and the worker's link. Calls that are made in one turn of the event loop share a
message.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from typing import Any, Final
from weakref import WeakKeyDictionary

import grpc
import grpc.aio

from shoal.transport.channels import PooledChannel
from shoal.transport.methods import Method
from shoal.transport.wire import Metadata
from shoal.v1 import multiplex_pb2 as pb

MAX_STREAMED_CALLS: Final = 64
"""Calls in flight on one stream. Where several routers stand behind one name, further streams reach
others of them.
"""

MAX_UNWRITTEN_BYTES: Final = 1 << 20
"""A stream with this much to write gets no further calls: they would be late."""

RENEW_STREAM_SECONDS: Final = 30.0
"""The age at which a stream is replaced, so that new ones reach new routers, and leave those that
close their connection in order: these keep it for 75 s more.
"""

MAX_GROUPS: Final = 100
"""Credentials and tenants of one channel beyond which further ones are unary calls of a client."""

_CALL_OVERHEAD_BYTES: Final = 256
"""Counted for each call in addition to its request, so that also the calls of a message are bounded
(a router accepts 10,000).
"""
_LATE_SECONDS: Final = 0.5
"""The delay of a timeout beyond which this process was too busy to notice an answer; and the time
in which it is read then.
"""
_TRACESTATE_CHARACTERS: Final = 512
_BROKEN: Final = "Internal error from Core"
"""The message of grpc.aio for a write to a connection that has just broken, before its status is
known.
"""
_FIELDS: Final = {
    "x-request-id": "request_id",
    "traceparent": "traceparent",
    "tracestate": "tracestate",
}
"""Metadata of one call, and the fields of MultiplexedCall for it. The rest is of the stream."""
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_DETAILS_HEADER: Final = "grpc-status-details-bin"


class MultiplexedStream:
    """One open stream. `call` raises grpc.aio.AioRpcError, as a unary call does; a call that is
    cancelled here is cancelled at the router, too.
    """

    def __init__(self, call: Any) -> None:
        self._call = call  # grpc.aio.StreamStreamCall, which is not generic in its stubs
        self._until = time.monotonic() + RENEW_STREAM_SECONDS
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        # Mutable state: calls that wait for their answer, by number; the next message, and the size
        # of this one and of the one being written; why the stream ended.
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._outbox = pb.MultiplexRequest()
        self._unwritten_bytes = 0
        self._news = asyncio.Event()
        self._error: grpc.aio.AioRpcError | None = None
        self._is_finished = False
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read())

    @property
    def has_room(self) -> bool:
        """Return True if another call may use this stream."""
        return (
            self._error is None
            and len(self._waiting) < MAX_STREAMED_CALLS
            and self._unwritten_bytes < MAX_UNWRITTEN_BYTES
            and time.monotonic() < self._until
        )

    @property
    def is_over(self) -> bool:
        """Return True if the stream has ended, or is too old and without calls."""
        return self._error is not None or (not self._waiting and time.monotonic() >= self._until)

    async def call(self, kind: str, body: bytes, timeout: float, metadata: Metadata = ()) -> bytes:
        """Return the serialised response.

        Args:
            kind: The field of MultiplexedCall.
            timeout: In seconds.
            metadata: Of this call; entries that are of the stream are ignored.
        """
        if self._error is not None:
            raise self._error
        number = next(self._numbers)
        fields: dict[str, Any] = {"number": number, "timeout_seconds": timeout, kind: body}
        for key, value in metadata:
            if value and (field := _FIELDS.get(key)) is not None:
                fields[field] = value
        if len(fields.get("tracestate", "")) > _TRACESTATE_CHARACTERS:
            del fields["tracestate"]  # as W3C allows
        self._post(len(body), **fields)
        del body, fields  # Free the request while waiting.
        answer = self._waiting[number] = self._loop.create_future()
        due = self._loop.time() + timeout
        late = self._loop.call_at(due, self._expire, answer, due)
        try:
            response: bytes = await answer
            return response
        finally:
            late.cancel()
            if self._waiting.pop(number, None) is not None and self._error is None:
                self._post(0, number=number, cancelled=True)

    def finish(self) -> None:
        """Close this side, once everything is written. No more calls may be made."""
        self._is_finished = True
        self._news.set()

    async def close(self) -> None:
        """End the stream. Its calls fail."""
        self._end(_failed(grpc.StatusCode.CANCELLED, "the stream was closed"))
        self._call.cancel()
        self._reading.cancel()
        await asyncio.gather(self._reading, self._writing, return_exceptions=True)

    def _post(self, size: int, **fields: Any) -> None:
        self._outbox.calls.add(**fields)
        self._unwritten_bytes += size + _CALL_OVERHEAD_BYTES
        self._news.set()

    def _expire(self, answer: asyncio.Future[bytes], due: float) -> None:
        """Fail a call that has no answer within its timeout.

        If this process was too busy to be on time, answers may have arrived that are not read yet.
        """
        if answer.done():
            return
        if self._loop.time() - due > _LATE_SECONDS:
            self._loop.call_later(_LATE_SECONDS, self._expire, answer, math.inf)
        else:
            answer.set_exception(
                _failed(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer within the timeout")
            )

    async def _write(self) -> None:
        try:
            if not await self._call.initial_metadata():
                return  # refused: a write would hide why (gRPC's status is then INTERNAL)
            while self._outbox.calls or not self._is_finished:
                await self._news.wait()
                self._news.clear()
                while self._outbox.calls:
                    size, message = self._unwritten_bytes, self._outbox
                    self._outbox = pb.MultiplexRequest()
                    await self._call.write(message)
                    del message
                    self._unwritten_bytes -= size
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream has ended; `_read` learns why

    async def _read(self) -> None:
        error = _failed(grpc.StatusCode.UNAVAILABLE, "the router ended the stream")
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                for answer in response.answers:
                    self._receive(answer)
        except grpc.aio.AioRpcError as caught:
            error = caught
            if error.code() is grpc.StatusCode.INTERNAL and error.details() == _BROKEN:
                error = _failed(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        except asyncio.CancelledError:  # the channel was closed, or this stream
            error = _failed(grpc.StatusCode.CANCELLED, "the stream was closed")
            raise
        finally:
            self._end(error)

    def _receive(self, answer: pb.MultiplexedAnswer) -> None:
        waiting = self._waiting.pop(answer.number, None)
        if waiting is None or waiting.done():
            return
        if answer.WhichOneof("outcome") == "response":
            waiting.set_result(answer.response)
            return
        failure = answer.failure
        code = _CODES.get(failure.code, grpc.StatusCode.UNKNOWN)
        waiting.set_exception(_failed(code, failure.message, failure.details))

    def _end(self, error: grpc.aio.AioRpcError) -> None:
        if self._error is not None:
            return
        self._error = error
        self._writing.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)


class StreamGroup:
    """The calls on one channel that share a credential and a tenant, and their streams.
    `is_limited`: as many others as may have streams exist.
    """

    def __init__(self, metadata: Metadata, *, is_limited: bool) -> None:
        self.metadata = metadata
        self.is_limited = is_limited
        # Mutable state.
        self.calls = 0
        self.streams: list[MultiplexedStream] = []


class Streams:
    """The streams of one client or worker. `method` is the method `Multiplex` of the service."""

    def __init__(self, method: Method[Any, Any]) -> None:
        self._method = method
        # Mutable state: groups by the metadata that their calls share, of each channel.
        self._groups: WeakKeyDictionary[
            PooledChannel[grpc.aio.Channel], dict[Metadata, StreamGroup]
        ] = WeakKeyDictionary()

    def enter(self, pooled: PooledChannel[grpc.aio.Channel], metadata: Metadata) -> StreamGroup:
        """Register a call and return its group. `leave` ends the call."""
        groups = self._groups.get(pooled)
        if groups is None:
            groups = self._groups[pooled] = {}
        shared = tuple(pair for pair in metadata if pair[0] not in _FIELDS)
        group = groups.get(shared)
        if group is None:
            if len(groups) >= MAX_GROUPS:
                _forget_unused(groups)
            group = groups[shared] = StreamGroup(shared, is_limited=len(groups) >= MAX_GROUPS)
        group.calls += 1
        return group

    def leave(self, pooled: PooledChannel[grpc.aio.Channel], group: StreamGroup) -> None:
        group.calls -= 1
        if not group.calls and not group.streams:
            self._groups[pooled].pop(group.metadata, None)

    def find(self, group: StreamGroup) -> MultiplexedStream | None:
        """Return an open stream for a call of the group."""
        if group.streams and not group.streams[-1].has_room:
            group.streams = [stream for stream in group.streams if not _is_over(stream)]
        return next((stream for stream in reversed(group.streams) if stream.has_room), None)

    def open(
        self, pooled: PooledChannel[grpc.aio.Channel], group: StreamGroup
    ) -> MultiplexedStream:
        """Open another stream for calls of the group."""
        stream = MultiplexedStream(pooled.exchange(self._method)(metadata=group.metadata))
        group.streams.append(stream)
        return stream

    async def close(self) -> None:
        """End all streams. Their calls fail."""
        for groups in list(self._groups.values()):
            for group in groups.values():
                for stream in group.streams:
                    await stream.close()


def _forget_unused(groups: dict[Metadata, StreamGroup]) -> None:
    """Remove the groups of credentials that are not in use any more."""
    for group in list(groups.values()):
        if not group.calls and all(map(_is_over, group.streams)):
            del groups[group.metadata]


def _is_over(stream: MultiplexedStream) -> bool:
    if stream.is_over:
        stream.finish()
    return stream.is_over


def _failed(code: grpc.StatusCode, text: str, details: bytes = b"") -> grpc.aio.AioRpcError:
    """Return the error that a unary call with this status raises."""
    trailing = grpc.aio.Metadata((_DETAILS_HEADER, details)) if details else grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, text)
