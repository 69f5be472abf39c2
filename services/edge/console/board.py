"""The mesh as pages see it: entries by section and key, each with the number of the snapshot that
last changed it. Pure.

A page receives the changes since the last number that it has. So no page needs a queue, and a slow
page skips to the latest state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.message import Message
from shoal.v1 import inference_pb2, mesh_pb2, models_pb2

from services.edge.console.changes import Change, changes

MAX_EVENTS: Final = 200
MAX_EVENT_CHARACTERS: Final = 1_000
"""The maximum length of an event's text, which may contain a worker's error."""
_MAX_REMOVED: Final = 2_000
"""The number of removed entries that are remembered; a page that is further behind receives
everything again.
"""
_SHOWN_LABELS: Final = 32
"""The number of a card's labels that are shown; a model may have thousands."""


@dataclass(slots=True)
class _Entry:
    raw: bytes
    content: dict[str, Any]
    number: int


@dataclass(slots=True)
class _Section:
    entries: dict[str, _Entry] = field(default_factory=dict)

    def set(self, rows: Iterable[tuple[str, Message]], number: int) -> list[str]:
        """Replace the rows, keeping the number of unchanged ones. Return the removed keys."""
        left = set(self.entries)
        for key, message in rows:
            left.discard(key)
            raw = message.SerializeToString(deterministic=True)
            known = self.entries.get(key)
            if known is None or known.raw != raw:
                self.entries[key] = _Entry(raw, _CONTENT[type(message)](message), number)
        for key in left:
            del self.entries[key]
        return sorted(left)

    def since(self, number: int) -> dict[str, dict[str, Any]]:
        return {key: entry.content for key, entry in self.entries.items() if entry.number > number}


class Board:
    """The state that all pages show. `number` increases with each change."""

    def __init__(self) -> None:
        self.number = 0
        self._mesh: mesh_pb2.Mesh | None = None
        self._sections = {
            name: _Section() for name in ("workers", "models", "lanes", "pools", "processes")
        }
        self._gone: deque[tuple[int, str, str]] = deque()
        self._forgotten = 0
        self._events: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MAX_EVENTS)
        self._problem: tuple[int, dict[str, str] | None] = (0, None)

    def show(self, mesh: mesh_pb2.Mesh, now: float) -> None:
        """Apply a snapshot of the mesh at Unix time `now`."""
        self.number += 1
        for name, rows in _rows(mesh):
            for key in self._sections[name].set(rows, self.number):
                self._gone.append((self.number, name, key))
        while len(self._gone) > _MAX_REMOVED:
            self._forgotten = self._gone.popleft()[0]
        if self._mesh is not None:
            for change in changes(self._mesh, mesh):
                self._note(change, now)
        self._mesh = mesh
        if self._problem[1] is not None:
            self._problem = (self.number, None)

    def fail(self, reason: str, message: str) -> None:
        """Show why the mesh is not visible; the last snapshot stays."""
        reported = {"reason": reason, "message": message}
        if self._problem[1] != reported:
            self.number += 1
            self._problem = (self.number, reported)

    def pause(self) -> None:
        """Stop recording: the time of changes before the next snapshot is unknown, so they are not
        events.
        """
        self._mesh = None

    def since(self, number: int) -> dict[str, Any] | None:
        """Return the changes after `number`, or everything with `full` for 0. Return None without
        changes.
        """
        if number >= self.number:
            return None
        full = number == 0 or number < self._forgotten
        number = 0 if full else number
        reported: dict[str, Any] = {
            name: found
            for name, section in self._sections.items()
            if (found := section.since(number))
        }
        gone = [
            (name, key)
            for at, name, key in self._gone
            if at > number and key not in self._sections[name].entries
        ]
        if gone and not full:
            reported["gone"] = gone
        events = [event for at, event in self._events if at > number]
        if events:
            reported["events"] = events
        if full:
            reported["full"] = True
        if full or self._problem[0] > number:
            reported["problem"] = self._problem[1]
        if self._mesh is not None:
            scheduler = self._mesh.scheduler
            reported["router"] = self._mesh.router_id
            reported["scheduler"] = {
                "id": scheduler.scheduler_id,
                "plan": str(scheduler.plan),
                "age": round(scheduler.age_seconds, 1),
            }
        return reported

    def _note(self, change: Change, now: float) -> None:
        event = {
            "at": round(now, 3),
            "tone": change.tone,
            "text": change.text[:MAX_EVENT_CHARACTERS],
            "model": change.model,
            "worker": change.worker,
        }
        self._events.append((self.number, event))


