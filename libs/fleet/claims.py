"""Decide whether a worker may load a lane's model now. Pure; the router then makes the claim
atomically in Redis.

The rule (docs/design/memory.md): a model without a copy is loaded once it has work; a model with
copies gets another one once its work would wait longer than a load takes.
"""

from __future__ import annotations

from shoal.v1 import models_pb2

from libs.fleet.snapshot import LOADING_STATES, FleetSnapshot, WorkerModelRecord
from libs.queue.jobs import LaneGauges
from libs.work_estimate import assumed_load_seconds, average_speed, work_seconds

_SERVED = (*LOADING_STATES, models_pb2.MODEL_STATE_RESIDENT)


def may_claim(gauges: LaneGauges, snapshot: FleetSnapshot, worker_id: str) -> bool:
    """Return whether the worker should load the model for the lane's work, given its resident
    copies and those being loaded.
    """
    lane = gauges.lane
    worker = snapshot.workers.get(worker_id)
    if worker is None or worker.draining or worker.pool != lane.pool or gauges.queued_tokens == 0:
        return False
    if worker_id in snapshot.failures.get(lane.model, {}):
        return False
    if worker.state(lane.model) in _SERVED:
        return False
    copies = _copies(gauges, snapshot)
    if not copies:
        return True
    wait = wait_seconds(gauges, snapshot)
    return wait is not None and wait > load_seconds(lane.model, snapshot)


def wait_seconds(gauges: LaneGauges, snapshot: FleetSnapshot) -> float | None:
    """Return how long the lane's work keeps its copies busy, loading ones included. None without a
    copy or a measured speed.
    """
    copies = _copies(gauges, snapshot)
    speed = average_speed(copy.tokens_per_second for copy in copies)
    if not speed:
        return None
    return work_seconds(gauges.queued_tokens + gauges.leased_tokens, speed, len(copies))


def load_seconds(model: str, snapshot: FleetSnapshot) -> float:
    """Return how long a load takes: the longest that a live worker measured, else estimated from
    the model's size.
    """
    measured = [worker.models[model].load_seconds for worker in snapshot.holders(model)]
    if any(measured):
        return max(measured)
    card = snapshot.card(model)
    return assumed_load_seconds(card.bytes if card is not None else 0)


def _copies(gauges: LaneGauges, snapshot: FleetSnapshot) -> list[WorkerModelRecord]:
    lane = gauges.lane
    records = [worker.models[lane.model] for worker in snapshot.holders_in(lane.pool, lane.model)]
    return [record for record in records if record.state in _SERVED]
