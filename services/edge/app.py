"""The composition of an edge, the HTTP gateway of a mesh: its whole object graph, top to bottom."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from prometheus_client.core import Metric
from shoal.bulk.failures import StorageError
from shoal.errors import ShoalError
from shoal.transport.wire import Metadata

from libs.errors import InvalidInput
from libs.serving import serving
from libs.serving.security.settings import is_loopback
from libs.telemetry import metrics
from libs.telemetry.exposition import serving_metrics
from libs.telemetry.logs import fields
from services.edge.activity.history import RequestHistory
from services.edge.asgi import Application, RequestLimits, State
from services.edge.batches import routes as batch_routes
from services.edge.batches.batches import Batches
from services.edge.batches.context import Context
from services.edge.batches.files import FileService
from services.edge.batches.manager import Manager
from services.edge.console import ConsoleApp
from services.edge.console.access import origin_name
from services.edge.credentials import CallerTrust
from services.edge.intake import reading
from services.edge.intake.budget import Budget
from services.edge.intake.served import Executed, Serve
from services.edge.jobs import routes as job_routes
from services.edge.jobs.jobs import JobKind, Jobs
from services.edge.jobs.objects import JobRecord
from services.edge.jobs.runner import MeshConnection
from services.edge.messages.base import Answer, encode_json
from services.edge.openapi import document
from services.edge.ports.pages import PageGuard
from services.edge.ports.prefix_app import PrefixApp
from services.edge.ports.tei_grpc import TeiServer, serving_tei
from services.edge.reference import reference_answers
from services.edge.routers import Routers
from services.edge.routes import ROUTES, RouteTable
from services.edge.server import HttpServer, ServerLimits, serving_http
from services.edge.settings import Settings

log = logging.getLogger(__name__)

HEALTH_NAME: Final = "edge"
"""The service name in SHOAL_HEALTH_ADDRESS (grpc.health.v1)."""
POLL_SECONDS: Final = 1.0
"""The interval at which an edge checks whether a router serves and whether watched files
changed.
"""
GUARD_SECONDS: Final = 30.0
"""The interval at which a guarded edge checks whether routers now require credentials."""
START_SECONDS: Final = 5.0
"""The time limit for the first readiness check; after it the edge serves as not ready."""


class Edge:
    """The objects of one edge, each built from those before it."""

    def __init__(self, settings: Settings, routers: Routers) -> None:
        self.state = State(budget=Budget(settings.in_flight_bytes))
        self.routers = routers
        self.console_address = ""
        self.aliases = settings.aliases
        # Beyond this machine the edge serves only for routers that authenticate callers.
        self._trust = CallerTrust(
            settings.security.trust_domain if settings.security.client_ca else "", settings.vouches
        )
        self._needs_authentication = not (
            settings.is_local or settings.security.allow_insecure or settings.security.client_ca
        )
        self.state.is_open = self._needs_authentication
        # If callers need no credential, web pages are refused until a router has refused a token.
        may_be_open = (
            settings.is_local or settings.security.allow_insecure
        ) and not settings.security.client_ca
        self._may_be_open = self.state.is_guarded = may_be_open
        self._next_guard_check = 0.0
        self.batches: Manager | None = None
        served: dict[tuple[str, str], Serve] = batch_routes.refusals() | job_routes.refusals()
        routes = list(ROUTES)
        if settings.batches.url:
            self.batch_context = Context(
                settings.batches, routers.tenant, vouches=self._trust.vouches
            )
            mesh = MeshConnection(settings.routers, settings.routers_tls)
            jobs = JobKind(self.batch_context, settings.jobs, mesh)
            self.batches = Manager(
                self.batch_context,
                self._execute,
                max_line_bytes=settings.body_bytes,
                max_seconds=settings.max_deadline_seconds,
                kinds=[jobs] if settings.jobs.roots else [],
            )
            bounds = reading.BodyLimits(pause_seconds=settings.body_pause_seconds)
            served |= batch_routes.handlers(
                FileService(self.batch_context, bounds), Batches(self.batch_context, self.batches)
            )
            routes += batch_routes.ROUTES
            if settings.jobs.roots:
                served |= job_routes.handlers(Jobs(self.batch_context, settings.jobs, self.batches))
                routes += job_routes.ROUTES
        table = RouteTable((*ROUTES, *batch_routes.ROUTES, *job_routes.ROUTES))
        described = encode_json(document(routes))
        own_answers: dict[str, Callable[[], Answer]] = {
            "/livez": _alive,
            "/health": _alive,
            "/healthz": _alive,
            "/ping": _alive,
            "/readyz": self._ready,
            "/v2/health/live": lambda: Answer(encode_json({"live": True})),
            "/v2/health/ready": lambda: Answer(
                encode_json({"ready": self.state.is_ready}), 200 if self.state.is_ready else 503
            ),
            "/openapi.json": lambda: Answer(described),
            **reference_answers(),
        }
        self.pages = PageGuard(
            self.state,
            hosts=(
                *settings.hosts,
                *settings.console_hosts,
                *map(origin_name, settings.console_origins),
            ),
            origins=settings.origins,
            own_origins=settings.console_origins,
            checks_host=settings.is_local or bool(settings.hosts),
            probes=own_answers,
        )
        history = RequestHistory(time.time())
        self.application = Application(
            routers,
            lambda: self.aliases.content,
            self.state,
            table=table,
            bounds=RequestLimits(
                reading.BodyLimits(
                    settings.body_bytes, settings.body_seconds, settings.body_pause_seconds
                ),
                settings.deadline_seconds,
                settings.max_deadline_seconds,
            ),
            trust=self._trust,
            extra=own_answers,
            vocabulary=settings.vocabulary,
            compression=settings.compression,
            observe=history.note_request if settings.console else None,
            served=served,
        )

        self.console = None
        if settings.console:
            self.console = ConsoleApp(
                self.application,
                routers,
                self.state,
                hosts=settings.console_hosts,
                origins=settings.console_origins,
                trust=self._trust,
                addresses=settings.routers,
                intake=self.application.intake,
                guards_all=bool(settings.console_address),
                history=history,
            )

    async def poll(self) -> None:
        """Check once whether a router serves and whether watched files changed."""
        await asyncio.to_thread(self.aliases.refresh)
        is_ready = await self.routers.is_serving()
        if is_ready and self._needs_authentication and self.state.is_open:
            is_ready = await self._authenticates()
        if is_ready and self._may_be_open:
            await self._update_guard()
        if is_ready != self.state.is_ready:
            log.info("readiness changed", extra=fields({"is_ready": is_ready}))
        self.state.is_ready = is_ready

    async def poll_forever(self, publish: Callable[[bool], Awaitable[None]]) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll()
            await publish(self.state.is_ready)
            await asyncio.sleep(POLL_SECONDS)

    async def _authenticates(self) -> bool:
        try:
            self.state.is_open = await self.routers.accepts_anonymous()
        except ShoalError:
            return False
        if self.state.is_open:
            log.error(
                "refusing to serve beyond this machine: routers accept anonymous calls. Set "
                "SHOAL_TOKENS or SHOAL_JWKS on the routers, set SHOAL_TLS_CLIENT_CA on the edge, "
                "or set SHOAL_ALLOW_INSECURE=1 if something else protects it"
            )
        return not self.state.is_open

    async def _update_guard(self) -> None:
        """Refuse requests from web pages while routers accept anonymous calls."""
        now = asyncio.get_running_loop().time()
        if self.state.is_ready and (not self.state.is_guarded or now < self._next_guard_check):
            return
        self._next_guard_check = now + GUARD_SECONDS
        try:
            self.state.is_guarded = await self.routers.accepts_anonymous()
        except ShoalError:
            self.state.is_guarded = True

    async def _execute(
        self, path: str, body: bytes, metadata: Metadata, request_id: str, seconds: float, /
    ) -> Executed:
        """Answer one request of a batch. This indirection exists because the application is created
        after the batches.
        """
        return await self.application.execute(path, body, metadata, request_id, seconds)

    @asynccontextmanager
    async def running_batches(self) -> AsyncIterator[None]:
        """Run batches within this context, if a storage for them is configured. Raises InvalidInput
        if the storage is unusable.
        """
        if self.batches is None:
            yield
            return
        context = self.batch_context
        try:
            await context.io(context.store.prepare)
        except StorageError as error:
            raise InvalidInput(f"SHOAL_BATCHES_URL: {error}", field="SHOAL_BATCHES_URL") from None
        try:
            async with self.batches.serving():
                yield
        finally:
            context.close()

    def tei_server(self, settings: Settings, model: str) -> TeiServer:
        """Return the server of TEI's gRPC API for one address."""
        return TeiServer(
            self.routers,
            lambda: self.aliases.content,
            self.state,
            model=model,
            trust=self._trust,
            intake=self.application.intake,
            default_seconds=settings.deadline_seconds,
            longest_seconds=settings.max_deadline_seconds,
        )

    def read_metrics(self, server: Callable[[], HttpServer | None]) -> Iterator[Metric]:
        """Yield metrics. The thread that serves a scrape calls this."""
        serving_now = server()
        yield metrics.HTTP_CONNECTIONS.family(
            {(): serving_now.connections if serving_now is not None else 0}
        )
        yield metrics.HTTP_HELD_BYTES.family({(): self.state.held_bytes})
        yield metrics.HTTP_ROUTER_UP.family({(): self.state.is_ready})
        if self.batches is not None:
            yield metrics.HTTP_BATCHES_ACTIVE.family({(): self.batches.active})
            yield metrics.HTTP_BATCH_REQUESTS_IN_FLIGHT.family({(): self.batches.in_flight})
            running, left = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
            for record in self.batches.records(JobRecord):
                model = (str(record.recipe.get("model", "")),)
                running[model] += 1
                left[model] += record.rows_left
            yield metrics.HTTP_JOBS_ACTIVE.family(running)
            yield metrics.HTTP_JOB_ROWS_LEFT.family(left)

    def _ready(self) -> Answer:
        status = 200 if self.state.is_ready else 503
        return Answer(
            encode_json({"status": "ready" if self.state.is_ready else "no router answers"}), status
        )


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[str]:
    """Serve at the yielded address (host:port); shut down gracefully on exit. Raises NoCapacity if
    an address is in use.
    """
    async with AsyncExitStack() as stack:
        routers = await stack.enter_async_context(Routers(settings.routers, settings.routers_tls))
        edge = Edge(settings, routers)
        servers: list[HttpServer] = []
        await stack.enter_async_context(
            serving_metrics(
                settings.metrics_address,
                lambda: edge.read_metrics(lambda: servers[0] if servers else None),
            )
        )
        tei = {address: edge.tei_server(settings, model) for address, model in settings.tei_grpc}
        publish = _publish_to_all(
            await _health(stack, settings.security.health_address), tei.values()
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                await edge.poll()
        except TimeoutError:
            log.warning("starting without routers")
        await publish(edge.state.is_ready)
        await stack.enter_async_context(edge.running_batches())
        looking = asyncio.create_task(edge.poll_forever(publish))
        stack.callback(looking.cancel)
        limits = ServerLimits(
            settings.connections,
            settings.header_seconds,
            settings.idle_seconds,
            settings.body_seconds,
        )
        grace, tls = settings.grace_seconds, settings.security.tls
        shared = (
            edge.console
            if edge.console is not None and not settings.console_address
            else edge.application
        )
        server = await stack.enter_async_context(
            serving_http(
                settings.address, edge.pages.guard(shared), limits, tls, grace_seconds=grace
            )
        )
        servers.append(server)
        if edge.console is not None and settings.console_address:
            # A loopback console uses plain HTTP: no certificate names the end of a tunnel.
            console_tls = None if is_loopback(settings.console_address) else tls
            own = serving_http(
                settings.console_address,
                edge.pages.guard(edge.console),
                limits,
                console_tls,
                grace_seconds=grace,
            )
            edge.console_address = (await stack.enter_async_context(own)).address
        for address, model in settings.tei_http:
            door = edge.pages.guard(PrefixApp(edge.application, model))
            await stack.enter_async_context(
                serving_http(address, door, limits, tls, grace_seconds=grace)
            )
        await stack.enter_async_context(serving_tei(tei, settings.security, grace_seconds=grace))
        await publish(edge.state.is_ready)
        if edge.console is not None:
            edge.console.hub.start()
            stack.push_async_callback(edge.console.hub.stop)
            log.info("console", extra=fields({"address": edge.console_address or server.address}))
        try:
            yield server.address
        finally:
            looking.cancel()
            edge.state.is_ready = False
            await publish(False)


async def _health(stack: AsyncExitStack, address: str) -> Callable[[bool], Awaitable[None]]:
    """Serve grpc.health.v1 at `address`, if it is set; return the function that sets the status."""
    if not address:

        async def ignore(is_ready: bool) -> None: ...

        return ignore
    health = await stack.enter_async_context(serving(address, [], health=[HEALTH_NAME]))

    async def publish(is_ready: bool) -> None:
        await health.set_health(is_ready, HEALTH_NAME)

    return publish


def _publish_to_all(
    publish: Callable[[bool], Awaitable[None]], servers: Collection[TeiServer]
) -> Callable[[bool], Awaitable[None]]:
    """Return a function that publishes the edge's readiness by `publish` and by all TEI servers."""

    async def publish_to_all(is_ready: bool) -> None:
        await publish(is_ready)
        for server in servers:
            await server.set_health(is_ready)

    return publish_to_all


def _alive() -> Answer:
    return Answer(encode_json({"status": "ok"}))
