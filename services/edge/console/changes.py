"""Describe the changes between two snapshots of the mesh in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.v1 import mesh_pb2, models_pb2

GOOD: Final = "good"
PLAIN: Final = "plain"
WARN: Final = "warn"
BAD: Final = "bad"
_RESIDENT: Final = models_pb2.MODEL_STATE_RESIDENT
_WORDS: Final = {
    models_pb2.MODEL_STATE_LOADING: "loads",
    models_pb2.MODEL_STATE_DOWNLOADING: "fetches",
}
_LEFT: Final = {
    models_pb2.MODEL_STATE_WARM: "it stays in host memory",
    models_pb2.MODEL_STATE_COLD: "it stays on disk",
}

Place = tuple[str, str]
"""The names of a model and of a worker that holds it."""


@dataclass(frozen=True, slots=True)
class Change:
    """One event.

    Attributes:
        tone: The severity: GOOD, PLAIN, WARN or BAD.
        text: The event in words.
        model: The model concerned; may be empty.
        worker: The worker concerned; may be empty.
    """

    tone: str
    text: str
    model: str = ""
    worker: str = ""


def changes(before: mesh_pb2.Mesh, after: mesh_pb2.Mesh) -> list[Change]:
    """Return the changes from `before` to `after`: workers first, then models, lanes, scheduler and
    processes.
    """
    gone = {worker.worker_id for worker in before.workers} - {
        worker.worker_id for worker in after.workers
    }
    return [
        *_workers(before.workers, after.workers),
        *_models(before.models, after.models, gone),
        *_lanes(before.lanes, after.lanes),
        *_scheduler(before.scheduler, after.scheduler),
        *_processes(before.processes, after.processes),
    ]


def _workers(
    before: Sequence[mesh_pb2.WorkerStatus], after: Sequence[mesh_pb2.WorkerStatus]
) -> Iterator[Change]:
    earlier = {worker.worker_id: worker for worker in before}
    for worker in after:
        name = worker.worker_id
        was = earlier.pop(name, None)
        if was is None:
            yield Change(GOOD, f"worker {name} joined pool {worker.pool}", worker=name)
            continue
        if worker.HasField("preempted_in_seconds") and not was.HasField("preempted_in_seconds"):
            yield Change(
                WARN,
                f"worker {name} loses its machine in {worker.preempted_in_seconds:.0f} s",
                worker=name,
            )
        if worker.draining and not was.draining:
            yield Change(WARN, f"worker {name} is draining: it accepts no new work", worker=name)
    for name, worker in earlier.items():
        how = "left after draining" if worker.draining else "was lost"
        yield Change(PLAIN if worker.draining else BAD, f"worker {name} {how}", worker=name)


def _models(
    before: Sequence[models_pb2.Model], after: Sequence[models_pb2.Model], gone: set[str]
) -> Iterator[Change]:
    earlier = dict(_places(before))
    now = dict(_places(after))
    for key, place in now.items():
        was = earlier.get(key)
        yield from _place(key, was, place)
    for key, was in earlier.items():
        model, worker = key
        if key not in now and worker not in gone and was.state == _RESIDENT:
            yield Change(PLAIN, f"{worker} evicted {model}", model, worker)


def _places(models: Sequence[models_pb2.Model]) -> Iterator[tuple[Place, models_pb2.ModelPlace]]:
    for model in models:
        for place in model.places:
            yield (model.model, place.worker_id), place


def _place(
    key: Place, was: models_pb2.ModelPlace | None, now: models_pb2.ModelPlace
) -> Iterator[Change]:
    model, worker = key
    state = was.state if was is not None else models_pb2.MODEL_STATE_UNSPECIFIED
    if now.state != state:
        if now.state == _RESIDENT:
            took = f" in {now.load_seconds:.1f} s" if now.load_seconds else ""
            yield Change(GOOD, f"{worker} loaded {model}{took}", model, worker)
        elif now.state == models_pb2.MODEL_STATE_FAILED:
            yield Change(
                BAD,
                f"{worker} could not load {model}: {now.last_error or 'no reason was given'}",
                model,
                worker,
            )
        elif now.state in _WORDS:
            yield Change(PLAIN, f"{worker} {_WORDS[now.state]} {model}", model, worker)
        elif state == _RESIDENT:
            left = f": {_LEFT[now.state]}" if now.state in _LEFT else ""
            yield Change(PLAIN, f"{worker} evicted {model}{left}", model, worker)
    if was is not None and now.pinned != was.pinned:
        yield Change(
            PLAIN,
            f"{model} is {'' if now.pinned else 'no longer '}pinned on {worker}",
            model,
            worker,
        )


def _lanes(
    before: Sequence[mesh_pb2.LaneStatus], after: Sequence[mesh_pb2.LaneStatus]
) -> Iterator[Change]:
    earlier: Mapping[tuple[str, str, str], mesh_pb2.LaneStatus] = {
        _lane(lane): lane for lane in before
    }
    for lane in after:
        was = earlier.get(_lane(lane))
        if was is None:
            continue
        expired, dead = lane.expired_jobs - was.expired_jobs, lane.dead_jobs - was.dead_jobs
        if expired > 0:
            yield Change(
                WARN,
                f"{_jobs(expired)} of {lane.model} passed {_their(expired)} deadline in the lane",
                lane.model,
            )
        if dead > 0:
            yield Change(
                BAD,
                (
                    f"{_jobs(dead)} of {lane.model} {_was(dead)} given up after workers died with "
                    f"{_them(dead)}"
                ),
                lane.model,
            )


def _lane(lane: mesh_pb2.LaneStatus) -> tuple[str, str, str]:
    return lane.pool, lane.model, lane.adapter


def _scheduler(
    before: mesh_pb2.SchedulerStatus, after: mesh_pb2.SchedulerStatus
) -> Iterator[Change]:
    if before.scheduler_id == after.scheduler_id:
        return
    if after.scheduler_id:
        yield Change(PLAIN, f"scheduler {after.scheduler_id} leads")
    else:
        yield Change(WARN, "no scheduler leads: workers claim models themselves")


def _processes(
    before: Sequence[mesh_pb2.ProcessStatus], after: Sequence[mesh_pb2.ProcessStatus]
) -> Iterator[Change]:
    earlier = {process.name: process for process in before}
    for process in after:
        was = earlier.get(process.name)
        if was is not None and process.restarts > was.restarts:
            yield Change(
                BAD, f"process {process.name} ended and was started again: {process.detail}"
            )
        elif was is not None and process.state != was.state and process.state == "given up":
            yield Change(BAD, f"process {process.name} was given up: {process.detail}")


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count:,} jobs"


def _their(count: int) -> str:
    return "its" if count == 1 else "their"


def _them(count: int) -> str:
    return "it" if count == 1 else "them"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"
