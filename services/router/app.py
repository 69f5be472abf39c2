"""The composition of a router: its whole object graph, read top to bottom."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial

from shoal.v1 import (
    aliases_pb2_grpc,
    caller_pb2_grpc,
    inference_pb2_grpc,
    mesh_pb2_grpc,
    models_pb2_grpc,
    worker_pb2_grpc,
)

from libs.aliases import AliasStore
from libs.errors import NoCapacity, WorkerLost
from libs.fleet import TTL_MS, Fleet
from libs.queue import Lanes, connect, open_all
from libs.queue.queue_position import QueuePositions
from libs.queue.rates import Rates
from libs.serving import Service, serving
from libs.serving.calls.decode import SMALL_REQUEST_BYTES
from libs.serving.calls.multiplex import MAX_STREAM_MESSAGE_BYTES
from libs.telemetry.exposition import serving_metrics
from services.router.admission.controller import AdmissionController
from services.router.admission.queue_positions import QueuePositionReader
from services.router.admission.tenants import TenantLimits
from services.router.admission.validation import report_limits
from services.router.in_flight import InFlightMemory
from services.router.inbox import Inbox
from services.router.lanes.broken_lanes import BrokenLanes
from services.router.lanes.codec import failed
from services.router.lanes.dispatch import Dispatcher
from services.router.lanes.pending_pulls import PendingPulls
from services.router.lanes.presence import WorkerPresence
from services.router.lanes.pull import WorkerService
from services.router.lanes.wakeups import Wakeups
from services.router.metrics import RouterMetrics
from services.router.operators.aliases import AliasService
from services.router.operators.callers import CallerService
from services.router.operators.mesh import MeshService
from services.router.operators.models import ModelService
from services.router.service import InferenceService, stream_calls
from services.router.settings import Settings
from services.router.state.background import Background
from services.router.state.membership import Membership
from services.router.state.outstanding import Outstanding
from services.router.state.view import RouterView
from services.router.upkeep import AWAY_TICK_SECONDS, Upkeep

log = logging.getLogger(__name__)

START_SECONDS = 5.0
"""Maximum wait for Redis at the start. After it the router starts anyway, with the health status
NOT_SERVING.
"""
STOP_SECONDS = 0.5
"""The interval at which loops that have not ended are cancelled again."""
LOST = WorkerLost("workers died with this job as often as allowed; the job may be the cause")


class Router:
    """The objects of one router, each built from those before it. The constructor does not call
    Redis.
    """

    def __init__(self, settings: Settings) -> None:
        # The queue and the registry of workers, in Redis.
        self.redis = redis = connect(
            settings.redis_url,
            settings.redis_trust,
            allow_insecure=settings.security.allow_insecure,
            slots=settings.queue_slots,
        )
        self.lanes = Lanes(
            redis,
            router_id=settings.router_id,
            dead_result=failed(LOST),
            slots=settings.queue_slots,
            lease_ms=settings.lease_ms,
            max_attempts=settings.max_attempts,
        )
        self.fleet = Fleet(redis, ttl_ms=min(TTL_MS, settings.lease_ms))
        self.aliases = AliasStore(redis, settings.router_id)
        positions = QueuePositions(redis, slots=settings.queue_slots)
        # This router's view of the mesh, and the requests that it has accepted.
        self.view = RouterView(self.fleet)
        outstanding, background = Outstanding(), Background()
        self.in_flight = InFlightMemory(limit_bytes=settings.in_flight_bytes)
        # Jobs, and the pulls that wait for them.
        self.pending_pulls = PendingPulls()
        wakeups = Wakeups(
            self.pending_pulls, self.fleet, self.view, background, settings.claim_after_seconds
        )
        self.dispatcher = Dispatcher(
            self.lanes,
            wakeups,
            self.view,
            background,
            outstanding,
            max_queued_tokens=settings.max_queued_tokens,
        )
        self.presence = WorkerPresence(self.lanes, self.fleet, wakeups, background)
        broken = BrokenLanes(self.lanes, self.view)
        # The services for clients and workers; `_services` adds those for operators.
        limits = TenantLimits(settings.tenants, Rates(redis, slots=settings.queue_slots))
        admission = self._admission(
            settings, outstanding, QueuePositionReader(positions, background), limits
        )
        self.inference = InferenceService(
            admission,
            self.aliases,
            self.dispatcher,
            self.in_flight,
            router_id=settings.router_id,
            default_deadline_seconds=settings.default_deadline_seconds,
        )
        self.workers = WorkerService(
            self.lanes,
            self.fleet,
            self.view,
            wakeups,
            self.dispatcher,
            background,
            self.presence,
            broken,
        )
        # Loops that run while calls are served.
        self.inbox = Inbox(self.lanes, wakeups, self.dispatcher)
        membership = Membership(self.fleet, self.aliases, self.lanes, settings.router_id)
        files = (settings.tenants, settings.routes, settings.processes)
        self.upkeep = Upkeep(
            self.lanes,
            self.view,
            self.aliases,
            membership,
            wakeups,
            self.dispatcher,
            broken,
            positions,
            files,
        )

    def _admission(
        self,
        settings: Settings,
        outstanding: Outstanding,
        positions: QueuePositionReader,
        limits: TenantLimits,
    ) -> AdmissionController:
        return AdmissionController(
            self.view,
            outstanding,
            positions,
            limits,
            self.lanes.clock,
            routes=settings.routes,
            max_queued_seconds=settings.max_queued_seconds,
        )


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[str]:
    """Run a router that serves at the yielded address. Leaving the context drains it (graceful
    shutdown).

    Raises UnsuitableRedis, or NoCapacity if the address is taken. The router survives outages of
    Redis.
    """
    router = Router(settings)
    upkeep, metrics = (
        router.upkeep,
        RouterMetrics(router.view, router.upkeep, router.in_flight, router.pending_pulls),
    )
    try:
        async with router.dispatcher:
            is_ready = await _first_refresh(upkeep, partial(open_all, router.redis))
            # The loops begin before the server and end after its drain: calls in flight need them.
            async with (
                serving_metrics(settings.metrics_address, metrics.read),
                _looping(
                    *router.inbox.take_replies(),
                    router.inbox.receive_wakeups(),
                    router.inbox.receive_streamed(),
                    upkeep.sweep(),
                ) as loops,
                serving(
                    settings.address,
                    _services(settings, router),
                    security=settings.security,
                    grace_seconds=settings.grace_seconds,
                    connection_seconds=settings.connection_seconds,
                    on_drained=router.dispatcher.hand_over,
                ) as server,
            ):
                await server.set_health(is_ready)
                loops.append(upkeep.run(server.set_health))
                try:
                    yield server.address
                finally:
                    router.presence.close()
                    # Workers connect to another router while calls in flight finish here.
                    router.pending_pulls.close()
    finally:
        await router.redis.aclose()


async def _first_refresh(upkeep: Upkeep, open_connections: Callable[[], Awaitable[None]]) -> bool:
    """Refresh the view of the mesh once. Return whether Redis responded within START_SECONDS, which
    the first health check reports.
    """
    try:
        async with asyncio.timeout(START_SECONDS):
            while True:
                try:
                    await upkeep.refresh()
                    await open_connections()
                except NoCapacity:
                    await asyncio.sleep(AWAY_TICK_SECONDS)
                else:
                    return True
    except TimeoutError:
        log.warning("starting without redis")
        return False


class _Loops:
    """Supervised loops: if one of them fails, the whole router ends with its error."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []

    def append(self, loop: Coroutine[None, None, None]) -> None:
        self._tasks.append(self._group.create_task(loop))

    async def stop(self) -> None:
        # Cancel the loops repeatedly until they end: redis-py may swallow a cancellation that
        # arrives at the same time as a reply.
        while unfinished := [task for task in self._tasks if not task.done()]:
            for task in unfinished:
                task.cancel()
            await asyncio.wait(unfinished, timeout=STOP_SECONDS)


