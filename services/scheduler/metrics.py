"""What the scaler answers, and what it comes from, for Prometheus: for people without KEDA, and for dashboards.

Every scrape reads what is in memory, in a thread of its own, so that it never waits for the event loop nor the loop for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.errors import InvalidInput, NoCapacity
from services.scheduler.demand import PoolDemand
from services.scheduler.scaler import Scaler
from services.scheduler.view import View

_OF_POOLS: Final[tuple[tuple[str, str, Callable[[PoolDemand], float]], ...]] = (
    ("shoal_desired_workers", "Workers that the pool should have; what KEDA is answered.", lambda one: one.desired),
    ("shoal_needed_workers", "Workers that the pool needs at this moment, before hysteresis.", lambda one: one.need.workers),
    ("shoal_pool_active", "1: the pool may not be scaled to zero.", lambda one: one.active),
    ("shoal_live_workers", "Workers that are there, those that will be lost included.", lambda one: one.live),
    ("shoal_ready_workers", "Workers that take work.", lambda one: one.input.ready),
    ("shoal_starting_workers", "Workers that were asked for and should come.", lambda one: one.input.starting),
    ("shoal_preempting_workers", "Workers whose machine will be taken away.", lambda one: one.input.preempting),
    ("shoal_unhealthy_workers", "Workers that have missed three heartbeats.", lambda one: one.input.unhealthy),
    ("shoal_queued_tokens", "Tokens that wait for models that the pool can serve.", lambda one: one.input.queued_tokens),
    ("shoal_leased_tokens", "Tokens of such models that workers have.", lambda one: one.input.leased_tokens),
    ("shoal_offered_load_workers", "Workers that arrivals keep busy.", lambda one: one.input.offered_load),
    ("shoal_backlog_seconds", "Time in which one worker would do what waits.", lambda one: one.input.backlog_seconds),
    ("shoal_cold_start_seconds", "From wanting another worker to its first heartbeat.", lambda one: one.input.cold_start_seconds),
)


class PoolMetrics(Collector):
    """One gauge a line above with the label `pool`, and the scheduler's own."""

    def __init__(self, scaler: Scaler, view: View, *, scheduler_id: str) -> None:
        self._scaler = scaler
        self._view = view
        self._scheduler_id = scheduler_id

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing: names are not known to clash with others of the registry."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        answers = self._scaler.answers()
        for name, what, number in _OF_POOLS:
            family = GaugeMetricFamily(name, what, labels=["pool"])
            for answer in answers:
                family.add_metric([answer.pool], float(number(answer)))
            yield family
        look = self._view.look
        leader = look.fleet.leader if look is not None else None
        is_leader = leader is not None and leader.scheduler_id == self._scheduler_id
        age = self._scaler.age_seconds
        yield _gauge("shoal_plan_number", "The leader's last plan.", leader.plan if leader is not None else 0)
        yield _gauge("shoal_scheduler_leader", "1: this scheduler decides where models go.", is_leader)
        yield _gauge("shoal_view_age_seconds", "Since the mesh was seen last; infinite before the first time.", age)


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, what, value=float(value))


@asynccontextmanager
async def serving_metrics(address: str, *collectors: Collector) -> AsyncIterator[str]:
    """Answers `http://address/metrics` until the context ends; yields the address with the port that was bound (port 0: any).

    Raises InvalidInput for an address that is not host:port, NoCapacity if it is taken.
    """
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    host, port = parse_address(address)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise NoCapacity(f"cannot listen on {address} for metrics: is another process there?") from error
    try:
        yield f"{host}:{server.server_port}"
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join)


def parse_address(address: str) -> tuple[str, int]:
    """Host and port. Raises InvalidInput."""
    host, _, port = address.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() else math.inf
    if not host or not 0 <= number <= 65_535:
        raise InvalidInput(f"{address!r} is not of the form host:port", field="SHOAL_METRICS_ADDRESS")
    return host.strip("[]"), int(number)
