"""A router's Prometheus metrics of the mesh and of itself, read at each scrape from values that are
replaced whole (`libs/telemetry`).
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from prometheus_client.core import Metric

from libs.queue import LaneGauges, LaneKey
from libs.telemetry import metrics
from libs.telemetry.metrics import Series
from services.router.in_flight import InFlightMemory
from services.router.lanes.pending_pulls import PendingPulls
from services.router.state.view import RouterView, known_names
from services.router.upkeep import Upkeep

_OF_LANES: Final[tuple[tuple[Series, str], ...]] = (
    (metrics.LANE_QUEUED_JOBS, "queued_jobs"),
    (metrics.LANE_QUEUED_TOKENS, "queued_tokens"),
    (metrics.LANE_LEASED_TOKENS, "leased_tokens"),
    (metrics.LANE_ENQUEUED, "enqueued"),
    (metrics.LANE_ENQUEUED_TOKENS, "enqueued_tokens"),
    (metrics.LANE_DONE, "done"),
    (metrics.LANE_EXPIRED, "expired"),
    (metrics.LANE_DEAD, "dead"),
    (metrics.LANE_CANCELLED, "cancelled"),
)


class RouterMetrics:
    """Collects the metrics. `read` is called on the thread of a scrape."""

    def __init__(
        self,
        view: RouterView,
        upkeep: Upkeep,
        in_flight: InFlightMemory,
        pending_pulls: PendingPulls,
    ) -> None:
        self._view = view
        self._upkeep = upkeep
        self._in_flight = in_flight
        self._pending_pulls = pending_pulls

    def read(self) -> Iterator[Metric]:
        known = known_names(self._view.snapshot)
        gauges = list(self._view.gauges.values())
        for series, name in _OF_LANES:
            yield series.family(_summed(gauges, known, name))
        oldest = {_labels(gauge.lane, known): 0.0 for gauge in gauges}
        for lane, seconds in self._upkeep.oldest.items():
            labels = _labels(lane, known)
            oldest[labels] = max(oldest.get(labels, 0.0), seconds)
        yield metrics.LANE_OLDEST_SECONDS.family(oldest)
        yield metrics.HELD_BYTES.family({(): self._in_flight.held_bytes})
        yield metrics.WAITING_PULLS.family({(): len(self._pending_pulls)})
        yield metrics.REDIS_UP.family({(): self._upkeep.is_redis_up})


def _summed(gauges: list[LaneGauges], known: set[str], name: str) -> dict[tuple[str, ...], float]:
    number, sums = attrgetter(name), dict[tuple[str, ...], float]()
    for gauge in gauges:
        labels = _labels(gauge.lane, known)
        sums[labels] = sums.get(labels, 0.0) + number(gauge)
    return sums


def _labels(lane: LaneKey, known: set[str]) -> tuple[str, ...]:
    """Return a lane's labels. Lanes of models that no worker has share one set: clients can invent
    any number of names.
    """
    if lane.model not in known:
        return (lane.pool, metrics.OTHER, "")
    return (lane.pool, lane.model, lane.adapter)
