"""The stream of FakeRouter that carries calls of several methods, in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import grpc
from google.protobuf.message import Message
from shoal.v1 import multiplex_pb2 as pb

Handler = tuple[type[Message], Callable[[Any, Any], Message]]
"""The type of a request, and the method for it."""


class _AbortedError(Exception):
    """`args[0]` is the call's status, a grpc.Status."""


@dataclass(eq=False)
class _Rpc:
    """The context of one call: the part of grpc.ServicerContext that FakeRouter uses."""

    stream: grpc.ServicerContext
    call: pb.MultiplexedCall
    ended: threading.Event = field(default_factory=threading.Event)
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.auth_context = self.stream.auth_context
        self._until = time.monotonic() + self.call.timeout_seconds

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return [("x-request-id", self.call.request_id), *self.stream.invocation_metadata()]

    def time_remaining(self) -> float:
        return self._until - time.monotonic()

    def is_active(self) -> bool:
        return not self.ended.is_set()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.callbacks.append(callback)
        return self.is_active()

    def abort_with_status(self, status: grpc.Status) -> None:
        raise _AbortedError(status)

    def end(self) -> None:
        self.ended.set()
        for callback in self.callbacks:
            callback()


def multiplex(
    handlers: Mapping[str, Handler],
    requests: Iterator[pb.MultiplexRequest],
    context: grpc.ServicerContext,
) -> Iterator[pb.MultiplexResponse]:
    """Yield the answers to the calls until the client closes its side or leaves."""
    answers: SimpleQueue[pb.MultiplexedAnswer | None] = SimpleQueue()
    calls: dict[int, _Rpc] = {}

    def read() -> None:
        with suppress(grpc.RpcError):  # the client has left
            for call in (call for request in requests for call in request.calls):
                if call.cancelled:
                    if (cancelled := calls.pop(call.number, None)) is not None:
                        cancelled.end()
                    continue
                rpc = calls[call.number] = _Rpc(context, call)
                threading.Thread(target=answer, args=(rpc,), daemon=True).start()
        for rpc in list(calls.values()):
            rpc.end()
        answers.put(None)

    def answer(rpc: _Rpc) -> None:
        number, kind = rpc.call.number, rpc.call.WhichOneof("call")
        assert kind is not None
        request, handle = handlers[kind]
        try:
            response = handle(request.FromString(getattr(rpc.call, kind)), rpc)
            answers.put(pb.MultiplexedAnswer(number=number, response=response.SerializeToString()))
        except _AbortedError as aborted:
            (status,) = aborted.args
            details = dict(status.trailing_metadata)["grpc-status-details-bin"]
            failure = pb.MultiplexedFailure(
                code=status.code.value[0], message=status.details, details=details
            )
            answers.put(pb.MultiplexedAnswer(number=number, failure=failure))
        calls.pop(number, None)

    context.send_initial_metadata((("x-request-id", "of the stream"),))
    threading.Thread(target=read, daemon=True).start()
    while (found := answers.get()) is not None:
        yield pb.MultiplexResponse(answers=[found])
