"""Looks at a mesh that a test makes up, moment by moment."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shoal.v1 import models_pb2, worker_pb2

from libs.fleet import FleetSnapshot, WorkerModelRecord, WorkerRecord
from libs.queue import LaneGauges, LaneKey
from services.scheduler.view import Look

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
    return WorkerModelRecord(model, state, size, load_seconds, speed, idle_seconds=0.0, pinned=pinned)


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
        """A worker whose last heartbeat came `silent_seconds` before every look."""
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
            models={model.model: model for model in models},
            preempted_in_seconds=preempted_in_seconds,
        )

    def lane(self, queued: int, leased: int = 0, enqueued: int | None = None, *, model: str = MODEL, pool: str = "cpu") -> None:
        """Sets the lane's tokens; `enqueued` grows by what was queued unless it is given."""
        lane = LaneKey(pool, model)
        before = self.gauges.get(lane)
        count = enqueued if enqueued is not None else (before.enqueued_tokens if before else 0) + queued
        self.gauges[lane] = LaneGauges(lane, int(queued > 0), queued, leased, 1, 0, 0, 0, 0, count)

    def fail(self, model: str, *workers: str) -> None:
        failure = worker_pb2.Failure(reason="MODEL_LOAD_FAILED", message="broken")
        self.failures[model] = dict.fromkeys(workers, failure)

    def look(self, seconds: float = 0.0) -> Look:
        """A look `seconds` after the last one."""
        self.at += seconds
        now_ms = EPOCH_MS + round(self.at * 1000)
        beats = {name: replace(worker, heartbeat_ms=now_ms + worker.heartbeat_ms) for name, worker in self.workers.items()}
        return Look(FleetSnapshot(beats, {}, dict(self.failures), now_ms), dict(self.gauges), self.at)
