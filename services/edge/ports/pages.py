"""Decide which web pages may call the edge: those of listed origins (CORS), and no others if calls
need no credential.

Any web page can make a browser send requests to any address, including this machine's. A foreign
page has no credential, so routers refuse it. If routers accept anonymous calls, two checks at all
paths replace the credential:

- Host must be an address, this machine, or a listed name: a page can make its name resolve to this
  machine (DNS rebinding), and the browser then treats the edge as part of the page.
- Sec-Fetch-Site, or Origin from browsers without it: the request must not be from a foreign page,
  unless its origin is listed.

A foreign link may open the console: a navigation to its page or files is answered, since the page
cannot read the answer. Programs send neither Sec-Fetch-Site nor Origin and are not affected. Probes
may have any Host.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final

from libs.telemetry import metrics
from services.edge.asgi import Receive, Scope, Send, State
from services.edge.console.access import host_name, is_address, is_local, is_same
from services.edge.console.files import ASSETS
from services.edge.messages.base import HttpError
from services.edge.routes import DEFAULT

Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

MAX_AGE_SECONDS: Final = 600
"""Time for which a browser may cache a preflight's result."""
_HOST: Final = b"host"
_ORIGIN: Final = b"origin"
_SITE: Final = b"sec-fetch-site"
_MODE: Final = b"sec-fetch-mode"
_DESTINATION: Final = b"sec-fetch-dest"
_ASKED: Final = b"access-control-request-method"
_READ: Final = frozenset({_HOST, _ORIGIN, _SITE, _MODE, _DESTINATION, _ASKED})
_OWN_SITES: Final = (b"same-origin", b"none")
_VARY: Final[Header] = (b"vary", b"origin")
_EXPOSED: Final[Header] = (b"access-control-expose-headers", b"x-request-id, retry-after, *")
_PREFLIGHT: Final[tuple[Header, ...]] = (
    (b"access-control-allow-methods", b"GET, HEAD, POST"),
    (b"access-control-allow-headers", b"authorization, *"),  # `*` does not include authorization
    (b"access-control-max-age", b"%d" % MAX_AGE_SECONDS),
)


class PageGuard:
    """Guards the applications of an edge.

    Args:
        state: `is_guarded` says whether callers without a credential are let in.
        hosts: Names that the Host of a request may have.
        origins: Origins of pages that may call the edge, as browsers write them.
        own_origins: Origins under which browsers know the console.
        checks_host: Whether Host is checked.
        probes: Paths that are answered for any Host.
    """

    def __init__(
        self,
        state: State,
        *,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
        own_origins: Collection[str] = (),
        checks_host: bool = True,
        probes: Collection[str] = (),
    ) -> None:
        self._state = state
        self._hosts = frozenset(hosts)
        self._origins = frozenset(origin.encode() for origin in origins)
        self._own_origins = frozenset(origin.encode() for origin in own_origins)
        self._checks_host = checks_host
        self._probes = frozenset(probes)
        # The last Host header that passed, which most requests have.
        self._answered_host = ""

    def guard(self, application: Application) -> Application:
        """Return the application behind the checks."""

        def guarded(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            if self._origins or self._state.is_guarded:
                return self._serve(application, scope, receive, send)
            return application(scope, receive, send)

        return guarded

    async def _serve(
        self, application: Application, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers = {name: value for name, value in scope["headers"] if name in _READ}
        origin = headers.get(_ORIGIN, b"")
        is_listed = origin in self._origins
        if self._origins:
            send = _with_headers(send, _allowed(origin) if is_listed else (_VARY,))
        try:
            if self._state.is_guarded:
                self._check(scope["method"], scope["path"], headers)
        except HttpError as problem:
            metrics.HTTP_REQUESTS.labels(metrics.OTHER, str(problem.status)).inc()
            answer = DEFAULT.error(problem)
            body = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
            await _send(
                send, problem.status, body, ((b"content-type", answer.media_type), *answer.headers)
            )
            return
        if is_listed and scope["method"] == "OPTIONS" and _ASKED in headers:
            await _send(send, 204, b"", _PREFLIGHT)
        else:
            await application(scope, receive, send)

    def _check(self, method: str, path: str, headers: dict[bytes, bytes]) -> None:
        """Raise HttpError: 421 for a Host that may be a foreign page's name, 403 for a foreign
        page.
        """
        given = headers.get(_HOST, b"").decode("latin-1")
        if (
            self._checks_host
            and given
            and given != self._answered_host
            and path not in self._probes
        ):
            host = host_name(given)
            if not (is_address(host) or is_local(host) or host in self._hosts):
                text = (
                    "this edge needs no credential, so it does not answer for the host "
                    f"{given[:100]!r}: use http://127.0.0.1, "
                    "or list the name in SHOAL_HTTP_HOSTS"
                )
                raise HttpError("PERMISSION_DENIED", text, field="host", status=421)
            self._answered_host = given
        if _SITE not in headers and _ORIGIN not in headers:
            return  # a browser sends at least one of them for a foreign page
        origin, site = (
            headers.get(_ORIGIN, b"").decode("latin-1"),
            headers.get(_SITE, b"").decode("latin-1"),
        )
        if headers.get(_ORIGIN, b"") in self._origins or _opens_console(method, path, headers):
            return
        is_own = (
            site.encode("latin-1") in _OWN_SITES
            if site
            else not origin or self._is_own(origin, given)
        )
        if not is_own:
            text = (
                "this edge needs no credential, so it refuses requests of web pages elsewhere, "
                f"here {(origin or site)[:100]!r}: "
                "list the page's origin, such as https://app.example, in SHOAL_HTTP_ORIGINS"
            )
            raise HttpError("PERMISSION_DENIED", text, field="origin")

    def _is_own(self, origin: str, host: str) -> bool:
        return is_same(origin, host) or origin.encode("latin-1") in self._own_origins


def _opens_console(method: str, path: str, headers: dict[bytes, bytes]) -> bool:
    """Return whether a browser requests the console's page or files for a tab or window, rather
    than for a frame or a script.
    """
    is_navigation = headers.get(_MODE) == b"navigate" and headers.get(_DESTINATION) == b"document"
    return is_navigation and method in ("GET", "HEAD") and (path == "/" or path.startswith(ASSETS))


def _allowed(origin: bytes) -> tuple[Header, ...]:
    return (b"access-control-allow-origin", origin), _EXPOSED, _VARY


def _with_headers(send: Send, more: tuple[Header, ...]) -> Send:
    async def send_with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return send_with_headers


async def _send(send: Send, status: int, body: bytes, headers: tuple[Header, ...]) -> None:
    length = () if status == 204 else ((b"content-length", b"%d" % len(body)),)
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": body})
