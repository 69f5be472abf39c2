"""Process one request: route, body, mesh call, answer. Every error becomes an answer here.

This is an ASGI application. When a client disconnects, the server cancels the request's task and
with it the call to the router.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Protocol, cast

from google.protobuf.message import Message
from opentelemetry.trace import Span
from prometheus_client import Counter, Histogram
from shoal.errors import ShoalError
from shoal.transport.wire import Metadata
from shoal.v1 import inference_pb2 as pb

from libs.environment import is_loopback_host
from libs.serving.calls.call import REQUEST_ID_HEADER, new_request_id
from libs.telemetry import metrics, traces
from libs.telemetry.logs import MODEL, REQUEST_ID, Value, fields
from services.edge.activity.cost import Cost
from services.edge.activity.history import CLIENT_LEFT, Finished
from services.edge.compression import ENCODINGS, Compression, compress, negotiate_encoding
from services.edge.credentials import (
    CallerTrust,
    decode_headers,
    read_request_id,
    read_timeout,
    router_metadata,
    trace_metadata,
)
from services.edge.intake import reading
from services.edge.intake.budget import Budget
from services.edge.intake.callers import Callers
from services.edge.intake.reading import UNIDENTIFIED_BODY_BYTES, BodyIntake, Payer
from services.edge.intake.served import Executed, Serve, ServedRequest, StreamedAnswer
from services.edge.messages.base import (
    EXPECT_EMBEDDING_ID_HEADER,
    Answer,
    Dialect,
    Headers,
    HttpError,
    MeshCall,
    Received,
    Route,
    StreamedCall,
    invalid,
    with_embedding_id_header,
    with_truncated_inputs_header,
    with_truncation_header,
)
from services.edge.messages.names import AliasNames
from services.edge.messages.vocabulary import Vocabulary
from services.edge.routers import Routers
from services.edge.routes import DEFAULT, RouteTable

log = logging.getLogger(__name__)

_WITH_PRIORITY: Final = (pb.EncodeRequest, pb.ScoreRequest, pb.ExtractRequest)
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_SEND_BYTES: Final = 256 * 1024
"""The approximate size of the pieces in which an answer is sent, which bounds the transport's
buffer for a slow client.
"""

JOIN_THREADS: Final = 2
"""Threads that put answers of batches together. One answer has up to 64 MiB, and as much again in
its pieces. Its thread continues if the request is cancelled, so threads limit them.
"""


class Connected(Protocol):
    """The connection of a request (`server.Connection`), if it has a real one."""

    @property
    def certificate(self) -> Any: ...
    @property
    def is_whole(self) -> bool: ...
    def answering(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of a request, as in `Settings`: sizes in bytes, times in seconds."""

    body: reading.BodyLimits = field(default_factory=reading.BodyLimits)
    deadline_seconds: float = 60.0
    max_deadline_seconds: float = 600.0


@dataclass(slots=True)
class State:
    """State of the process.

    Attributes:
        is_ready: A router answers.
        is_open: Routers accept anonymous calls, so the edge must not serve beyond this machine.
        is_guarded: Callers appear to need no credential, so web pages are refused.
    """

    is_ready: bool = False
    is_open: bool = False
    is_guarded: bool = False
    budget: Budget = field(default_factory=lambda: Budget(512 << 20))

    @property
    def held_bytes(self) -> int:
        """Return the memory held by bodies and answers of requests in flight."""
        return self.budget.held_bytes


@dataclass(slots=True)
class _Exchange:
    """The state of one request."""

    method: str
    headers: dict[str, str]
    begin: float
    route: Route | None = None
    dialect: Dialect = DEFAULT
    request_id: str = field(default_factory=new_request_id)
    status: int = CLIENT_LEFT
    payer: Payer | None = None
    span: Span = field(default=traces.NONE)
    reason: str = ""
    cost: Cost = field(default_factory=Cost)

    @property
    def name(self) -> str:
        return self.route.path if self.route is not None else metrics.OTHER


