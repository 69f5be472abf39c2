"""Carry many calls of one worker on one stream (WorkerService.Exchange) instead of a unary call for
each.

On the request path, around the handlers in `pull.py`. A message on an open stream takes a third of
the CPU of a unary call, and answers that are ready together are sent together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.message import Message
from shoal.v1 import worker_pb2

from libs.errors import InternalError, InvalidInput, PermissionDenied, ShoalError
from libs.serving.calls.status import to_status
from libs.telemetry import traces
from libs.telemetry.logs import REQUEST_ID
from services.router.admission.validation import reports

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[[Any, Context], Awaitable[Message]]

EXCHANGE_SECONDS: Final = 240.0
"""Maximum life of a stream, so that a revoked token or certificate is not used for longer. Workers
end theirs earlier.
"""

_MAX_CALLS_PER_STREAM: Final = 256
"""Maximum calls in progress on one stream; reading pauses at this number. Workers have about
twenty.
"""

_FULL_MESSAGE_BYTES: Final = 1 << 20
"""A message takes further answers until it has this many bytes."""


class Exchange:
    """One stream.

    Args:
        handlers: The unary handler of each kind of call (`pull`, `complete`).
        context: Passed to each handler.
    """

    def __init__(self, handlers: Mapping[str, Handler], context: Context) -> None:
        self._handlers = handlers
        self._context = context
        # The state: calls in progress by number, answers to be sent, and the error that ends the
        # stream.
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._answers: list[tuple[int, str, Message]] = []
        self._refused: ShoalError | None = None
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    async def run(
        self, requests: AsyncIterator[worker_pb2.ExchangeRequest]
    ) -> AsyncGenerator[worker_pb2.ExchangeResponse]:
        """Yield the answers until the worker has closed its side and all calls are answered.

        Closing the generator cancels the calls in progress. Raises PermissionDenied for a call
        without permission, InvalidInput for an invalid message.
        """
        reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda _: self._news.set())
        expiry = asyncio.get_running_loop().call_later(EXCHANGE_SECONDS, reading.cancel)
        try:
            while not reading.done() or self._calls or self._answers:
                await self._news.wait()
                self._news.clear()
                if self._refused is not None:
                    raise self._refused
                while self._answers:
                    yield self._take()
                if reading.done() and (reading.cancelled() or reading.exception()):
                    break
            if not reading.cancelled():
                await reading
        finally:
            expiry.cancel()
            tasks = [reading, *self._calls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[worker_pb2.ExchangeRequest]) -> None:
        async for request in requests:
            reports.check_exchange(request)
            for call in request.calls:
                self._start(call)
            while len(self._calls) >= _MAX_CALLS_PER_STREAM:
                self._room.clear()
                await self._room.wait()

    def _start(self, call: worker_pb2.WorkerCall) -> None:
        kind = call.WhichOneof("call") or ""
        if kind == "cancelled":
            if (task := self._calls.get(call.number)) is not None:
                task.cancel()
            return
        if kind not in self._handlers or call.number in self._calls:
            error = InvalidInput(
                "unknown kind of call, or a call with the number of one still in progress",
                field="calls",
            )
            self._answers.append((call.number, "refusal", _refusal(error)))
            self._news.set()
            return
        task = self._calls[call.number] = asyncio.create_task(self._run_call(call, kind))
        # Not at the end of the coroutine: a task cancelled before it starts never runs it.
        task.add_done_callback(lambda _: self._ended(call.number))

    def _ended(self, number: int) -> None:
        del self._calls[number]
        self._room.set()
        self._news.set()

    async def _run_call(self, call: worker_pb2.WorkerCall, kind: str) -> None:
        """Make one call. Errors are sent as answers, except PermissionDenied, which ends the
        stream.
        """
        span = traces.NONE
        if call.traceparent:
            path = f"/shoal.v1.WorkerService/{kind.capitalize()}"
            span = traces.rpc(
                path, {traces.TRACEPARENT: call.traceparent}, {"shoal.request_id": REQUEST_ID.get()}
            )
        try:
            with traces.entered(span):
                answer = await self._handlers[kind](getattr(call, kind), self._context)
            self._answers.append((call.number, kind, answer))
        except PermissionDenied as error:
            self._refused = error
        except ShoalError as error:
            traces.failed(span, error)
            if isinstance(error, InternalError):
                log.exception("call on a worker's stream failed")
            self._answers.append((call.number, "refusal", _refusal(error)))
        except Exception:
            log.exception("call on a worker's stream failed")
            self._answers.append(
                (call.number, "refusal", _refusal(InternalError("unexpected error")))
            )
        finally:
            span.end()

    def _take(self) -> worker_pb2.ExchangeResponse:
        """Remove the answers that fit into one message, and return that message."""
        response, size, taken = worker_pb2.ExchangeResponse(), 0, 0
        for number, kind, answer in self._answers:
            getattr(response.answers.add(number=number), kind).CopyFrom(answer)
            taken += 1
            size += answer.ByteSize()
            if size >= _FULL_MESSAGE_BYTES:
                break
        del self._answers[:taken]
        return response


def _refusal(error: ShoalError) -> worker_pb2.Refusal:
    status = to_status(error, REQUEST_ID.get())
    code: int = status.code.value[0]
    return worker_pb2.Refusal(code=code, message=status.message)