@asynccontextmanager
async def _looping(*first: Coroutine[None, None, None]) -> AsyncIterator[_Loops]:
    async with asyncio.TaskGroup() as group:
        loops = _Loops(group)
        for loop in first:
            loops.append(loop)
        try:
            yield loops
        finally:
            await loops.stop()


def _services(settings: Settings, router: Router) -> list[Service]:
    models = ModelService(
        router.fleet,
        router.view,
        router.aliases,
        routes=settings.routes,
        default_deadline_seconds=settings.default_deadline_seconds,
    )
    mesh = MeshService(
        router.lanes,
        router.fleet,
        router.view,
        routes=settings.routes,
        processes=settings.processes,
        oldest=lambda: router.upkeep.oldest,
        router_id=settings.router_id,
    )
    add_inference = partial(
        inference_pb2_grpc.add_InferenceServiceServicer_to_server, router.inference
    )
    add_callers = partial(caller_pb2_grpc.add_CallerServiceServicer_to_server, CallerService())
    add_aliases = partial(
        aliases_pb2_grpc.add_AliasServiceServicer_to_server, AliasService(router.aliases)
    )
    add_models = partial(models_pb2_grpc.add_ModelServiceServicer_to_server, models)
    add_mesh = partial(mesh_pb2_grpc.add_MeshServiceServicer_to_server, mesh)
    add_workers = partial(worker_pb2_grpc.add_WorkerServiceServicer_to_server, router.workers)
    return [
        Service(
            "shoal.v1.InferenceService",
            add_inference,
            method_bytes={"Multiplex": MAX_STREAM_MESSAGE_BYTES},
            stream_calls=stream_calls(router.inference),
        ),
        Service("shoal.v1.CallerService", add_callers, request_bytes=SMALL_REQUEST_BYTES),
        Service("shoal.v1.ModelService", add_models, request_bytes=SMALL_REQUEST_BYTES),
        Service("shoal.v1.AliasService", add_aliases, request_bytes=SMALL_REQUEST_BYTES),
        Service("shoal.v1.MeshService", add_mesh, request_bytes=SMALL_REQUEST_BYTES),
        Service(
            "shoal.v1.WorkerService",
            add_workers,
            is_internal=True,
            method_bytes=report_limits.METHODS,
            stream_calls=router.workers.stream_calls(),
        ),
    ]
