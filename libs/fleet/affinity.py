"""Score how well a worker suits a model. The scheduler's plan places models by this score, and the
RPC ExplainPlacement shows it. Pure.

The formula (docs/design/memory.md) is affinity - busy share: the nearer the model is to the
worker's device (device, host memory, disk), and the less work the worker has, the better.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from shoal.v1 import models_pb2

from libs.fleet.snapshot import FleetSnapshot, WorkerRecord
from libs.queue.jobs import LaneGauges
from libs.queue.keys import LaneKey
from libs.work_estimate import average_speed, work_seconds

AFFINITY: Final[Mapping[models_pb2.ModelState, float]] = MappingProxyType(
    {
        models_pb2.MODEL_STATE_RESIDENT: 1.0,
        models_pb2.MODEL_STATE_LOADING: 0.8,
        models_pb2.MODEL_STATE_DOWNLOADING: 0.8,
        models_pb2.MODEL_STATE_WARM: 0.6,
        models_pb2.MODEL_STATE_COLD: 0.3,
    }
)
"""Affinity by the model's state on the worker; 0 if it is absent."""
NO_ADAPTER: Final = 0.1
"""Subtracted if the model is resident without the lane's adapter."""
HORIZON_SECONDS: Final = 10.0
"""A worker with this much work counts as fully busy."""


def affinity(worker: WorkerRecord, model: str, adapter: str = "") -> float:
    """Return AFFINITY for the model's state on the worker, 0..1, less NO_ADAPTER if a resident
    model lacks the adapter.
    """
    record = worker.models.get(model)
    if record is None:
        return 0.0
    near = AFFINITY.get(record.state, 0.0)
    lacks_adapter = bool(adapter) and adapter not in record.adapters
    return (
        near - NO_ADAPTER
        if lacks_adapter and record.state == models_pb2.MODEL_STATE_RESIDENT
        else near
    )


def busy_seconds(
    snapshot: FleetSnapshot,
    gauges: Iterable[LaneGauges],
    rates: Mapping[LaneKey, float] = MappingProxyType({}),
) -> dict[str, float]:
    """Return the seconds of work of each worker by id: the backlog of its models' lanes, divided
    evenly among the copies of a model, and the arrivals expected within HORIZON_SECONDS.

    Models without a measured speed count as 0.

    Args:
        rates: Arrivals in tokens per second by lane; missing: 0.
    """
    copies: dict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for worker in snapshot.workers.values():
        for record in worker.held:
            if record.state == models_pb2.MODEL_STATE_RESIDENT:
                copies[worker.pool, record.model].append(
                    (worker.worker_id, record.tokens_per_second)
                )
    seconds = dict.fromkeys(snapshot.workers, 0.0)
    for gauge in gauges:
        tokens = (
            gauge.queued_tokens + gauge.leased_tokens + rates.get(gauge.lane, 0.0) * HORIZON_SECONDS
        )
        holders = copies.get((gauge.lane.pool, gauge.lane.model), []) if tokens else []
        speed = average_speed(speed for _, speed in holders)
        for worker_id, _ in holders if speed else ():
            seconds[worker_id] += work_seconds(tokens, speed, len(holders))
    return seconds


def busy_shares(snapshot: FleetSnapshot, gauges: Iterable[LaneGauges]) -> dict[str, float]:
    """Return the share of the next HORIZON_SECONDS for which each worker has work, 0..1."""
    return {
        worker_id: min(1.0, busy / HORIZON_SECONDS)
        for worker_id, busy in busy_seconds(snapshot, gauges).items()
    }


def score(worker: WorkerRecord, model: str, busy_share: float, adapter: str = "") -> float:
    """Return the affinity less the busy share, -1..1; comparable between workers of one pool."""
    return affinity(worker, model, adapter) - busy_share
