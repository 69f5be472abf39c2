"""The fleet of workers: liveness, the models that each holds, claims to load a model, and orders to
workers.
"""

from libs.fleet.claims import may_claim
from libs.fleet.registry import TTL_MS, Fleet, LostLeadership
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
    "may_claim",
]
