"""The admission controller gathers the inputs of the decision on a request, and decides by the
rules of `control.py`.

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
from services.router.admission import control
from services.router.admission.appointments import RetrySlots
from services.router.admission.routing.routes import Routes, Wanted, choose_lane, has_other_pool
from services.router.admission.standings import Answer, QueuePositionReader
from services.router.admission.tenants import Refund, Tenant, TenantLimits
from services.router.state.outstanding import Outstanding
from services.router.state.pace import Throughput
from services.router.state.view import View, is_new


@dataclass(frozen=True, slots=True)
class AdmissionContext:
    """The inputs of the admission decision on one request."""

    snapshot: FleetSnapshot
    routes: Routes
    lane: LaneKey
    pace: Throughput
    answer: Answer | None
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
    """Until its deadline."""


class AdmissionController:
    """Decides on each request of one router."""

    def __init__(
        self,
        view: View,
        outstanding: Outstanding,
        standings: QueuePositionReader,
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
        self._standings = standings
        self._limits = limits
        self._clock = clock
        self._routes = routes
        self._max_queued_seconds = max_queued_seconds
        self._appointments = RetrySlots()

    async def look(
        self, wanted: Wanted, priority: Priority, tenant: str, seconds: float, failed: Sequence[str]
    ) -> AdmissionContext:
        """Gather the inputs of the decision on the event loop: a thread must not read state that
        the loop changes.

        Args:
            seconds: Time until the deadline.
            failed: Pools that have failed the request.
        """
        snapshot = self._view.snapshot
        routes = self._routes.content
        lane = choose_lane(wanted, routes, snapshot, self._view.backlog, seconds, failed)
        pace = self._view.pace(lane)
        gauges, here = self._view.gauges_of(lane), self._outstanding.lanes
        tokens = max(gauges.queued_tokens + gauges.leased_tokens, sum(here.get(lane, {}).values()))
        is_near = control.is_near(min(seconds, self._max_queued_seconds), pace, tokens)
        limits = self._limits.of(tenant)
        return AdmissionContext(
            snapshot=snapshot,
            routes=routes,
            lane=lane,
            pace=pace,
            answer=await self._standings.of(lane, tenant) if is_near else None,
            tenant_name=tenant,
            tenant=limits,
            waiting_tokens=self._outstanding.of_tenant(tenant) if limits.queued_tokens else 0,
            lane_tokens=here.get(lane, {}).get(tenant, 0),
            unknown=self._outstanding.unknown()
            if lane not in here and is_new(lane.model, snapshot)
            else None,
            priority=priority,
            now_ms=self._clock.now_ms(),
            seconds=seconds,
        )

    def refuse(self, moment: AdmissionContext, tokens: int) -> None:
        """Raise QueueFull for a request of `tokens` that should not be started now."""
        if moment.unknown is not None:
            control.refuse_unknown(moment.lane, moment.tenant_name, moment.unknown)
        control.refuse_over_quota(
            tokens, moment.waiting_tokens, moment.tenant.queued_tokens, moment.pace
        )
        if moment.answer is None:
            return
        try:
            control.refuse_late(
                moment.seconds,
                self._max_queued_seconds,
                moment.pace,
                moment.answer.standing,
                moment.priority,
                own_tokens=tokens,
                since=moment.answer.since,
                waiting_tokens=moment.lane_tokens,
            )
        except QueueFull as refusal:
            refusal.retry_after = self._appointments.give(
                moment.lane,
                soonest=refusal.retry_after,
                remaining=moment.seconds,
                cost=moment.pace.seconds(tokens),
                now=asyncio.get_running_loop().time(),
            )
            raise
        moment.answer.admit(tokens)

    async def charge(self, moment: AdmissionContext, tokens: int) -> Refund | None:
        """Charge the request to its tenant's rate limit, and return how to refund it. Raises
        RateLimited without charging.
        """
        return await self._limits.charge(moment.tenant_name, moment.tenant, tokens)

    def has_other_pool(self, wanted: Wanted, failed: Collection[str]) -> bool:
        """Return whether another of the model's pools may serve a request that the pools `failed`
        have failed.
        """
        return has_other_pool(wanted, self._routes.content, self._view.snapshot, failed)
