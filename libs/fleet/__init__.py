"""The fleet of workers: liveness, the models that each holds, claims to load a model, and orders to
workers.
"""

from libs.fleet.claims import may_claim
from libs.fleet.coordination import TTL_MS, LostLeadership
from libs.fleet.registry import Fleet, WorkerUsage
from libs.fleet.snapshot import (
    LOADING_STATES,
    FleetSnapshot,
    LeaderRecord,
    WorkerModelRecord,
    WorkerRecord,
)

__all__ = [
    "LOADING_STATES",
    "TTL_MS",
    "Fleet",
    "FleetSnapshot",
    "LeaderRecord",
    "LostLeadership",
    "WorkerModelRecord",
    "WorkerRecord",
    "WorkerUsage",
    "may_claim",
]
