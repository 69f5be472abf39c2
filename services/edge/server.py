"""The HTTP server: uvicorn's protocol on httptools, with what it lacks: timers for slow heads,
bounded heads and connections, cancellation when a client leaves, certificates that are read again,
and our way of draining.

A connection's state is uvicorn's; the application is any ASGI application. `Connection` is in the
scope's state, under CONNECTION.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from asyncio import TimerHandle
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
from uvicorn import Config
from uvicorn._types import ASGI3Application, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from libs.errors import InvalidInput, NoCapacity
from libs.serving.security.tls import TlsFiles
from libs.serving.watched import Watched
from libs.telemetry.exposition import parse_address
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

# Its warnings about clients that speak no HTTP would let strangers fill the log.
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

CONNECTION: Final = "connection"
HEAD_BYTES: Final = 64 << 10
"""The most bytes of a request's line and headers."""
MAX_HEADERS: Final = 128
"""Headers of a request. Each one is three Python objects, so that a limit of bytes alone would let
a head take thirty times its size. Proxies pass at most 100 (Envoy, Apache, Kestrel)."""
MAX_TRAILER_BYTES: Final = 8 << 10
"""Bytes of a chunked body's trailers, which are dropped, and of any other stretch of a body that
holds no content.
"""
MAX_UNFINISHED_BYTES: Final = 16 << 20
"""Bytes of all heads of a server whose end has not arrived. Most clients send a head in one piece,
which does not count here.
"""
_NOT_HTTP: Final = b"this is not an HTTP request"
_LARGE_HEAD: Final = (
    b"the request's headers are larger than the %d bytes that are allowed" % HEAD_BYTES
)
_MANY_HEADERS: Final = b"the request has more than the %d headers that are allowed" % MAX_HEADERS
_LARGE_TRAILERS: Final = (
    b"the request's trailers are larger than the %d bytes that are allowed" % MAX_TRAILER_BYTES
)
_MANY_HOSTS: Final = b"the request has more than one Host header: send one"
_CODING: Final = (
    b"the only transfer-encoding supported is chunked: send a compressed body with content-encoding"
)
_BUSY: Final = b"this server is reading as many unfinished requests as it takes: try again"
_BLANK_LINE: Final = b"\r\n\r\n"
LINGER_SECONDS: Final = 5.0
"""How long the rest of a request that is answered already is read and dropped: closing at once
would reset the connection before the client has read the answer. Also how long a connection that is
being closed may take to send what it still has."""
MAX_PIPELINED: Final = 64
"""Requests that may wait behind the one being answered on a connection; each takes some
kilobytes.
"""
MAX_PIPELINED_BYTES: Final = 256 << 10
"""Memory that the heads of these requests may take."""
HEADER_OVERHEAD_BYTES: Final = 128
"""Memory that a header's three Python objects take in addition to its bytes."""
HANDSHAKE_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 1.0
"""How often certificates are checked."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`connections`: at most so many at a time. Times in seconds."""

    connections: int = 10_000
    header_seconds: float = 10.0
    idle_seconds: float = 75.0
    write_seconds: float = 60.0
    """How long a client may take nothing of an answer."""


class _Refusal(Exception):
    """Ends the parsing of a request. Raised in callbacks of the parser with a status and a
    message.
    """


class _State(ServerState):
    """The state of a server. `unfinished_bytes`: as MAX_UNFINISHED_BYTES."""

    def __init__(self) -> None:
        super().__init__()
        self.unfinished_bytes = 0


class _Answering:
    """Within it the current task is one of `tasks`."""

    __slots__ = ("_task", "_tasks")

    def __init__(self, tasks: set[asyncio.Task[object]]) -> None:
        self._tasks = tasks

    def __enter__(self) -> None:
        self._task = cast("asyncio.Task[object]", asyncio.current_task())
        self._tasks.add(self._task)

    def __exit__(self, *of_error: object) -> None:
        self._tasks.discard(self._task)


