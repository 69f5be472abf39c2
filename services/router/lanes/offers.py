"""Decide whether to offer a waiting worker a lane that no waiting pull can serve. Pure;
`wakeups.py` makes the claim.

While a scheduler leads, it places models, and routers offer only those that no worker has had for
half a second (`SHOAL_CLAIM_AFTER_SECONDS`). Adapters are placed by routers alone: workers that hold
the model load them.
"""

from __future__ import annotations

from typing import Final

from shoal.v1 import models_pb2

from libs.fleet import LOADING_STATES, FleetSnapshot, WorkerModelRecord, WorkerRecord, may_claim
from libs.queue import LaneGauges, LaneKey

LED_MS: Final = 5000
"""A leader with an older last plan does not count as leading."""
ADAPTER_SPREAD_SECONDS: Final = 1.0
"""One more worker loads an adapter if the adapter's work waits longer than this."""


def is_led(snapshot: FleetSnapshot) -> bool:
    """True if a scheduler leads and has planned recently."""
    return snapshot.leader is not None and snapshot.now_ms - snapshot.leader.plan_ms < LED_MS


def is_served(lane: LaneKey, snapshot: FleetSnapshot) -> bool:
    """True if the lane's model is resident in its pool or being loaded there."""
    return any(
        worker.state(lane.model) in (*LOADING_STATES, models_pb2.MODEL_STATE_RESIDENT)
        for worker in snapshot.holders_in(lane.pool, lane.model)
    )


def can_serve(lane: LaneKey, snapshot: FleetSnapshot) -> bool:
    """True if the lane's model, with its adapter, is resident in its pool or being loaded there."""
    if not lane.adapter:
        return is_served(lane, snapshot)
    return any(
        lane.adapter in worker.models[lane.model].adapters
        for worker in snapshot.holders_in(lane.pool, lane.model)
    )


def holds(worker: WorkerRecord | None, model: str) -> bool:
    """True if the model is resident on the worker and not about to be unloaded."""
    record = worker.models.get(model) if worker is not None else None
    return (
        record is not None
        and record.state == models_pb2.MODEL_STATE_RESIDENT
        and not record.leaving
    )


def may_offer(
    gauges: LaneGauges, snapshot: FleetSnapshot, worker_id: str, *, has_model: bool, can_load: bool
) -> bool:
    """True if the worker should load the lane's model, or its adapter if it has the model.

    Args:
        has_model: The worker serves the lane's model already.
        can_load: The worker has memory for one more model.
    """
    lane = gauges.lane
    worker = snapshot.workers.get(worker_id)
    if (
        worker is None
        or worker.draining
        or worker.preempted_in_seconds is not None
        or worker.pool != lane.pool
    ):
        return False
    if lane.adapter and has_model:
        return _may_add(gauges, snapshot, worker.models.get(lane.model))
    if not can_load or (is_led(snapshot) and is_served(lane, snapshot)):
        return False
    return may_claim(gauges, snapshot, worker_id)


def _may_add(gauges: LaneGauges, snapshot: FleetSnapshot, record: WorkerModelRecord | None) -> bool:
    """True if this copy of the model should load the adapter. `record` is None if the worker has
    not reported the copy yet.
    """
    lane = gauges.lane
    if not gauges.queued_tokens or (
        record is not None
        and (lane.adapter in record.adapters or lane.adapter in record.failed_adapters)
    ):
        return False
    workers = [
        worker for worker in snapshot.holders_in(lane.pool, lane.model) if holds(worker, lane.model)
    ]
    able = [
        worker.models[lane.model]
        for worker in workers
        if lane.adapter in worker.models[lane.model].adapters
    ]
    speed = sum(copy.tokens_per_second for copy in able)
    return not able or (
        speed > 0 and (gauges.queued_tokens + gauges.leased_tokens) / speed > ADAPTER_SPREAD_SECONDS
    )
