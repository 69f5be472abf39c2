"""The best workers of a pool for a model, while a plan is made."""

from __future__ import annotations

from typing import Any

import numpy as np
from shoal.v1 import models_pb2

from services.scheduler.planning.pool_workers import (
    BUSY_COST,
    IDLE_COST,
    MAX_CONCURRENT_LOADS,
    PoolWorkers,
)
from tests.scheduler.snapshots import MODEL, Mesh, holding

GIB = 1 << 30


def pool(mesh: Mesh) -> PoolWorkers:
    return PoolWorkers(list(mesh.workers.values()))


def best(workers: PoolWorkers, size: int = 1 << 20, **options: Any) -> list[int]:
    defaults: dict[str, Any] = {"near": {}, "banned": (), "evictable": (), "draw": 0}
    return workers.best(MODEL, size, **(defaults | options))


def equal_workers(count: int) -> PoolWorkers:
    mesh = Mesh()
    for number in range(count):
        mesh.worker(f"w{number}")
    return pool(mesh)


def test_worker_with_the_model_on_disk_is_first() -> None:
    mesh = Mesh()
    mesh.worker("a")
    mesh.worker("b", holding(state=models_pb2.MODEL_STATE_COLD))
    workers = pool(mesh)
    assert best(workers)[0] == workers.rows["b"]


def test_worker_on_disk_is_found_among_many_others() -> None:
    mesh = Mesh()
    for number in range(40):
        mesh.worker(f"w{number:02}")
    mesh.worker("x", holding(state=models_pb2.MODEL_STATE_COLD))
    workers = pool(mesh)
    assert best(workers)[0] == workers.rows["x"]


def test_equal_workers_share_models_by_draw() -> None:
    workers = equal_workers(4)
    firsts = {best(workers, draw=draw)[0] for draw in range(40)}
    assert firsts == set(range(4))


def test_busy_worker_is_last_and_too_busy_ones_are_left_out() -> None:
    workers = equal_workers(2)
    workers.seconds[0] = 5.0
    assert best(workers) == [1, 0]
    assert best(workers, within_seconds=5.0) == [1]


def test_banned_worker_is_left_out() -> None:
    assert best(equal_workers(2), banned=[0]) == [1]


def test_worker_without_memory_must_be_able_to_evict() -> None:
    workers = equal_workers(2)
    workers.free[:] = [0.0, GIB]
    assert best(workers, GIB) == [1]
    room = np.array([float(GIB), 0.0])
    assert best(workers, GIB, evictable=[(room, IDLE_COST)]) == [1, 0]
    assert best(workers, 2 * GIB, evictable=[(room, BUSY_COST)]) == []


def test_reserved_loads_close_a_worker() -> None:
    workers = equal_workers(1)
    free = workers.free[0]
    for _ in range(MAX_CONCURRENT_LOADS):
        assert best(workers) == [0]
        workers.expect(0, 1 << 20, 0.5)
    assert workers.is_closed
    assert best(workers) == []
    assert workers.free[0] == free - MAX_CONCURRENT_LOADS * (1 << 20)