class Application:
    """The ASGI application.

    Args:
        names: Returns the current aliases.
        extra: Answers of routes that need neither a body nor a credential, by path.
        served: Handlers of routes that the edge serves itself, by method and path of the route.
        observe: Receives the outcome of each inference request and of every other POST.
    """

    def __init__(
        self,
        routers: Routers,
        names: Callable[[], AliasNames],
        state: State,
        *,
        table: RouteTable | None = None,
        bounds: RequestLimits | None = None,
        trust: CallerTrust | None = None,
        extra: MutableMapping[str, Callable[[], Answer]] | None = None,
        vocabulary: Vocabulary | None = None,
        compression: Compression = "auto",
        observe: Callable[[Finished], None] | None = None,
        served: Mapping[tuple[str, str], Serve] | None = None,
    ) -> None:
        self._routers = routers
        self._names = names
        self._state = state
        self._table = table or RouteTable()
        self._bounds = bounds or RequestLimits()
        self.intake = BodyIntake(state.budget, Callers(routers.tenant), self._bounds.body)
        self._trust = trust or CallerTrust()
        self._extra = dict(extra or {})
        self._vocabulary = vocabulary
        self._compression = compression
        self._observe = observe
        self._served = served or {}
        self._join_threads = ThreadPoolExecutor(JOIN_THREADS, "joins")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] in self._extra and scope["method"] in ("GET", "HEAD"):
            await _send(send, self._extra[scope["path"]](), ())
            return
        connection: Connected | None = scope.get("state", {}).get("connection")
        exchange = _Exchange(scope["method"], decode_headers(scope["headers"]), time.perf_counter())
        with connection.answering() if connection is not None else nullcontext():
            try:
                await self._exchange(exchange, scope, receive, send, connection)
            except asyncio.CancelledError:
                pass  # The client disconnected or the grace time ended, so no answer can be sent.
            finally:
                if exchange.payer is not None:
                    exchange.payer.close()
                # The connection keeps this list until it has dropped the rest of a refused body.
                scope["headers"].clear()
                _report(exchange)
                if self._observe is not None and (exchange.cost.verb or exchange.method == "POST"):
                    self._observe(_finished(exchange))

    async def _exchange(
        self,
        exchange: _Exchange,
        scope: Scope,
        receive: Receive,
        send: Send,
        connection: Connected | None,
    ) -> None:
        try:
            answer = await self._answer_request(exchange, scope, receive, connection)
            if isinstance(answer, Answer):
                answer = compress(answer, self._encoding(exchange, scope))
        except Exception as error:
            answer = _failed(exchange, error)[0]
        milliseconds = str(round((time.perf_counter() - exchange.begin) * 1000)).encode()
        common = (
            (b"x-request-id", exchange.request_id.encode()),
            (b"openai-processing-ms", milliseconds),
        )
        exchange.status = await _send(send, answer, common) or CLIENT_LEFT

    async def _answer_request(
        self, exchange: _Exchange, scope: Scope, receive: Receive, connection: Connected | None
    ) -> Answer | StreamedAnswer:
        """Answer a request by its route. Raises HttpError."""
        headers = exchange.headers
        REQUEST_ID.set(exchange.request_id)
        route, model = self._table.find(exchange.method, scope["path"])
        exchange.route, exchange.dialect = route, route.dialect
        exchange.request_id = read_request_id(headers, exchange.request_id)
        REQUEST_ID.set(exchange.request_id)
        exchange.span = traces.http(exchange.method, route.path, headers)
        with traces.entered(exchange.span):
            if self._state.is_open:
                raise HttpError(
                    "NOT_READY",
                    (
                        "routers accept anonymous calls, so this edge does not serve beyond its "
                        "machine"
                    ),
                )
            certificate = (
                connection.certificate
                if connection is not None and self._trust.certificates
                else None
            )
            metadata = router_metadata(headers, exchange.request_id, certificate, self._trust)
            payer = exchange.payer = self.intake.payer(peer_address(scope), metadata)
            # Both the raw and the decoded head are kept while the body arrives.
            await payer.take_head(2 * head_bytes(scope))
            is_whole = connection is not None and connection.is_whole
            serve = self._served.get((route.method, route.path))
            if serve is not None:
                query = scope["query_string"].decode("latin-1")
                return await serve(
                    ServedRequest(
                        model, query, headers, metadata, receive, self.intake, payer, is_whole
                    )
                )
            metadata += trace_metadata(headers, traces.format_traceparent(exchange.span))
            seconds = read_timeout(
                headers, self._bounds.deadline_seconds, self._bounds.max_deadline_seconds
            )
            deadline = time.monotonic() + seconds
            body = await self.intake.body(receive, headers, payer, is_whole=is_whole)
            kinds = headers.get("content-type", ""), headers.get("accept", "")
            length = headers.get("inference-header-content-length", "")
            client = "sie-sdk" if "x-sie-sdk-version" in headers else headers.get("user-agent", "")
            received = Received(
                body,
                self._names(),
                model,
                *kinds,
                exchange.request_id,
                length,
                self._vocabulary,
                client,
                int(time.time()),
                headers.get(EXPECT_EMBEDDING_ID_HEADER, ""),
            )
            await self.intake.admit(route.decoded(received), payer, is_msgpack=received.is_msgpack)
            return await self._ask_mesh(exchange, payer, route, received, metadata, deadline)

    async def execute(
        self, path: str, body: bytes, metadata: Metadata, request_id: str, seconds: float
    ) -> Executed:
        """Answer a POST with a JSON body as bulk work, as if a client had sent it.

        Its span is linked with the current one.

        Args:
            metadata: Identifies the caller, who pays for the memory of the request.
            seconds: The deadline.
        """
        REQUEST_ID.set(request_id)
        exchange = _Exchange("POST", {}, time.perf_counter(), request_id=request_id)
        metadata = ((REQUEST_ID_HEADER, request_id), *metadata)
        exchange.payer = payer = self.intake.payer("", metadata)
        message = ""
        retry_after: float | None = None
        try:
            answer = await self._execute(exchange, payer, path, body, metadata, seconds)
            content = await self._join(answer.body)
        except Exception as error:
            answer, message, retry_after = _failed(exchange, error)
            content = cast(bytes, answer.body)
        finally:
            payer.close()
        exchange.status = answer.status
        _report(exchange)
        if self._observe is not None:
            self._observe(_finished(exchange))
        cost = exchange.cost
        return Executed(
            answer.status,
            content,
            exchange.reason,
            message,
            retry_after,
            cost.prompt_tokens,
            cost.output_tokens,
            cost.truncated_inputs,
        )

    async def _join(self, body: bytes | Iterator[bytes]) -> bytes:
        """Return a body as a whole. It is not counted in the budget, which has only the reply."""
        if isinstance(body, bytes):
            return body
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._join_threads, b"".join, body)

    async def _execute(
        self,
        exchange: _Exchange,
        payer: Payer,
        path: str,
        body: bytes,
        metadata: Metadata,
        seconds: float,
    ) -> Answer:
        """Answer a POST with a JSON body as bulk work. Raises HttpError."""
        route, model = self._table.find("POST", path)
        exchange.route, exchange.dialect = route, route.dialect
        exchange.span = traces.http("POST", route.path, {}, chunk=traces.current())
        with traces.entered(exchange.span):
            await payer.reserve(len(body))
            received = Received(
                body,
                self._names(),
                model,
                request_id=exchange.request_id,
                vocabulary=self._vocabulary,
                received_at=int(time.time()),
                is_bulk=True,
            )
            await self.intake.admit(route.decoded(received), payer, is_msgpack=False)
            metadata += trace_metadata({}, traces.format_traceparent(exchange.span))
            deadline = time.monotonic() + seconds
            answer = await self._ask_mesh(exchange, payer, route, received, metadata, deadline)
        if isinstance(answer, StreamedAnswer):
            await answer.pieces.aclose()
            raise invalid("a request of a batch cannot be streamed", "stream")
        return answer

    async def _ask_mesh(
        self,
        exchange: _Exchange,
        payer: Payer,
        route: Route,
        received: Received,
        metadata: Metadata,
        deadline: float,
    ) -> Answer | StreamedAnswer:
        """Call the mesh until there is an answer. Raises HttpError."""
        step: MeshCall | StreamedCall | Answer
        step, message = await _maybe_in_thread(
            len(received.body), lambda: _serialised(route.ask(received), received)
        )
        held = 0
        while not isinstance(step, Answer):
            if len(message) > max(held, len(received.body)):
                await payer.reserve(len(message) - held)
                held = len(message)
            if isinstance(step, StreamedCall):
                return await self._start_stream(exchange, step, message, metadata, deadline)
            if step.dialect is not None:
                exchange.dialect = step.dialect
            MODEL.set(getattr(step.message, "model", ""))
            exchange.cost.note_request(step.message)
            exchange.cost.prompt_copies = step.prompt_copies
            seconds = _remaining_seconds(deadline)
            try:
                reply, size = await self._routers.ask_sized(
                    step.method, message, seconds=seconds, metadata=metadata
                )
            except ShoalError as error:
                # Bind the problem to no variable: its traceback holds this frame, and the cycle
                # would keep the request's body alive.
                fallback = step.fallback(HttpError.from_error(error, step))
                if fallback is None:
                    raise HttpError.from_error(error, step) from None
                step, message = _serialised(fallback, received)
            else:
                exchange.cost.note_reply(reply)
                if not payer.try_reserve(size):
                    await payer.reserve(size, is_accepted=True)
                if step.in_thread and size > UNIDENTIFIED_BODY_BYTES:
                    step, message = await asyncio.to_thread(_next_step, step, reply, received)
                else:
                    step, message = _next_step(step, reply, received)
        return with_truncated_inputs_header(step, exchange.cost.truncated_inputs)

    async def _start_stream(
        self,
        exchange: _Exchange,
        stream: StreamedCall,
        message: bytes,
        metadata: Metadata,
        deadline: float,
    ) -> StreamedAnswer:
        """Wait for the first reply. Raises HttpError."""
        MODEL.set(getattr(stream.message, "model", ""))
        exchange.cost.note_request(stream.message)
        replies = self._routers.stream(
            stream.method, message, seconds=_remaining_seconds(deadline), metadata=metadata
        )
        try:
            first = await anext(replies)
            begin = stream.render(first)
        except ShoalError as error:
            raise HttpError.from_error(error, stream) from None
        except BaseException:
            await replies.aclose()
            raise
        return StreamedAnswer(
            _stream_answer(exchange, stream, (first, begin), replies), stream.media_type
        )

    def _encoding(self, exchange: _Exchange, scope: Scope) -> str:
        """Return the encoding of the answer; empty for none."""
        if self._compression == "off" or (self._compression == "auto" and _is_local_caller(scope)):
            return ""
        return negotiate_encoding(exchange.headers.get("accept-encoding", ""))


