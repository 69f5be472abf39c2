"""The admission controller: the inputs that it gathers, and refusals with a time to retry."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from libs.errors import QueueFull
from libs.fleet import Fleet
from libs.queue import LaneKey
from libs.queue.clock import RedisClock
from libs.queue.queue_position import QueuePosition, QueuePositions
from libs.queue.rates import Rates
from libs.serving.watched import Watched
from services.router.admission.controller import AdmissionController
from services.router.admission.queue_positions import QueuePositionReader, Round, TenantPosition
from services.router.admission.routing.routes import Routes, Target
from services.router.admission.tenants import Tenant, TenantLimits, Tenants
from services.router.state.background import Background
from services.router.state.outstanding import Outstanding
from services.router.state.throughput import Throughput
from services.router.state.view import RouterView

MODEL = "a/b"
LANE = LaneKey("cpu", MODEL)


def make_controller(redis: Redis, outstanding: Outstanding, quota: int = 0) -> AdmissionController:
    return AdmissionController(
        RouterView(Fleet(redis)),
        outstanding,
        QueuePositionReader(QueuePositions(redis), Background()),
        TenantLimits(Watched.fixed(Tenants(Tenant(queued_tokens=quota))), Rates(redis)),
        RedisClock(redis, lambda: 1),
        routes=Watched.fixed(Routes()),
        max_queued_seconds=600.0,
    )


async def test_context_has_the_work_of_the_tenant_at_this_router(redis: Redis) -> None:
    outstanding = Outstanding()
    controller = make_controller(redis, outstanding, quota=1000)
    context = await controller.gather(Target(MODEL), "interactive", "red", 60.0, ())
    assert (context.lane, context.queue_position, context.unknown) == (LANE, None, {})
    outstanding.open(LANE, is_unknown=True)
    outstanding.add(LANE, "red", 30)
    outstanding.add(LaneKey("cpu", "a/c"), "red", 10)
    context = await controller.gather(Target(MODEL), "interactive", "red", 60.0, ())
    assert (context.waiting_tokens, context.lane_tokens, context.unknown) == (40, 30, None)


async def test_tenant_over_its_quota_is_refused(redis: Redis) -> None:
    outstanding = Outstanding()
    outstanding.add(LANE, "red", 900)
    controller = make_controller(redis, outstanding, quota=1000)
    red = await controller.gather(Target(MODEL), "interactive", "red", 60.0, ())
    blue = await controller.gather(Target(MODEL), "interactive", "blue", 60.0, ())
    controller.refuse(red, 100)
    with pytest.raises(QueueFull):
        controller.refuse(red, 101)
    controller.refuse(blue, 101)


async def test_late_requests_are_refused_with_separate_times_to_retry(redis: Redis) -> None:
    controller = make_controller(redis, Outstanding())
    context = await controller.gather(Target(MODEL), "interactive", "red", 60.0, ())
    backlog = QueuePosition(interactive=60_000, interactive_ahead=60_000, interactive_jobs=60)
    late = replace(
        context,
        unknown=None,
        throughput=Throughput(rate=1000.0, drain=1000.0, batch_tokens=1000),
        queue_position=TenantPosition(backlog, Round(), "red"),
    )
    retries = []
    for _ in range(3):
        with pytest.raises(QueueFull) as refused:
            controller.refuse(late, 5000)
        retries.append(refused.value.retry_after or 0.0)
    assert retries == sorted(set(retries))
    assert retries[0] > 0


async def test_admitted_tokens_count_until_the_position_is_read_again(redis: Redis) -> None:
    controller = make_controller(redis, Outstanding())
    context = await controller.gather(Target(MODEL), "interactive", "red", 60.0, ())
    position = TenantPosition(QueuePosition(), Round(), "red")
    admitted = replace(
        context, unknown=None, throughput=Throughput(rate=1000.0), queue_position=position
    )
    controller.refuse(admitted, 500)
    assert position.since == 500