def model_content(model: models_pb2.Model) -> dict[str, Any]:
    """Return a model as pages see it, with states and tasks as words in lower case."""
    content: dict[str, Any] = {
        "id": model.model,
        "state": _word(models_pb2.ModelState, model.state, "MODEL_STATE_"),
        "queued": model.queued_tokens,
        "error": model.last_error,
        "places": [
            {
                "worker": place.worker_id,
                "state": _word(models_pb2.ModelState, place.state, "MODEL_STATE_"),
                "bytes": place.bytes,
                "host_bytes": place.host_bytes,
                "load_seconds": place.load_seconds,
                "tokens_per_second": place.tokens_per_second,
                "error": place.last_error,
                "pinned": place.pinned,
                "leaving": place.leaving,
                "downloaded": place.downloaded_bytes,
                "download": place.download_bytes,
                "adapters": list(place.adapters),
            }
            for place in model.places
        ],
    }
    if model.HasField("card"):
        card = model.card
        content["card"] = {
            "family": card.family,
            "revision": card.revision,
            "tasks": [_word(models_pb2.Task, task, "TASK_") for task in card.tasks],
            "forms": [
                _word(inference_pb2.Representation, form, "REPRESENTATION_")
                for form in card.representations
            ],
            "dimensions": card.dimensions,
            "token_dimensions": card.multi_vector_dimensions,
            "max_tokens": card.max_tokens,
            "bytes": card.bytes,
            "data_type": card.data_type,
            "labels": list(card.labels[:_SHOWN_LABELS]),
            "label_count": len(card.labels),
            "prompts": list(card.prompts[:_SHOWN_LABELS]),
            "pools": list(card.pools),
            "open_labels": card.open_labels,
            "given_entities": card.given_entities,
            "inputs": [_word(models_pb2.InputKind, kind, "INPUT_KIND_") for kind in card.inputs],
        }
    return content


def _word(kind: Any, value: int, prefix: str) -> str:
    """Return an enum's value in lower case; a value that only a newer router knows stays a
    number.
    """
    try:
        return str(kind.Name(value).removeprefix(prefix).lower())
    except ValueError:
        return str(value)


def _worker_content(worker: mesh_pb2.WorkerStatus) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "pool": worker.pool,
        "device": worker.device,
        "memory": worker.memory_bytes,
        "used": worker.used_bytes,
        "host_memory": worker.host_memory_bytes,
        "host_used": worker.host_used_bytes,
        "draining": worker.draining,
        "age": round(worker.heartbeat_age_seconds, 1),
        "preempted_in": worker.preempted_in_seconds
        if worker.HasField("preempted_in_seconds")
        else None,
        "device_seconds": round(worker.device_seconds, 2),
        "wasted_seconds": round(worker.wasted_seconds, 2),
        "kernels": worker.kernels,
    }


def _lane_content(lane: mesh_pb2.LaneStatus) -> dict[str, Any]:
    return {
        "pool": lane.pool,
        "model": lane.model,
        "adapter": lane.adapter,
        "queued_jobs": lane.queued_jobs,
        "queued_tokens": lane.queued_tokens,
        "leased_tokens": lane.leased_tokens,
        "enqueued": lane.enqueued_jobs,
        "done": lane.done_jobs,
        "expired": lane.expired_jobs,
        "dead": lane.dead_jobs,
        "cancelled": lane.cancelled_jobs,
        "oldest": round(lane.oldest_seconds, 2),
    }


def _pool_content(pool: mesh_pb2.PoolStatus) -> dict[str, Any]:
    return {"pool": pool.pool, "desired": pool.desired_workers}


def _process_content(process: mesh_pb2.ProcessStatus) -> dict[str, Any]:
    return {
        "name": process.name,
        "state": process.state,
        "restarts": process.restarts,
        "detail": process.detail,
    }


_CONTENT: Final[dict[type[Message], Any]] = {
    models_pb2.Model: model_content,
    mesh_pb2.WorkerStatus: _worker_content,
    mesh_pb2.LaneStatus: _lane_content,
    mesh_pb2.PoolStatus: _pool_content,
    mesh_pb2.ProcessStatus: _process_content,
}


def _rows(mesh: mesh_pb2.Mesh) -> Iterator[tuple[str, list[tuple[str, Message]]]]:
    yield "workers", [(worker.worker_id, worker) for worker in mesh.workers]
    yield "models", [(model.model, model) for model in mesh.models]
    yield "lanes", [(f"{lane.pool} {lane.model} {lane.adapter}", lane) for lane in mesh.lanes]
    yield "pools", [(pool.pool, pool) for pool in mesh.pools]
    yield "processes", [(process.name, process) for process in mesh.processes]