class Cycle(RequestResponseCycle):
    """One request and its answer. Unlike uvicorn's, it writes head and first bytes of an answer at
    once, and cuts off a client that takes nothing of an answer for `write_seconds`."""

    write_seconds = 60.0
    head_memory_bytes = 0
    """Memory that the request's head takes."""
    _head = b""

    async def send(self, message: ASGISendEvent) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self._taken()
        if self.disconnected or self.response_complete:
            return
        if message["type"] == "http.response.start":
            self.response_started = True
            self.waiting_for_100_continue = False
            self._head = self._head_of(message["status"], list(message.get("headers", ())))
            if self.chunked_encoding:  # whose first piece may come much later
                self._write(b"")
        elif message["type"] == "http.response.body":
            self._send_body(message.get("body", b""), more=message.get("more_body", False))

    def _send_body(self, body: bytes, *, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            self.expected_content_length, body = 0, b""
        elif self.chunked_encoding:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = body if more else body + b"0\r\n\r\n"
        else:
            self.expected_content_length -= len(body)
        if self.expected_content_length < 0 or (self.expected_content_length and not more):
            raise RuntimeError("an answer's body is not as long as its content-length")
        self._write(body)
        if more:
            return
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            closed(self.transport, self.write_seconds)
        self.on_response()

    def _write(self, data: bytes) -> None:
        head, self._head = self._head, b""
        if head or data:
            self.transport.write(head + data)

    def _head_of(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        lines = [STATUS_LINE[status]]
        for name, value in self.default_headers + headers:
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"content-length":
                self.expected_content_length, self.chunked_encoding = int(value), False
            elif name == b"connection" and value == b"close":
                self.keep_alive = False
        if not self.keep_alive and (b"connection", b"close") not in headers:
            lines.append(b"connection: close\r\n")
        if (
            self.chunked_encoding is None
            and self.scope["method"] != "HEAD"
            and status not in (204, 304)
        ):
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise RuntimeError("a header of an answer contains a line break")
        return head + b"\r\n"

    async def _taken(self) -> None:
        """Until the client has taken what waits to be sent to it."""
        timer = asyncio.get_running_loop().call_later(self.write_seconds, self.transport.abort)
        try:
            await self.flow.drain()
        finally:
            timer.cancel()


def _reply_to(error: httptools.HttpParserError) -> tuple[int, bytes]:
    """Returns the status and the message for a request that cannot be parsed."""
    refusal = error.__context__
    return (refusal.args[0], refusal.args[1]) if isinstance(refusal, _Refusal) else (400, _NOT_HTTP)


def closed(transport: asyncio.Transport, seconds: float) -> None:
    """Closes a connection once everything is sent, at the latest after `seconds`: a client that
    reads nothing would keep it.
    """
    transport.close()
    if transport.get_write_buffer_size():
        asyncio.get_running_loop().call_later(seconds, transport.abort)


class Connection(HttpToolsProtocol):
    """One connection."""

    def __init__(self, config: Config, state: _State, limits: Limits) -> None:
        super().__init__(
            config=config, server_state=state, app_state={}, _loop=asyncio.get_running_loop()
        )
        self._state = state
        self.app_state = {CONNECTION: self}
        self._limits = limits
        # The state: the request that is being answered (uvicorn's `cycle` is the last that has
        # come) and its tasks, the timer of the head or of the rest, bytes of the head (read so far,
        # and as they came while its end had not), and what is being read.
        self._answered: RequestResponseCycle | None = None
        self._answering: set[asyncio.Task[object]] = set()
        self._timer: TimerHandle | None = None
        self._head_bytes = 0
        self._unfinished_bytes = 0
        self._reads_head = False
        self._reads_body = False
        # Of the bytes that are being parsed: whether they hold content of a body, and how many of
        # them, at least, are such content or heads that ended. How many bytes before them held no
        # content, and those of trailers.
        self._has_content = False
        self._progress_bytes = 0
        self._bytes_without_content = 0
        self._trailer_bytes = 0
        # Whether a second parser is told a head again, and what the connection is closed with once
        # all requests are answered.
        self._resumes = False
        self._refused: tuple[int, bytes] | None = None

    def answering(self) -> AbstractContextManager[None]:
        """The current task is cancelled if the client leaves within this context."""
        return _Answering(self._answering)

    @property
    def is_whole(self) -> bool:
        """Whether all of the request that is being answered has arrived."""
        return not self.pipeline and not self._reads_head and not self._reads_body

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The client's, which the handshake has checked; None if it presented none."""
        tls = self.transport.get_extra_info("ssl_object")
        return tls.getpeercert() if tls is not None else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(503, b"this server has as many connections as it takes; another one may")
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_timer()
        self._count_unfinished(-self._unfinished_bytes)
        self.pipeline.clear()
        if self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()
        for task in self._answering:
            task.cancel()
        # The request refers to its connection. Without these references back, memory is free when
        # its task ends, not only when the garbage collector runs.
        self._forget_request()
        self.scope, self.headers = cast(Any, None), []
        self.app_state = {}

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data and not self.transport.is_closing() and not self._refused:
            self._has_content, self._progress_bytes = False, 0
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                self._decline_upgrade()
                continue
            except httptools.HttpParserError as error:
                return self._refuse(
                    *_reply_to(error)
                )  # no variable holds the error: its traceback holds this frame
            if self._reads_head:
                self._count_unfinished(self._unparsed_bytes(data))
                if self._unfinished_bytes > HEAD_BYTES:
                    self._refuse(431, _LARGE_HEAD)
                elif self._state.unfinished_bytes > MAX_UNFINISHED_BYTES:
                    self._refuse(503, _BUSY)
            elif self._reads_body:
                # The parser collects a trailer until its end, and calls nothing before it.
                self._bytes_without_content = (
                    0
                    if self._has_content
                    else self._bytes_without_content + self._unparsed_bytes(data)
                )
                if self._bytes_without_content > MAX_TRAILER_BYTES:
                    self._refuse(431, _LARGE_TRAILERS)
            break
        return None

    def _unparsed_bytes(self, data: bytes) -> int:
        """Return an upper bound of the bytes that the parser keeps: those after the last blank line
        and after all that ended.
        """
        return min(len(data.rpartition(_BLANK_LINE)[2]), len(data) - self._progress_bytes)

    def on_message_begin(self) -> None:
        if self._resumes:
            return
        self._reads_head, self._head_bytes = True, 0
        if self._timer is None:
            self._expect_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._resumes:
            return
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._resumes:
            return
        if self._reads_body:  # a trailer: no application reads it
            self._trailer_bytes += len(name) + len(value) + len(b": \r\n")
            if self._trailer_bytes > MAX_TRAILER_BYTES:
                raise _Refusal(431, _LARGE_TRAILERS)
            return
        if len(self.headers) == MAX_HEADERS:
            raise _Refusal(431, _MANY_HEADERS)
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """As uvicorn's, but for WebSockets and its own limit, and with a cycle of ours."""
        if self._resumes:
            self._resumes = False
            return
        self._stop_timer()
        if self.transport.is_closing():
            return
        expects_continue = self._check_head()
        self._reads_head, self._reads_body = False, True
        self._trailer_bytes = self._bytes_without_content = 0
        sent_bytes = self._head_bytes + len(b":\r\n") * len(self.headers)  # at least
        self._progress_bytes += max(1, sent_bytes - self._unfinished_bytes)
        if self._unfinished_bytes:
            self._count_unfinished(-self._unfinished_bytes)
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        version = self.parser.get_http_version()
        scope = self.scope
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = version
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = url.path
        scope["query_string"] = url.query or b""
        before = self.cycle
        self.cycle = Cycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=expects_continue,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self.cycle.write_seconds = self._limits.write_seconds
        self.cycle.head_memory_bytes = self._head_bytes + HEADER_OVERHEAD_BYTES * len(self.headers)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        elif (
            len(self.pipeline) < MAX_PIPELINED
            and self._waiting_bytes() + self.cycle.head_memory_bytes <= MAX_PIPELINED_BYTES
        ):
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))
        else:
            self.transport.abort()

    def _waiting_bytes(self) -> int:
        """Return the memory that the heads of pipelined requests take."""
        return sum(cast(Cycle, cycle).head_memory_bytes for cycle, _ in self.pipeline)

    def _check_head(self) -> bool:
        """Returns whether the client waits for 100 Continue. Raises _Refusal."""
        head_bytes, hosts, codings, expects_continue = self._head_bytes, 0, 0, False
        for name, value in self.headers:
            head_bytes += len(name) + len(value)
            if name == b"host":
                hosts += 1
            elif name == b"expect":
                expects_continue = value.lower() == b"100-continue"
            elif name == b"transfer-encoding":
                codings += 1
                if codings > 1 or value.strip().lower() != b"chunked":
                    raise _Refusal(400, _CODING)
        self._head_bytes = head_bytes
        if head_bytes > HEAD_BYTES:
            raise _Refusal(431, _LARGE_HEAD)
        if hosts > 1:
            raise _Refusal(400, _MANY_HOSTS)
        return expects_continue

    def on_body(self, body: bytes) -> None:
        self._has_content = True
        self._progress_bytes += len(body)
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._body_headers():
            return  # `_decline_upgrade` goes on with the body
        self._reads_body = False
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_complete:
            self._stop_timer()
        super().on_message_complete()
        self._forget_answered()

    def on_response_complete(self) -> None:
        if self._refused and not self.pipeline:
            return self._refuse(*self._refused)
        super().on_response_complete()
        if self._reads_body and not self.transport.is_closing():
            self._stop_timer()
            self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        self._forget_answered()
        return None

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            closed(self.transport, LINGER_SECONDS)

    def _decline_upgrade(self) -> None:
        """Goes on with HTTP/1.1 after an offer to speak another protocol. The parser takes what
        follows the head for that protocol; Java's HttpClient, which offers HTTP/2 in its first
        request, sends its body there. Another parser reads it, to which a head without the offer is
        told."""
        self.parser = httptools.HttpRequestParser(self)
        if body := self._body_headers():
            self._resumes = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + body + b"\r\n")

    def _body_headers(self) -> bytes:
        """The headers that say how long the body is; empty: there is none."""
        told = (b"content-length", b"transfer-encoding")
        return b"".join(
            b"%b: %b\r\n" % (name, value) for name, value in self.headers if name in told
        )

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _forget_answered(self) -> None:
        """Releases a request that is answered: an idle connection keeps none."""
        if (
            self._reads_body
            or self.pipeline
            or self.cycle is None
            or not self.cycle.response_complete
        ):
            return
        self._forget_request()
        if not self._reads_head:
            self.scope, self.headers = cast(Any, None), []

    def _forget_request(self) -> None:
        self.cycle, self._answered = cast(Any, None), None

    def _count_unfinished(self, size: int) -> None:
        self._unfinished_bytes += size
        self._state.unfinished_bytes += size

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(
            self._limits.header_seconds, self._refuse, 408, b"the request's headers came too slowly"
        )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, message: bytes) -> None:
        """Answers what is no request yet, in all dialects' form, and closes the connection. What
        came whole before it is answered first."""
        if self.transport.is_closing():
            return
        if self._reads_body and self.pipeline:
            self.pipeline.popleft()  # the newest, which is at fault
        elif self._reads_body and self._answered is self.cycle:
            if self._answered is not None and self._answered.response_started:
                closed(self.transport, LINGER_SECONDS)  # it has its status already
                return
            self._answered = None
        if self._answered is not None and not self._answered.response_complete:
            self._refused = status, message
            self.flow.pause_reading()
            return
        body = b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":null},"message":"%b","detail":"%b"}'
        body = body % (message, message, message)
        head = b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        closed(self.transport, LINGER_SECONDS)