def _serialised(
    step: MeshCall | StreamedCall | Answer, received: Received
) -> tuple[MeshCall | StreamedCall | Answer, bytes]:
    if isinstance(step, Answer):
        return step, b""
    if received.expect_embedding_id:
        _expect_embedding_id(step.message, received.expect_embedding_id)
    if received.is_bulk and isinstance(step.message, _WITH_PRIORITY):
        step.message.priority = pb.PRIORITY_BULK
    return step, step.message.SerializeToString()


def _expect_embedding_id(message: Message, expected: str) -> None:
    """Require the id of the vectors that a call asks for. Raises HttpError for inference without
    vectors; a call for a model's card may precede one for vectors.
    """
    if isinstance(message, pb.EncodeRequest):
        message.expect_embedding_id = expected
    elif message.DESCRIPTOR.file is pb.DESCRIPTOR:
        raise invalid(
            f"{EXPECT_EMBEDDING_ID_HEADER} is supported for requests that are answered with "
            "vectors or from vectors, and this one is not: remove the header",
            EXPECT_EMBEDDING_ID_HEADER,
        )


def _next_step(
    call: MeshCall, reply: Message, received: Received
) -> tuple[MeshCall | StreamedCall | Answer, bytes]:
    """Return the step that follows from the mesh's reply. Raises HttpError."""
    step = with_embedding_id_header(call.convert(reply), reply)
    return _serialised(with_truncation_header(step, reply), received)


