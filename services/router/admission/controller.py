"""The admission controller gathers the inputs of the decision on a request, and decides by the
rules of `rules.py`.

On the request path between `service.py`, which calls it, and the lanes. The state of admission is
here and in `state/`; the rules are pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from libs.errors import QueueFull
from libs.fleet import FleetSnapshot
from libs.queue import LaneKey, Priority
from libs.queue.clock import RedisClock
from libs.serving.watched import Watched
from services.router.admission import rules
from services.router.admission.queue_positions import QueuePositionReader, TenantPosition
from services.router.admission.retry_slots import RetrySlots
from services.router.admission.routing.routes import Routes, Target, choose_lane, has_other_pool
from services.router.admission.tenants import Charge, Tenant, TenantLimits
from services.router.state.outstanding import Outstanding
from services.router.state.throughput import Throughput
from services.router.state.view import RouterView, is_new


@dataclass(frozen=True, slots=True)
class AdmissionContext:
    """The inputs of the admission decision on one request."""

    snapshot: FleetSnapshot
    routes: Routes
    lane: LaneKey
    throughput: Throughput
    queue_position: TenantPosition | None
    """Its lane's queue position; None if that cannot make it late."""
    tenant_name: str
    tenant: Tenant
    waiting_tokens: int
    """Tokens of its tenant at this router; 0 without a quota."""
    lane_tokens: int
    """Tokens of its tenant in its lane."""
    unknown: Mapping[LaneKey, Collection[str]] | None
    """Lanes of models that no worker knows, with their tenants. None unless this request would open
    one more.
    """
    priority: Priority
    now_ms: int
    """Redis' clock."""
    seconds: float
    """Time until its deadline."""


class AdmissionController:
    """Decides on each request of one router."""

    def __init__(
        self,
        view: RouterView,
        outstanding: Outstanding,
        positions: QueuePositionReader,
        limits: TenantLimits,
        clock: RedisClock,
        *,
        routes: Watched[Routes],
        max_queued_seconds: float,
    ) -> None:
        """
        Args:
            max_queued_seconds: Maximum estimated wait of a request in a lane, whatever its
                deadline.
        """
        self._view = view
        self._outstanding = outstanding
        self._positions = positions
        self._limits = limits
        self._clock = clock
        self._routes = routes
        self._max_queued_seconds = max_queued_seconds
        self._retry_slots = RetrySlots()

    async def gather(
        self, target: Target, priority: Priority, tenant: str, seconds: float, failed: Sequence[str]
    ) -> AdmissionContext:
        """Gather the inputs of the decision on the event loop: a thread must not read state that
        the loop changes.

        Args:
            seconds: Time until the deadline.
            failed: Pools that have failed the request.
        """
        snapshot = self._view.snapshot
        routes = self._routes.content
        lane = choose_lane(target, routes, snapshot, self._view.backlog, seconds, failed)
        throughput = self._view.throughput(lane)
        gauges, here = self._view.lane_gauges(lane), self._outstanding.lanes
        tokens = max(gauges.queued_tokens + gauges.leased_tokens, sum(here.get(lane, {}).values()))
        may_be_late = rules.may_be_late(min(seconds, self._max_queued_seconds), throughput, tokens)
        limits = self._limits.tenant(tenant)
        return AdmissionContext(
            snapshot=snapshot,
            routes=routes,
            lane=lane,
            throughput=throughput,
            queue_position=await self._positions.read(lane, tenant) if may_be_late else None,
            tenant_name=tenant,
            tenant=limits,
            waiting_tokens=self._outstanding.tenant_tokens(tenant) if limits.queued_tokens else 0,
            lane_tokens=here.get(lane, {}).get(tenant, 0),
            unknown=self._outstanding.unknown()
            if lane not in here and is_new(lane.model, snapshot)
            else None,
            priority=priority,
            now_ms=self._clock.now_ms(),
            seconds=seconds,
        )

    def refuse(self, context: AdmissionContext, tokens: int) -> None:
        """Raise QueueFull for a request of `tokens` that should not be started now."""
        if context.unknown is not None:
            rules.refuse_unknown(context.lane, context.tenant_name, context.unknown)
        rules.refuse_over_quota(
            tokens, context.waiting_tokens, context.tenant.queued_tokens, context.throughput
        )
        if context.queue_position is None:
            return
        try:
            rules.refuse_late(
                context.seconds,
                self._max_queued_seconds,
                context.throughput,
                context.queue_position.position,
                context.priority,
                own_tokens=tokens,
                since=context.queue_position.since,
                waiting_tokens=context.lane_tokens,
            )
        except QueueFull as refusal:
            refusal.retry_after = self._retry_slots.reserve(
                context.lane,
                soonest=refusal.retry_after or 0.0,
                remaining=context.seconds,
                cost=context.throughput.seconds(tokens),
                now=asyncio.get_running_loop().time(),
            )
            raise
        context.queue_position.admit(tokens)

    async def charge(self, context: AdmissionContext, tokens: int) -> Charge | None:
        """Charge the request to its tenant's rate limit; None without one. Raises RateLimited
        without charging.
        """
        return await self._limits.charge(context.tenant_name, context.tenant, tokens)

    def has_other_pool(self, target: Target, failed: Collection[str]) -> bool:
        """Return whether another of the model's pools may serve a request that the pools `failed`
        have failed.
        """
        return has_other_pool(target, self._routes.content, self._view.snapshot, failed)
