"""The workers: who is alive, what each holds, who may load what, and orders to them."""

from libs.fleet.claims import may_claim
from libs.fleet.registry import TTL_MS, Fleet, LostLeadership
from libs.fleet.snapshot import COMING, FleetSnapshot, LeaderRecord, WorkerModelRecord, WorkerRecord

__all__ = [
    "COMING",
    "TTL_MS",
    "Fleet",
    "FleetSnapshot",
    "LeaderRecord",
    "LostLeadership",
    "WorkerModelRecord",
    "WorkerRecord",
    "may_claim",
]
