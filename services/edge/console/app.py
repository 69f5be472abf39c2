"""The console's part of the edge's ASGI application: `/`, its files, the event stream, and actions.

| | |
| --- | --- |
| `GET /`, `GET /console/static/…` | the page |
| `GET /console/events` | server-sent events: the mesh, then its changes |
| `GET /console/history` | the last hour and the last requests through this edge, for callers who
may watch the mesh |
| `POST /console/act` | `{"action": "load", "model": …, "pool": …}`: load, evict, pin, unpin, check
|

Actions need the permission of the caller: the edge passes the credential to the router, which
requires the role admin.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing, closing, nullcontext, suppress
from typing import Any, Final, Literal

import msgspec
from shoal.errors import ShoalError
from shoal.transport.methods import EVICT_MODEL, EXPLAIN, GET_MODEL, LOAD_MODEL, PIN_MODEL
from shoal.transport.wire import Metadata
from shoal.v1 import mesh_pb2, models_pb2
from shoal.version import VERSION

from libs.serving.calls.call import new_request_id
from libs.telemetry import metrics
from libs.telemetry.logs import fields
from services.edge.activity.history import RequestHistory
from services.edge.asgi import Receive, Scope, Send, State, head_bytes, peer_address
from services.edge.console.access import check_host, check_json, check_page, origin_name
from services.edge.console.board import model_content
from services.edge.console.files import ASSETS, PROTECTION, StaticFiles
from services.edge.console.hub import WatchHub
from services.edge.credentials import CallerTrust, decode_headers, router_metadata
from services.edge.intake.reading import BodyIntake, Payer
from services.edge.messages.base import Answer, HttpError, encode_json, retry_headers
from services.edge.routers import Routers

log = logging.getLogger(__name__)

MAX_ACTION_BYTES: Final = 16 << 10
"""The maximum size of an action's body."""
ACTION_SECONDS: Final = 600.0
"""Time for which the page waits for a load; afterwards the load continues in the background."""
EXPLAIN_SECONDS: Final = 10.0
"""The time limit of the action `check`."""
_EVENTS: Final = "/console/events"
_HISTORY: Final = "/console/history"
_ACT: Final = "/console/act"
_CALLS: Final = (("GET", _EVENTS), ("GET", _HISTORY), ("POST", _ACT))
_NO_STORE: Final = (b"cache-control", b"no-store")

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Action(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /console/act`. `pool` is for a load; empty for the model's default pool."""

    action: Literal["load", "evict", "pin", "unpin", "check"]
    model: str
    pool: str = ""


class ConsoleApp:
    """Answers the console's paths and passes the others to `application`.

    Args:
        guards_all: Whether the Host of the other requests is checked too.
    """

    def __init__(
        self,
        application: Application,
        routers: Routers,
        state: State,
        *,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
        trust: CallerTrust | None = None,
        hub: WatchHub | None = None,
        addresses: Collection[str] = (),
        guards_all: bool = False,
        intake: BodyIntake,
        history: RequestHistory | None = None,
    ) -> None:
        self._application = application
        self._routers = routers
        self._state = state
        self._hosts = frozenset({*hosts, *map(origin_name, origins)})
        self._origins = frozenset(origins)
        self._trust = trust or CallerTrust()
        self._guards_all = guards_all
        self._intake = intake
        self._files = StaticFiles()
        self._history = history or RequestHistory(time.time())
        self.hub = hub or WatchHub(
            routers.watch, routers.may_watch, self._see, lambda: state.is_guarded
        )
        self._about = {
            "version": VERSION,
            "routers": sorted(addresses),
            "digest": self._files.digest,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (_is_console_path(scope) or self._guards_all):
            await self._application(scope, receive, send)
            return
        headers = decode_headers(scope["headers"])
        try:
            check_host(headers, self._hosts)
        except HttpError as problem:
            await self._send(send, "/console", _error_answer(problem))
            return
        if not _is_console_path(scope):
            await self._application(scope, receive, send)
            return
        connection = scope.get("state", {}).get("connection")
        answering = connection.answering() if connection is not None else nullcontext()
        # Cancelled: the page was closed, or the grace time ended.
        with answering, suppress(asyncio.CancelledError):
            await self._handle(scope, headers, receive, send, connection)

    async def _handle(
        self, scope: Scope, headers: dict[str, str], receive: Receive, send: Send, connection: Any
    ) -> None:
        method, path = scope["method"], scope["path"]
        route = path if path in ("/", _EVENTS, _HISTORY, _ACT) else "/console"
        try:
            found = self._files.get(path, headers) if method in ("GET", "HEAD") else None
            if found is not None:
                await self._send(send, route, found)
            elif (method, path) in _CALLS:
                check_page(headers, self._origins)
                metadata = self._metadata(headers, connection)
                with closing(self._intake.payer(peer_address(scope), metadata)) as payer:
                    # Twice: the raw and the decoded head are kept while the page is open.
                    await payer.take_head(2 * head_bytes(scope))
                    if path == _EVENTS:
                        await self._stream(metadata, send)
                    elif path == _HISTORY:
                        await self.hub.check(metadata)
                        content = encode_json(self._history.content(time.time()))
                        await self._send(send, route, Answer(content, headers=(_NO_STORE,)))
                    else:
                        await self._send(
                            send,
                            route,
                            await self._act(headers, metadata, payer, receive, connection),
                        )
            elif path.startswith(ASSETS):
                raise HttpError(
                    "NO_SUCH_ROUTE",
                    "this file belongs to another version of the console: reload the page",
                )
            else:
                raise HttpError(
                    "NO_SUCH_ROUTE", f"{method} {path[:200]} does not exist in the console"
                )
        except HttpError as problem:
            await self._send(send, route, _error_answer(problem))
        except ShoalError as error:
            await self._send(send, route, _error_answer(_problem(error)))
        except Exception:
            log.exception("console request failed", extra=fields({"route": route}))
            await self._send(
                send,
                route,
                _error_answer(HttpError("INTERNAL", "unexpected error; see the edge's log")),
            )

    def _see(self, mesh: mesh_pb2.Mesh, now: float) -> None:
        self._history.note_queue(sum(lane.queued_jobs for lane in mesh.lanes), now)

    async def _stream(self, metadata: Metadata, send: Send) -> None:
        """Send the mesh and its changes. Raises HttpError and ShoalError before the first byte and
        sends them as an event afterwards.
        """
        has_begun = False
        try:
            async with aclosing(self.hub.events(metadata, self._about)) as events:  # type: ignore[type-var]
                async for event in events:
                    if not has_begun:
                        metrics.HTTP_REQUESTS.labels(_EVENTS, "200").inc()
                        await send(
                            _start(
                                200,
                                b"text/event-stream",
                                (_NO_STORE, (b"x-accel-buffering", b"no")),
                            )
                        )
                        has_begun = True
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except (HttpError, ShoalError) as error:
            if not has_begun:
                raise
            problem = error if isinstance(error, HttpError) else _problem(error)
            reported = encode_json({"reason": problem.reason, "message": problem.message})
            await send(
                {
                    "type": "http.response.body",
                    "body": b"event: refused\ndata: " + reported + b"\n\n",
                    "more_body": True,
                }
            )
        await send({"type": "http.response.body", "body": b""})

    async def _act(
        self,
        headers: dict[str, str],
        metadata: Metadata,
        payer: Payer,
        receive: Receive,
        connection: Any,
    ) -> Answer:
        """Parse and perform an action. Raises HttpError and ShoalError."""
        check_json(headers)
        is_whole = connection is not None and connection.is_whole
        body = await self._intake.body(
            receive, headers, payer, is_whole=is_whole, limit=MAX_ACTION_BYTES
        )
        await self._intake.admit(body, payer, is_msgpack=False)
        try:
            action = msgspec.json.decode(body, type=Action)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise HttpError("INVALID_INPUT", str(error)) from None
        log.info("console action", extra=fields({"action": action.action, "model": action.model}))
        return Answer(encode_json(await self._perform(action, metadata)), headers=(_NO_STORE,))

    async def _perform(self, action: Action, metadata: Metadata) -> dict[str, Any]:
        """Perform the action and return a message about it. Raises ShoalError."""
        name = action.model
        if action.action == "check":
            return await self._check(name, metadata)
        if action.action == "load":
            load = models_pb2.LoadModelRequest(model=name, pool=action.pool)
            loaded = await self._ask(LOAD_MODEL, load, metadata, ACTION_SECONDS)
            holders = [
                place.worker_id
                for place in loaded.model.places
                if place.state == models_pb2.MODEL_STATE_RESIDENT
            ]
            return {"message": f"{name} is resident on {_join_names(holders)}"}
        if action.action == "evict":
            evicted = await self._ask(
                EVICT_MODEL, models_pb2.EvictModelRequest(model=name), metadata
            )
            ids = list(evicted.worker_ids)
            return {
                "message": f"{_join_names(ids)} will unload {name}"
                if ids
                else f"no worker holds {name}"
            }
        pinned = action.action == "pin"
        reply = await self._ask(
            PIN_MODEL, models_pb2.PinModelRequest(model=name, pinned=pinned), metadata
        )
        holders = [place.worker_id for place in reply.model.places if place.pinned]
        if pinned and not holders:
            return {"message": f"no worker holds {name}, so it cannot be pinned: load it first"}
        return {
            "message": f"{name} is pinned on {_join_names(holders)}"
            if pinned
            else f"{name} may be evicted again"
        }

    async def _check(self, name: str, metadata: Metadata) -> dict[str, Any]:
        """Return the model's state and the reason for it. Raises ShoalError."""
        placement = await self._ask(
            EXPLAIN, mesh_pb2.ExplainPlacementRequest(model=name), metadata, EXPLAIN_SECONDS
        )
        known: dict[str, Any] | None = None
        try:
            known = model_content(
                (
                    await self._ask(
                        GET_MODEL, models_pb2.GetModelRequest(model=name), metadata, EXPLAIN_SECONDS
                    )
                ).model
            )
        except ShoalError as error:
            if error.reason != "MODEL_NOT_FOUND":
                raise
        return {
            "message": placement.summary,
            "plan": placement.plan,
            "scheduler": placement.scheduler.scheduler_id,
            "model": known,
            "workers": [
                {
                    "id": one.worker_id,
                    "pool": one.pool,
                    "eligible": one.eligible,
                    "reason": one.reason,
                    "score": round(one.score, 2),
                }
                for one in placement.workers
            ],
        }

    async def _ask(
        self, method: Any, message: Any, metadata: Metadata, seconds: float = 60.0
    ) -> Any:
        named = (
            *((key, value) for key, value in metadata if key != "x-request-id"),
            ("x-request-id", new_request_id()),
        )
        return await self._routers.ask(
            method, message.SerializeToString(), seconds=seconds, metadata=named
        )

    def _metadata(self, headers: dict[str, str], connection: Any) -> Metadata:
        """Return the metadata of a call for the console. Raises HttpError."""
        if self._state.is_open:
            raise HttpError(
                "NOT_READY",
                "routers accept anonymous calls, so this edge does not serve beyond its machine",
            )
        certificate = (
            connection.certificate if connection is not None and self._trust.certificates else None
        )
        return router_metadata(headers, new_request_id(), certificate, self._trust)

    async def _send(self, send: Send, route: str, answer: Answer) -> None:
        metrics.HTTP_REQUESTS.labels(route, str(answer.status)).inc()
        body = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
        length = () if answer.status == 304 else ((b"content-length", b"%d" % len(body)),)
        await send(_start(answer.status, answer.media_type, (*answer.headers, *length)))
        await send({"type": "http.response.body", "body": body})


def _is_console_path(scope: Scope) -> bool:
    path = scope["path"]
    return (
        (path == "/" and scope["method"] in ("GET", "HEAD"))
        or path == "/console"
        or path.startswith("/console/")
    )


def _start(status: int, kind: bytes, headers: Collection[tuple[bytes, bytes]]) -> dict[str, Any]:
    names = {name for name, _ in headers}
    protection = [(name, value) for name, value in PROTECTION if name not in names]
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", kind), *headers, *protection],
    }


def _error_answer(problem: HttpError) -> Answer:
    content = {
        "error": {"reason": problem.reason, "message": problem.message, "field": problem.field}
    }
    return Answer(
        encode_json(content), problem.status, headers=(_NO_STORE, *retry_headers(problem))
    )


def _problem(error: ShoalError) -> HttpError:
    problem = HttpError(
        error.reason, error.message, field=error.field, retry_after=error.retry_after
    )
    if error.code == "NOT_FOUND":
        problem.status = 404
    return problem


def _join_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
