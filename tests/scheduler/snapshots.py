"""Looks at a mesh that a test makes up, moment by moment."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shoal.v1 import models_pb2, worker_pb2

from libs.fleet import FleetSnapshot, LeaderRecord, WorkerModelRecord, WorkerRecord
from libs.queue import LaneGauges, LaneKey
from services.scheduler.demand import Demand
from services.scheduler.view import MeshSnapshot

MODEL = "org/model"
EPOCH_MS = 1_700_000_000_000


def holding(
    model: str = MODEL,
    state: models_pb2.ModelState = models_pb2.MODEL_STATE_RESIDENT,
    *,
    speed: float = 1000.0,
    size: int = 1 << 20,
    load_seconds: float = 1.0,
    pinned: bool = False,
) -> WorkerModelRecord:
    """A model on a worker; `speed` in tokens a second."""
    return WorkerModelRecord(
        model, state, size, load_seconds, speed, idle_seconds=0.0, pinned=pinned
    )


@dataclass
class Mesh:
    """A mesh of one's own: change it, then look."""

    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    gauges: dict[LaneKey, LaneGauges] = field(default_factory=dict)
    failures: dict[str, dict[str, worker_pb2.Failure]] = field(default_factory=dict)
    at: float = 1000.0

    def worker(
        self,
        name: str,
        *models: WorkerModelRecord,
        pool: str = "cpu",
        draining: bool = False,
        preempted_in_seconds: float | None = None,
        silent_seconds: float = 0.0,
        memory_bytes: int = 1 << 30,
        epoch: str = "1",
    ) -> None:
        """Add a worker with its last heartbeat `silent_seconds` before every snapshot."""
        self.workers[name] = WorkerRecord(
            worker_id=name,
            epoch=epoch,
            pool=pool,
            device="cpu",
            memory_bytes=memory_bytes,
            used_bytes=0,
            batch_tokens=2048,
            draining=draining,
            heartbeat_ms=-int(silent_seconds * 1000),
            silent_since_ms=-int(silent_seconds * 1000) if silent_seconds else None,
            models={model.model: model for model in models},
            preempted_in_seconds=preempted_in_seconds,
        )

    def lane(
        self,
        queued: int,
        leased: int = 0,
        enqueued: int | None = None,
        *,
        model: str = MODEL,
        pool: str = "cpu",
        used_at: float | None = None,
    ) -> None:
        """Set the lane's tokens; `enqueued` grows by the queued tokens unless it is given.
        `used_at`: the time in Redis.
        """
        lane = LaneKey(pool, model)
        before = self.gauges.get(lane)
        count = (
            enqueued if enqueued is not None else (before.enqueued_tokens if before else 0) + queued
        )
        used_ms = EPOCH_MS + round(used_at * 1000) if used_at is not None else 0
        self.gauges[lane] = LaneGauges(
            lane, int(queued > 0), queued, leased, 1, 0, 0, 0, 0, count, used_ms
        )

    def fail(self, model: str, *workers: str) -> None:
        failure = worker_pb2.Failure(reason="MODEL_LOAD_FAILED", message="broken")
        self.failures[model] = dict.fromkeys(workers, failure)

    def snapshot(
        self, seconds: float = 0.0, *, leader: Demand | None = None, leads: bool = False
    ) -> MeshSnapshot:
        """Return a snapshot `seconds` after the last one, with the numbers last published by
        `leader`, for the scheduler that `leads`.
        """
        self.at += seconds
        now_ms = EPOCH_MS + round(self.at * 1000)
        beats = {
            name: replace(
                worker,
                heartbeat_ms=now_ms + worker.heartbeat_ms,
                silent_since_ms=None
                if worker.silent_since_ms is None
                else now_ms + worker.silent_since_ms,
            )
            for name, worker in self.workers.items()
        }
        record = _leader_record(leader, now_ms) if leader is not None else None
        return MeshSnapshot(
            FleetSnapshot(beats, {}, dict(self.failures), now_ms, record),
            dict(self.gauges),
            self.at,
            leads,
        )


def _leader_record(leader: Demand, now_ms: int) -> LeaderRecord:
    demands = leader.demands
    desired = {name: demand.desired for name, demand in demands.items()}
    starts = {name: demand.input.cold_start_seconds for name, demand in demands.items()}
    return LeaderRecord("leader", 1, 1, now_ms, desired, starts)
