"""The workers: who is alive, what each holds, who may load what, and orders to them."""

from libs.fleet.claims import may_claim
from libs.fleet.registry import Fleet
from libs.fleet.snapshot import COMING, FleetSnapshot, WorkerModelRecord, WorkerRecord

__all__ = ["COMING", "Fleet", "FleetSnapshot", "WorkerModelRecord", "WorkerRecord", "may_claim"]
