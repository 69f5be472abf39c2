"""The HTTP server: uvicorn's protocol on httptools, plus timers for slow heads, limits of heads and
connections, cancellation on disconnect, reloading of certificates, and graceful draining.

A connection's state is uvicorn's. The application is any ASGI application. The request's
`HttpConnection` is in the scope's state under CONNECTION.
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

# Its warnings about clients that do not speak HTTP would let strangers fill the log.
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

CONNECTION: Final = "connection"
MAX_HEAD_BYTES: Final = 64 << 10
"""The maximum size of a request's line and headers."""
MAX_HEADERS: Final = 128
"""The maximum number of headers. Each is three Python objects, so a head within a limit of bytes
alone could take thirty times its size. Proxies pass at most 100 (Envoy, Apache, Kestrel).
"""
MAX_TRAILER_BYTES: Final = 8 << 10
"""The maximum size of a chunked body's trailers, which are dropped, and of any other part of a body
without content.
"""
MAX_UNFINISHED_BYTES: Final = 16 << 20
"""The maximum size of all incomplete heads of a server. Most clients send a head in one piece,
which is not counted.
"""
_NOT_HTTP: Final = b"this is not an HTTP request"
_LARGE_HEAD: Final = b"the request's headers exceed the limit of %d bytes" % MAX_HEAD_BYTES
_MANY_HEADERS: Final = b"the request has more than %d headers" % MAX_HEADERS
_LARGE_TRAILERS: Final = b"the request's trailers exceed the limit of %d bytes" % MAX_TRAILER_BYTES
_MANY_HOSTS: Final = b"the request has more than one Host header: send one"
_CODING: Final = (
    b"the only transfer-encoding supported is chunked: send a compressed body with content-encoding"
)
_BUSY: Final = b"the server is at its limit of unfinished requests: try again"
_BLANK_LINE: Final = b"\r\n\r\n"
LINGER_SECONDS: Final = 5.0
"""Time for which the rest of an already answered request is read and dropped: closing at once would
reset the connection before the client has read the answer. It also limits how long a closing
connection may take to send its remaining data.
"""
MAX_PIPELINED: Final = 64
"""The maximum number of pipelined requests on a connection; each takes some kilobytes."""
MAX_PIPELINED_BYTES: Final = 256 << 10
"""The maximum memory of pipelined requests' heads."""
HEADER_OVERHEAD_BYTES: Final = 128
"""Memory of a header's three Python objects in addition to its bytes."""
HANDSHAKE_SECONDS: Final = 10.0
CERTIFICATE_CHECK_SECONDS: Final = 1.0
"""The interval at which certificates are checked."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a server: `connections` is their maximum number; times are in seconds."""

    connections: int = 10_000
    header_seconds: float = 10.0
    idle_seconds: float = 75.0
    write_seconds: float = 60.0
    """Time for which a client may accept no data of an answer."""


class _Refusal(Exception):
    """Ends the parsing of a request. Callbacks of the parser raise it with a status and a
    message.
    """


class _State(ServerState):
    """The state of a server. `unfinished_bytes` counts towards MAX_UNFINISHED_BYTES."""

    def __init__(self) -> None:
        super().__init__()
        self.unfinished_bytes = 0


class _TaskScope:
    """Registers the current task in `tasks` within the context."""

    __slots__ = ("_task", "_tasks")

    def __init__(self, tasks: set[asyncio.Task[object]]) -> None:
        self._tasks = tasks

    def __enter__(self) -> None:
        self._task = cast("asyncio.Task[object]", asyncio.current_task())
        self._tasks.add(self._task)

    def __exit__(self, *of_error: object) -> None:
        self._tasks.discard(self._task)


class Cycle(RequestResponseCycle):
    """One request and its answer. Unlike uvicorn's, it sends an answer's head and first bytes
    together, and disconnects a client that accepts no data for `write_seconds`.
    """

    write_seconds = 60.0
    head_memory_bytes = 0
    """Memory of the request's head."""
    _head = b""

    async def send(self, message: ASGISendEvent) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self._wait_for_buffer()
        if self.disconnected or self.response_complete:
            return
        if message["type"] == "http.response.start":
            self.response_started = True
            self.waiting_for_100_continue = False
            self._head = self._encode_head(message["status"], list(message.get("headers", ())))
            if self.chunked_encoding:  # the first chunk may be much later
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
            raise RuntimeError("the length of an answer's body differs from its content-length")
        self._write(body)
        if more:
            return
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            close_gracefully(self.transport, self.write_seconds)
        self.on_response()

    def _write(self, data: bytes) -> None:
        head, self._head = self._head, b""
        if head or data:
            self.transport.write(head + data)

    def _encode_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
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

    async def _wait_for_buffer(self) -> None:
        """Wait until the transport's buffer has room."""
        timer = asyncio.get_running_loop().call_later(self.write_seconds, self.transport.abort)
        try:
            await self.flow.drain()
        finally:
            timer.cancel()


