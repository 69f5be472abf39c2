"""The composition of a scheduler: its whole object graph, read top to bottom."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from libs.errors import NoCapacity
from libs.eviction import POLICIES
from libs.fleet import TTL_MS, Fleet
from libs.queue import Lanes, connect
from libs.serving import serving
from libs.telemetry.exposition import serving_metrics
from services.scheduler.control import Control
from services.scheduler.demand import Demand
from services.scheduler.metrics import PoolMetrics
from services.scheduler.scaler import Scaler
from services.scheduler.settings import Settings
from services.scheduler.view import SchedulerView

log = logging.getLogger(__name__)

READINESS: Final = "readiness"
"""The health service name for readiness probes: SERVING once the scheduler has read the mesh. It
stays SERVING while Redis is unavailable, because the scaler then answers from the last snapshot.
"""
STOP_SECONDS: Final = 0.5
"""The interval at which loops that have not ended are cancelled again."""
RESIGN_SECONDS: Final = 2.0
"""The time limit for giving up the leadership at the end."""


@dataclass(frozen=True, slots=True)
class SchedulerAddresses:
    """A scheduler's addresses, with the ports that were really bound."""

    grpc: str
    metrics: str
    """Empty if metrics are not served."""


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[SchedulerAddresses]:
    """Run a scheduler that serves at the yielded addresses. Leaving the context gives up the
    leadership and drains it.

    Raises UnsuitableRedis, NoCapacity if an address is in use, InvalidInput for an invalid address.
    The scheduler survives outages of Redis.
    """
    redis = connect(
        settings.redis_url, settings.redis_trust, allow_insecure=settings.security.allow_insecure
    )
    # The scheduler only subscribes to notifications and reads gauges: it enqueues no jobs.
    lanes = Lanes(
        redis, router_id=settings.scheduler_id, dead_result=b"", slots=settings.queue_slots
    )
    view = SchedulerView()
    demand = Demand(settings.pools.content)
    scaler = Scaler(demand, view)
    control = Control(
        lanes,
        Fleet(redis, ttl_ms=min(TTL_MS, settings.lease_ms)),
        view,
        scheduler_id=settings.scheduler_id,
        policy=POLICIES[settings.eviction],
        seen=demand.update,
        demands=lambda: demand.demands,
    )
    try:
        async with AsyncExitStack() as stack:
            read = PoolMetrics(scaler, view, scheduler_id=settings.scheduler_id).read
            metrics = await stack.enter_async_context(
                serving_metrics(settings.metrics_address, read)
            )
            server = await stack.enter_async_context(
                serving(
                    settings.address,
                    [scaler.service()],
                    security=settings.security,
                    health=(READINESS,),
                    grace_seconds=settings.grace_seconds,
                    on_drained=scaler.close,
                )
            )
            stack.callback(scaler.close)

            is_stopping = False

            async def seen() -> None:
                await asyncio.to_thread(settings.pools.refresh)
                demand.specs = settings.pools.content
                if not is_stopping:
                    await server.set_health(True)

            stack.push_async_callback(_resign, control)
            await stack.enter_async_context(_looping(control.run(seen), control.receive_wakeups()))
            try:
                yield SchedulerAddresses(server.address, metrics)
            finally:
                is_stopping = True
                await server.set_health(False)
    finally:
        await redis.aclose()


async def _resign(control: Control) -> None:
    """Give up the leadership, once the loop has ended and cannot take it again. If that fails, the
    lease expires.
    """
    try:
        async with asyncio.timeout(RESIGN_SECONDS):
            await control.resign()
    except (NoCapacity, TimeoutError):
        log.info("the lead was not given up")


@asynccontextmanager
async def _looping(*loops: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run supervised loops: if one of them fails, the whole scheduler ends with its error."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop) for loop in loops]
        try:
            yield
        finally:
            # Cancel the loops repeatedly until they end: redis-py may swallow a cancellation that
            # arrives at the same time as a reply.
            while unfinished := [task for task in tasks if not task.done()]:
                for task in unfinished:
                    task.cancel()
                await asyncio.wait(unfinished, timeout=STOP_SECONDS)