def head_bytes(scope: Scope) -> int:
    """Return the bytes of the request's path, query and headers."""
    size = len(scope["path"]) + len(scope["query_string"])
    for name, value in scope["headers"]:  # a generator would cost each request 2 microseconds
        size += len(name) + len(value)
    return size


def _remaining_seconds(deadline: float) -> float:
    """Return the seconds until the deadline. Raises HttpError if it is exceeded."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise HttpError(
            "DEADLINE_PASSED", "deadline exceeded before the request was sent to a router"
        )
    return seconds


async def _stream_answer(
    exchange: _Exchange,
    stream: StreamedCall,
    begin: tuple[Any, bytes],
    replies: AsyncGenerator[Any],
) -> AsyncGenerator[bytes]:
    """Yield the bytes of a stream. After a failure, yield an error in the dialect's form, since the
    status has already been sent.

    Args:
        begin: The first reply and its bytes.
    """
    async with aclosing(replies):
        try:
            reply, piece = begin
            yield piece
            async for reply in replies:
                yield stream.render(reply)
            if not stream.is_last(reply):
                raise HttpError("INTERNAL", "the router ended the stream before its last reply")
            exchange.cost.note_reply(reply)
        except Exception as error:
            yield stream.fail(_stream_error(exchange, stream, error))


def _stream_error(exchange: _Exchange, stream: StreamedCall, error: Exception) -> HttpError:
    """Return the reason why an answer ends early after its status has been sent."""
    if isinstance(error, ShoalError):
        problem = HttpError.from_error(error, stream)
    elif isinstance(error, HttpError):
        problem = error
    else:
        log.exception("request failed", extra=fields({"route": exchange.name}))
        problem = _unexpected_error(exchange)
    exchange.reason = problem.reason
    log.info("answer aborted", extra=fields({"route": exchange.name, "reason": problem.reason}))
    if exchange.span is not traces.NONE:
        exchange.span.set_attribute("error.type", problem.reason)
    return problem


def _failed(exchange: _Exchange, error: Exception) -> tuple[Answer, str, float | None]:
    """Return the answer of a failed request, the message, and the seconds before a retry.

    The problem itself is not returned: its traceback holds the caller's frame, and a variable there
    would keep the request's body alive.
    """
    if isinstance(error, HttpError):
        problem = error
    else:
        log.error("request failed", exc_info=error, extra=fields({"route": exchange.name}))
        problem = _unexpected_error(exchange)
    exchange.reason = problem.reason
    return _error_answer(exchange, problem), problem.message, problem.retry_after


def _unexpected_error(exchange: _Exchange) -> HttpError:
    return HttpError("INTERNAL", f"unexpected error; see request {exchange.request_id} in the log")


def peer_address(scope: Scope) -> str:
    """Return the peer's address; empty if unknown."""
    client = scope.get("client")
    return client[0] if client is not None else ""


