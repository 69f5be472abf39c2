"""The stream to one router that carries pulls and answers (WorkerService.Exchange) instead of unary
calls.

On the request path, below `link.py`, which opens streams and fails over. Calls made in one turn of
the event loop, such as the answers of a batch and the next pull, share one message.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final, Literal

import grpc
from google.protobuf.message import Message
from grpc.aio import Metadata as GrpcMetadata
from shoal.transport.wire import Metadata
from shoal.v1 import worker_pb2

CallKind = Literal["pull", "complete", "written"]
Stream = Any
"""grpc.aio.StreamStreamCall, which is not generic in its stubs."""

MAX_EXCHANGED_BYTES: Final = 1 << 20
"""Larger calls do not use the stream, where they would delay the calls behind them."""

RENEW_SECONDS: Final = 60.0
"""Age at which a stream is replaced. A router that closed its connection gracefully
(`SHOAL_CONNECTION_SECONDS`) keeps it 75 s longer, and a new stream may reach another router behind
the same name.
"""

STATUS_SECONDS: Final = 5.0
"""How long to wait for a stream's status after a write has found it closed."""

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_WRITE_AFTER_END: Final = "Internal error from Core"
"""The status, with code INTERNAL, that grpc.aio sets when a write finds the stream closed."""


class Exchange:
    """One open stream. `call` raises grpc.aio.AioRpcError, as a unary call does. A call that is
    cancelled here is also cancelled at the router.
    """

    def __init__(self, channel: grpc.aio.Channel, stream: Stream, metadata: Metadata) -> None:
        self._channel = channel
        self._stream = stream
        self._metadata = metadata
        self._until = time.monotonic() + RENEW_SECONDS
        self._numbers = itertools.count(1)
        # Mutable state: pending calls by number; calls to write; why the stream ended.
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._outbox: list[worker_pb2.WorkerCall] = []
        self._news = asyncio.Event()
        self._error: grpc.aio.AioRpcError | None = None
        self._is_retired = False
        self._status: asyncio.Future[grpc.aio.AioRpcError] = (
            asyncio.get_running_loop().create_future()
        )
        stream.add_done_callback(self._note_status)
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read())

    def serves(self, channel: grpc.aio.Channel, metadata: Metadata) -> bool:
        """Return whether new calls may use this stream: it is open, not old, and of this channel
        and credential.
        """
        is_current = channel is self._channel and metadata == self._metadata
        return self._error is None and is_current and time.monotonic() < self._until

    async def call(
        self, kind: CallKind, request: Message, timeout: float, traceparent: str = ""
    ) -> Message:
        """Send a PullRequest, CompleteRequest or WrittenRequest and return the reply. `timeout` is
        in seconds. Raises AioRpcError.
        """
        if self._error is not None:
            raise self._error
        number = next(self._numbers)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        call = worker_pb2.WorkerCall(number=number, traceparent=traceparent)
        getattr(call, kind).CopyFrom(request)
        self._post(call)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise _error(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout:g} s"
            ) from None
        finally:
            if self._waiting.pop(number, None) is not None and self._error is None:
                self._post(worker_pb2.WorkerCall(number=number, cancelled=True))
            if self._is_retired and not self._waiting:
                self.close()

    def retire(self) -> None:
        """Close the stream when its calls are answered. No more may be made."""
        self._is_retired = True
        if not self._waiting:
            self.close()

    def close(self) -> None:
        """End the stream. Its calls fail."""
        self._end(_error(grpc.StatusCode.CANCELLED, "the stream was closed"))
        self._reading.cancel()
        self._stream.cancel()

    def _post(self, call: worker_pb2.WorkerCall) -> None:
        self._outbox.append(call)
        self._news.set()

    async def _write(self) -> None:
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._outbox:
                    await self._stream.write(self._take())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream has ended; `_read` finds out why

    def _take(self) -> worker_pb2.ExchangeRequest:
        """Remove and return the calls for one message."""
        request, size, taken = worker_pb2.ExchangeRequest(), 0, 0
        for call in self._outbox:
            size += call.ByteSize()
            if taken and size > MAX_EXCHANGED_BYTES:
                break
            request.calls.append(call)
            taken += 1
        del self._outbox[:taken]
        return request

    async def _read(self) -> None:
        try:
            while (response := await self._stream.read()) is not grpc.aio.EOF:
                for answer in response.answers:
                    self._receive(answer)
        except grpc.aio.AioRpcError as error:
            if error.details() == _WRITE_AFTER_END:
                with suppress(TimeoutError):
                    error = await asyncio.wait_for(self._status, STATUS_SECONDS)
            self._end(error)
        else:
            self._end(_error(grpc.StatusCode.UNAVAILABLE, "the router ended the stream"))

    def _note_status(self, stream: Stream) -> None:
        """Record the first status of the router or connection. gRPC calls this for each status that
        it sets: a write that finds the stream closed would otherwise replace the received one.
        """
        code, details = (
            _result_without_waiting(stream.code()),
            _result_without_waiting(stream.details()),
        )
        if code is not None and details != _WRITE_AFTER_END and not self._status.done():
            self._status.set_result(_error(code, details or ""))

    def _receive(self, answer: worker_pb2.CallAnswer) -> None:
        waiting = self._waiting.pop(answer.number, None)
        if waiting is None or waiting.done():
            return
        kind = answer.WhichOneof("outcome")
        if kind == "refusal":
            code = _CODES.get(answer.refusal.code, grpc.StatusCode.UNKNOWN)
            waiting.set_exception(_error(code, answer.refusal.message))
        elif kind is None:
            waiting.set_exception(
                _error(grpc.StatusCode.INTERNAL, "the reply has no outcome known to this worker")
            )
        else:
            waiting.set_result(getattr(answer, kind))

    def _end(self, error: grpc.aio.AioRpcError) -> None:
        if self._error is not None:
            return
        self._error = error
        self._writing.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)


def _result_without_waiting(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that does not wait, None if it waits."""
    try:
        coroutine.send(None)
    except StopIteration as returned:
        return returned.value
    coroutine.close()
    return None


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, GrpcMetadata(), GrpcMetadata(), details)