def _reply_to(error: httptools.HttpParserError) -> tuple[int, bytes]:
    """Return the status and the message for a request that cannot be parsed."""
    refusal = error.__context__
    return (refusal.args[0], refusal.args[1]) if isinstance(refusal, _Refusal) else (400, _NOT_HTTP)


def close_gracefully(transport: asyncio.Transport, seconds: float) -> None:
    """Close a connection after its data is sent, at the latest after `seconds`: a client that reads
    nothing would keep it open.
    """
    transport.close()
    if transport.get_write_buffer_size():
        asyncio.get_running_loop().call_later(seconds, transport.abort)


class HttpConnection(HttpToolsProtocol):
    """One connection."""

    def __init__(self, config: Config, state: _State, limits: ServerLimits) -> None:
        super().__init__(
            config=config, server_state=state, app_state={}, _loop=asyncio.get_running_loop()
        )
        self._state = state
        self.app_state = {CONNECTION: self}
        self._limits = limits
        # The state: the request being answered (uvicorn's `cycle` is the newest one) and its tasks,
        # the timer of the head or of the rest, the bytes of the head (read so far, and received
        # while it was incomplete), and the part that is being read.
        self._answered: RequestResponseCycle | None = None
        self._answering: set[asyncio.Task[object]] = set()
        self._timer: TimerHandle | None = None
        self._head_bytes = 0
        self._unfinished_bytes = 0
        self._reads_head = False
        self._reads_body = False
        # Of the bytes being parsed: whether they contain body content, and a lower bound of the
        # bytes that are content or completed heads. Then the number of preceding bytes without
        # content, and of trailer bytes.
        self._has_content = False
        self._progress_bytes = 0
        self._bytes_without_content = 0
        self._trailer_bytes = 0
        # Whether a second parser re-reads a head, and the bytes that close the connection once all
        # requests are answered.
        self._resumes = False
        self._refused: tuple[int, bytes] | None = None

    def answering(self) -> AbstractContextManager[None]:
        """Cancel the current task if the client disconnects within this context."""
        return _TaskScope(self._answering)

    @property
    def is_whole(self) -> bool:
        """Return whether the request being answered has completely arrived."""
        return not self.pipeline and not self._reads_head and not self._reads_body

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """Return the client's certificate, which the handshake has verified, or None."""
        tls = self.transport.get_extra_info("ssl_object")
        return tls.getpeercert() if tls is not None else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(503, b"the server is at its limit of connections: try again")
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
        # The request refers to its connection. Without references back, memory is freed when its
        # task ends instead of at the next garbage collection.
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
                )  # bind the error to no variable: its traceback holds this frame
            if self._reads_head:
                self._count_unfinished(self._unparsed_bytes(data))
                if self._unfinished_bytes > MAX_HEAD_BYTES:
                    self._refuse(431, _LARGE_HEAD)
                elif self._state.unfinished_bytes > MAX_UNFINISHED_BYTES:
                    self._refuse(503, _BUSY)
            elif self._reads_body:
                # The parser collects a trailer until its end without callbacks.
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
        and after all completed parts.
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
        """Create our cycle as uvicorn does, without its WebSockets and concurrency limit."""
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
        """Return the memory of pipelined requests' heads."""
        return sum(cast(Cycle, cycle).head_memory_bytes for cycle, _ in self.pipeline)

    def _check_head(self) -> bool:
        """Return whether the client waits for 100 Continue. Raises _Refusal."""
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
        if head_bytes > MAX_HEAD_BYTES:
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
            return  # `_decline_upgrade` continues with the body
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
            close_gracefully(self.transport, LINGER_SECONDS)

    def _decline_upgrade(self) -> None:
        """Continue with HTTP/1.1 after an offer to switch protocols. The parser treats the bytes
        after the head as the other protocol's; Java's HttpClient, which offers HTTP/2 in its first
        request, sends its body there. So another parser reads the body, after a head without the
        offer.
        """
        self.parser = httptools.HttpRequestParser(self)
        if body := self._body_headers():
            self._resumes = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + body + b"\r\n")

    def _body_headers(self) -> bytes:
        """Return the headers that determine the body's length; empty without a body."""
        names = (b"content-length", b"transfer-encoding")
        return b"".join(
            b"%b: %b\r\n" % (name, value) for name, value in self.headers if name in names
        )

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _forget_answered(self) -> None:
        """Release an answered request, so that idle connections keep none."""
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
            self._limits.header_seconds,
            self._refuse,
            408,
            b"the request's headers arrived too slowly",
        )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, message: bytes) -> None:
        """Answer an incomplete request in a form that all dialects share and close the connection.
        Complete requests before it are answered first.
        """
        if self.transport.is_closing():
            return
        if self._reads_body and self.pipeline:
            self.pipeline.popleft()  # the newest is the faulty one
        elif self._reads_body and self._answered is self.cycle:
            if self._answered is not None and self._answered.response_started:
                close_gracefully(self.transport, LINGER_SECONDS)  # its status was already sent
                return
            self._answered = None
        if self._answered is not None and not self._answered.response_complete:
            self._refused = status, message
            self.flow.pause_reading()
            return
        body = (
            b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":null},'
            b'"message":"%b","detail":"%b"}'
        )
        body = body % (message, message, message)
        head = (
            b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: "
            b"%d\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head % (status, len(body)) + body)
        close_gracefully(self.transport, LINGER_SECONDS)


class HttpServer:
    """A listening server. `address` has the port that was bound."""

    def __init__(
        self, application: Callable[[Any, Any, Any], Awaitable[None]], limits: ServerLimits
    ) -> None:
        self.address = ""
        self._limits = limits
        self._state = _State()
        self._config = Config(
            cast(ASGI3Application, application),
            http=HttpConnection,
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
        """Listen. Raises NoCapacity if the address cannot be bound, InvalidInput for unusable TLS
        files.
        """
        host, port = parse_address(address)
        context = tls_context(tls) if tls is not None else None
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
            raise NoCapacity(
                f"cannot listen on {address}: is it used by another process?"
            ) from error
        self._set_date_header()
        await self._listen(context)
        self.address = f"{address.rpartition(':')[0]}:{self._socket.getsockname()[1]}"
        log.info("listening", extra=fields({"address": self.address, "tls": tls is not None}))

    async def maintain(self, tls: TlsFiles | None) -> None:
        """Update the date header and reload renewed certificates until cancelled."""
        watched = Watched(_paths(tls), partial(tls_context, tls)) if tls is not None else None
        while True:
            await asyncio.sleep(CERTIFICATE_CHECK_SECONDS)
            self._set_date_header()
            if watched is not None and await asyncio.to_thread(watched.refresh):
                await self._listen(watched.content)

    async def drain(self, grace_seconds: float) -> None:
        """Close idle connections, accept no new ones, and wait for requests in flight. After
        `grace_seconds` the remaining ones are aborted.
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
            log.warning("requests were aborted at the end of the grace time")
        for task in list(self._state.tasks):
            task.cancel()
        for connection in list(self._state.connections):
            connection.transport.close()
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=1.0)
        log.info("stopped", extra=fields({"address": self.address}))

    async def _listen(self, context: ssl.SSLContext | None) -> None:
        """Accept new connections with this context; existing ones continue."""
        if self._socket is None:
            return
        before = self._listener
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: HttpConnection(self._config, self._state, self._limits),
            sock=self._socket.dup(),
            ssl=context,
            backlog=2048,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if context is not None else None,
        )
        if before is not None:
            before.close()

    def _set_date_header(self) -> None:
        self._state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]


@asynccontextmanager
async def serving_http(
    address: str,
    application: Callable[[Any, Any, Any], Awaitable[None]],
    limits: ServerLimits,
    tls: TlsFiles | None,
    *,
    grace_seconds: float,
) -> AsyncIterator[HttpServer]:
    """Serve until the context ends, then drain. Raises NoCapacity, InvalidInput."""
    server = HttpServer(application, limits)
    await server.start(address, tls)
    keeping = asyncio.create_task(server.maintain(tls))
    try:
        yield server
    finally:
        await server.drain(grace_seconds)
        keeping.cancel()


def tls_context(tls: TlsFiles) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and newer from the current files. Raises InvalidInput that names
    the variable and the file.
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
