"""Concurrent requests of one asyncio client to one router on one stream
(InferenceService.Multiplex), in place of a gRPC call for each: it costs both sides a third of the
CPU. Below `aio.py`, which opens streams and falls back on unary calls.

Calls that are made in one turn of the event loop go out in one message.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Final

import grpc
import grpc.aio

from shoal.transport.failures import decode, translate
from shoal.transport.methods import ENCODE, EXTRACT, SCORE
from shoal.transport.wire import Metadata
from shoal.v1 import multiplex_pb2 as pb

KINDS: Final = {ENCODE.path: "encode", SCORE.path: "score", EXTRACT.path: "extract"}

MAX_STREAMED_BYTES: Final = 8 << 10
"""Larger requests are not for the stream: those behind them, and behind their answers, would
wait.
"""

MAX_STREAMED_CALLS: Final = 64
"""Calls in flight on one stream. Where several routers stand behind one name, further streams reach
others of them.
"""

RENEW_STREAM_SECONDS: Final = 30.0
"""The age at which a stream is replaced, so that it reaches routers that are new, and lets go of
those that close their connection in order: they let it live 75 s longer."""

MAX_GROUPS: Final = 100
"""Credentials and tenants that have streams on one channel: the calls of further ones are unary."""

UNSUPPORTED_SECONDS: Final = 60.0
"""For how long a router that answered UNIMPLEMENTED is not asked again."""

_FULL_MESSAGE_BYTES: Final = 1 << 20
_TRACESTATE_CHARACTERS: Final = 512
_BROKEN: Final = "Internal error from Core"
"""What grpc.aio says where a write meets a connection that has just broken, before its status is
known.
"""
_PER_CALL_METADATA: Final = ("x-request-id", "traceparent", "tracestate")
_CODES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


class Unsupported(Exception):
    """The router is older than the stream."""


class Stream:
    """One open stream. `call` raises ShoalError as a unary call does, and `Unsupported`; a call
    that is cancelled here is cancelled at the router, too."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call  # grpc.aio.StreamStreamCall, which is not generic in its stubs
        self._address = address
        self._until = time.monotonic() + RENEW_STREAM_SECONDS
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        # The state: calls that wait for their answer, by number; calls to be written; why the
        # stream ended.
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._outbox: list[pb.MultiplexedCall] = []
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._is_finished = False
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read())

    @property
    def has_room(self) -> bool:
        """Return True if another call may use this stream."""
        return (
            self._error is None
            and len(self._waiting) < MAX_STREAMED_CALLS
            and time.monotonic() < self._until
        )

    @property
    def is_over(self) -> bool:
        """Return True if the stream has ended, or is too old and without calls."""
        return self._error is not None or (not self._waiting and time.monotonic() >= self._until)

    async def call(self, kind: str, body: bytes, timeout: float, metadata: Metadata) -> bytes:
        """Return the serialised response. `timeout`: seconds."""
        if self._error is not None:
            raise self._error
        number = next(self._numbers)
        own = dict(metadata)
        if len(own.get("tracestate", "")) > _TRACESTATE_CHARACTERS:
            del own["tracestate"]  # as W3C allows
        call = pb.MultiplexedCall(
            number=number,
            request_id=own.get("x-request-id", ""),
            traceparent=own.get("traceparent", ""),
            tracestate=own.get("tracestate", ""),
            timeout_seconds=timeout,
        )
        setattr(call, kind, body)
        answer = self._waiting[number] = self._loop.create_future()
        self._post(call)
        late = self._loop.call_later(timeout, self._late, answer)
        try:
            response: bytes = await answer
            return response
        finally:
            late.cancel()
            if self._waiting.pop(number, None) is not None and self._error is None:
                self._post(pb.MultiplexedCall(number=number, cancelled=True))

    def finish(self) -> None:
        """Close this side, once everything is written. No more calls may be made."""
        self._is_finished = True
        self._news.set()

    async def close(self) -> None:
        """End the stream. Its calls fail."""
        self._end(decode("CANCELLED", "the stream was closed", b"", address=self._address))
        self._call.cancel()
        self._reading.cancel()
        await asyncio.gather(self._reading, self._writing, return_exceptions=True)

    def _post(self, call: pb.MultiplexedCall) -> None:
        self._outbox.append(call)
        self._news.set()

    def _late(self, answer: asyncio.Future[bytes]) -> None:
        if not answer.done():
            answer.set_exception(
                decode("DEADLINE_EXCEEDED", "Deadline Exceeded", b"", address=self._address)
            )

    async def _write(self) -> None:
        try:
            if not await self._call.initial_metadata():
                return  # refused: a write would hide why (gRPC's status is then INTERNAL)
            while not self._is_finished:
                await self._news.wait()
                self._news.clear()
                while self._outbox:
                    await self._call.write(pb.MultiplexRequest(calls=self._take()))
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream has ended; `_read` learns why

    def _take(self) -> Sequence[pb.MultiplexedCall]:
        """Remove calls that go into one message."""
        size, taken = 0, 0
        for call in self._outbox:
            size += call.ByteSize()
            if taken and size > _FULL_MESSAGE_BYTES:
                break
            taken += 1
        calls = self._outbox[:taken]
        del self._outbox[:taken]
        return calls

    async def _read(self) -> None:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                for answer in response.answers:
                    self._receive(answer)
            self._end(
                decode("UNAVAILABLE", "the router ended the stream", b"", address=self._address)
            )
        except grpc.aio.AioRpcError as error:
            self._end(self._translated(error))
        except asyncio.CancelledError:  # the channel was closed, or this stream
            self._end(decode("CANCELLED", "the stream was closed", b"", address=self._address))
            raise

    def _translated(self, error: grpc.aio.AioRpcError) -> Exception:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return Unsupported()
        if error.code() is grpc.StatusCode.INTERNAL and error.details() == _BROKEN:
            return decode("UNAVAILABLE", "the connection broke", b"", address=self._address)
        return translate(error, self._address)

    def _receive(self, answer: pb.MultiplexedAnswer) -> None:
        waiting = self._waiting.pop(answer.number, None)
        if waiting is None or waiting.done():
            return
        if answer.WhichOneof("outcome") == "response":
            waiting.set_result(answer.response)
            return
        failure = answer.failure
        code = _CODES.get(failure.code, "UNKNOWN")
        waiting.set_exception(decode(code, failure.message, failure.details, address=self._address))

    def _end(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error
        self._writing.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(copy(error))  # each call adds its own request id


class _Group:
    """The calls on one channel that share a credential and a tenant, and their streams."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        # The state.
        self.calls = 0
        self.streams: list[Stream] = []


class Streams:
    """The streams of one channel. `open` begins one with the metadata given."""

    def __init__(self, open: Callable[[Metadata], Any], address: str) -> None:
        self._open = open
        self._address = address
        # The state: until when the router is taken for one that knows no stream; calls and streams
        # by what metadata they share.
        self._unary_until = 0.0
        self._groups: dict[Metadata, _Group] = {}

    def enter(self, metadata: Metadata) -> _Group:
        """Register a call and return the group of calls with equal metadata, which share streams.
        `leave` ends the call.
        """
        shared = tuple(pair for pair in metadata if pair[0] not in _PER_CALL_METADATA)
        group = self._groups.get(shared)
        if group is None:
            group = self._groups[shared] = _Group(shared)
        group.calls += 1
        return group

    def leave(self, group: _Group) -> None:
        group.calls -= 1
        if not group.calls and not group.streams:
            self._groups.pop(group.metadata, None)

    def stream(self, group: _Group) -> Stream | None:
        """Return a stream for a call of the group; None for a call that is sent alone: it is the
        only one, or the router is too old.
        """
        if time.monotonic() < self._unary_until:
            return None
        streams = group.streams
        if streams and (streams[-1].is_over or not streams[-1].has_room):
            streams = group.streams = [stream for stream in streams if not self._ended(stream)]
        found = next((stream for stream in reversed(streams) if stream.has_room), None)
        if found is None and group.calls > 1 and (streams or len(self._groups) <= MAX_GROUPS):
            found = Stream(self._open(group.metadata), self._address)
            streams.append(found)
        return found

    def unsupported(self) -> None:
        """Record that the router answered a stream with UNIMPLEMENTED."""
        self._unary_until = time.monotonic() + UNSUPPORTED_SECONDS

    async def close(self) -> None:
        """End all streams. Their calls fail."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            for stream in group.streams:
                await stream.close()

    def _ended(self, stream: Stream) -> bool:
        if stream.is_over:
            stream.finish()
        return stream.is_over