def _is_local_caller(scope: Scope) -> bool:
    """Return whether the caller is on this machine, where sending bytes costs less than compressing
    them.
    """
    client = scope.get("client")
    return client is None or _is_loopback(client[0])


_is_loopback = lru_cache(maxsize=1024)(is_loopback_host)


def _error_answer(exchange: _Exchange, problem: HttpError) -> Answer:
    """Return the error in its dialect's form."""
    if exchange.span is not traces.NONE:
        exchange.span.set_attribute("error.type", problem.reason)
    answer = (problem.dialect or exchange.dialect).error(problem)
    if problem.status == 405:
        return Answer(
            answer.body,
            answer.status,
            answer.media_type,
            (*answer.headers, (b"allow", problem.allow.encode())),
        )
    if problem.status == 415:
        accepted = (b"accept-encoding", ", ".join(ENCODINGS).encode())
        return Answer(answer.body, answer.status, answer.media_type, (*answer.headers, accepted))
    if problem.status == 408:
        return Answer(
            answer.body,
            answer.status,
            answer.media_type,
            (*answer.headers, (b"connection", b"close")),
        )
    return answer


async def _maybe_in_thread(
    size: int, work: Callable[[], tuple[MeshCall | StreamedCall | Answer, bytes]]
) -> tuple[MeshCall | StreamedCall | Answer, bytes]:
    return await asyncio.to_thread(work) if size > UNIDENTIFIED_BODY_BYTES else work()