class Server:
    """A listening server; `address` has the port that was really bound."""

    def __init__(
        self, application: Callable[[Any, Any, Any], Awaitable[None]], limits: Limits
    ) -> None:
        self.address = ""
        self._limits = limits
        self._state = _State()
        self._config = Config(
            cast(ASGI3Application, application),
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=cast(int, limits.idle_seconds),
        )
        self._config.load()
        # The state: the socket, and what accepts connections on it.
        self._socket: socket.socket | None = None
        self._listener: asyncio.Server | None = None
        self._is_draining = False

    @property
    def connections(self) -> int:
        return len(self._state.connections)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    async def start(self, address: str, tls: TlsFiles | None) -> None:
        """Listens. Raises NoCapacity if the address cannot be bound, InvalidInput for TLS files
        that cannot be used.
        """
        host, port = parse_address(address)
        context = context_of(tls) if tls is not None else None
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, kind, protocol, _, name = found[0]
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(name)
        except OSError as error:
            if self._socket is not None:
                self._socket.close()
            raise NoCapacity(f"cannot listen on {address}: is another process there?") from error
        self._tell_time()
        await self._listen(context)
        self.address = f"{address.rpartition(':')[0]}:{self._socket.getsockname()[1]}"
        log.info("listening", extra=fields({"address": self.address, "tls": tls is not None}))

    async def keep(self, tls: TlsFiles | None) -> None:
        """Tells the time to clients, and listens with renewed certificates, for ever."""
        watched = Watched(_paths(tls), partial(context_of, tls)) if tls is not None else None
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._tell_time()
            if watched is not None and await asyncio.to_thread(watched.refresh):
                await self._listen(watched.content)

    async def drain(self, grace_seconds: float) -> None:
        """Closes idle connections and accepts no more; waits for requests in flight, at most
        `grace_seconds`, and cuts the rest.
        """
        self._is_draining = True
        log.info("draining", extra=fields({"grace_seconds": grace_seconds}))
        if self._listener is not None:
            self._listener.close()
        if self._socket is not None:
            self._socket.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(grace_seconds):
                while tasks := list(self._state.tasks):
                    await asyncio.wait(tasks)
        except TimeoutError:
            log.warning("requests were cut off at the end of the grace time")
        for task in list(self._state.tasks):
            task.cancel()
        for connection in list(self._state.connections):
            connection.transport.close()
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=1.0)
        log.info("stopped", extra=fields({"address": self.address}))

    async def _listen(self, context: ssl.SSLContext | None) -> None:
        """New connections come with this context; those that there are go on."""
        if self._socket is None:
            return
        before = self._listener
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._config, self._state, self._limits),
            sock=self._socket.dup(),
            ssl=context,
            backlog=2048,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if context is not None else None,
        )
        if before is not None:
            before.close()

    def _tell_time(self) -> None:
        self._state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]


@asynccontextmanager
async def serving_http(
    address: str,
    application: Callable[[Any, Any, Any], Awaitable[None]],
    limits: Limits,
    tls: TlsFiles | None,
    *,
    grace_seconds: float,
) -> AsyncIterator[Server]:
    """Serves until the context ends, then drains. Raises NoCapacity, InvalidInput."""
    server = Server(application, limits)
    await server.start(address, tls)
    keeping = asyncio.create_task(server.keep(tls))
    try:
        yield server
    finally:
        await server.drain(grace_seconds)
        keeping.cancel()


def context_of(tls: TlsFiles) -> ssl.SSLContext:
    """TLS 1.2 and newer by the files as they are now. Raises InvalidInput naming variable and
    file.
    """
    tls.read()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(tls.cert, tls.key, password=lambda: "")
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{tls.cert} (SHOAL_TLS_CERT) cannot be used: {error}", field="SHOAL_TLS_CERT"
        ) from error
    return context


def _paths(tls: TlsFiles) -> list[Any]:
    return [path for path in (tls.cert, tls.key, tls.client_ca) if path is not None]
