"""The scaler's answers and their inputs as Prometheus series, for dashboards and for scaling
without KEDA (`libs/telemetry`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import Metric

from libs.telemetry import metrics
from libs.telemetry.metrics import Series
from services.scheduler.demand import PoolDemand
from services.scheduler.scaler import Scaler
from services.scheduler.view import SchedulerView

_OF_POOLS: Final[tuple[tuple[Series, Callable[[PoolDemand], float]], ...]] = (
    (metrics.DESIRED_WORKERS, lambda one: one.desired),
    (metrics.NEEDED_WORKERS, lambda one: one.need.workers),
    (metrics.POOL_ACTIVE, lambda one: one.active),
    (metrics.LIVE_WORKERS, lambda one: one.live),
    (metrics.READY_WORKERS, lambda one: one.input.ready),
    (metrics.STARTING_WORKERS, lambda one: one.input.starting),
    (metrics.PREEMPTING_WORKERS, lambda one: one.input.preempting),
    (metrics.UNHEALTHY_WORKERS, lambda one: one.input.unhealthy),
    (metrics.QUEUED_TOKENS, lambda one: one.input.queued_tokens),
    (metrics.LEASED_TOKENS, lambda one: one.input.leased_tokens),
    (metrics.OFFERED_LOAD, lambda one: one.input.offered_load),
    (metrics.BACKLOG_SECONDS, lambda one: one.input.backlog_seconds),
    (metrics.COLD_START_SECONDS, lambda one: one.input.cold_start_seconds),
)


class PoolMetrics:
    """Collects the metrics. `read` is called on the thread of a scrape."""

    def __init__(self, scaler: Scaler, view: SchedulerView, *, scheduler_id: str) -> None:
        self._scaler = scaler
        self._view = view
        self._scheduler_id = scheduler_id

    def read(self) -> Iterator[Metric]:
        answers = self._scaler.all_demands()
        for series, number in _OF_POOLS:
            yield series.family({(decision.pool,): float(number(decision)) for decision in answers})
        snapshot = self._view.snapshot
        leader = snapshot.fleet.leader if snapshot is not None else None
        is_leader = leader is not None and leader.scheduler_id == self._scheduler_id
        yield metrics.PLAN_NUMBER.family({(): leader.plan if leader is not None else 0})
        yield metrics.SCHEDULER_LEADER.family({(): is_leader})
        yield metrics.VIEW_AGE_SECONDS.family({(): self._scaler.age_seconds})