async def _send(send: Send, answer: Answer | StreamedAnswer, common: Headers) -> int:
    """Send the answer and return its status. Other tasks run between the pieces of a large
    answer.
    """
    headers = [(b"content-type", answer.media_type), *common, *answer.headers]
    if isinstance(answer, StreamedAnswer):
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await _send_stream(send, answer.pieces)
        return answer.status
    if isinstance(answer.body, bytes):
        body = answer.body
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        sent = 0
        while len(body) - sent > _SEND_BYTES:
            await send(
                {
                    "type": "http.response.body",
                    "body": body[sent : sent + _SEND_BYTES],
                    "more_body": True,
                }
            )
            sent += _SEND_BYTES
        await send({"type": "http.response.body", "body": body[sent:] if sent else body})
        return answer.status
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    waiting = bytearray()
    pieces = answer.body
    while True:
        piece = (
            await asyncio.to_thread(next, pieces, None) if answer.in_thread else next(pieces, None)
        )
        if piece is None:
            break
        waiting += piece
        if len(waiting) >= _SEND_BYTES:
            await send({"type": "http.response.body", "body": bytes(waiting), "more_body": True})
            waiting.clear()
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": bytes(waiting)})
    return answer.status


async def _send_stream(send: Send, pieces: AsyncGenerator[bytes]) -> None:
    """Send pieces as they become available, with backpressure: request the next one when the client
    has read enough.
    """
    async with aclosing(pieces):
        async for piece in pieces:
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _finished(exchange: _Exchange) -> Finished:
    seconds = time.perf_counter() - exchange.begin
    return Finished(
        time.time(),
        exchange.request_id,
        exchange.name,
        exchange.status,
        exchange.reason,
        seconds,
        exchange.cost,
    )


@lru_cache(maxsize=1024)
def _request_metrics(route: str, status: int) -> tuple[Counter, Histogram]:
    """Return the metrics of a route and a status. They are cached, since a lookup costs more than a
    count.
    """
    return metrics.HTTP_REQUESTS.labels(route, str(status)), metrics.HTTP_REQUEST_SECONDS.labels(
        route
    )


def _report(exchange: _Exchange) -> None:
    """Count, log and trace the outcome of a request."""
    seconds = time.perf_counter() - exchange.begin
    name, status, span = exchange.name, exchange.status, exchange.span
    requests, times = _request_metrics(name, status)
    requests.inc()
    times.observe(seconds, traces.exemplar(span) if span is not traces.NONE else None)
    if log.isEnabledFor(logging.INFO):
        with traces.entered(span):
            values: dict[str, Value] = {
                "method": exchange.method,
                "route": name,
                "status": status,
                "seconds": round(seconds, 6),
            }
            log.info("request", extra=fields(values))
    if span is not traces.NONE:
        span.set_attribute("http.response.status_code", status)
        span.end()
