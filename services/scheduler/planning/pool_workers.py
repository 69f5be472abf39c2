"""Track the free capacity of one pool's workers while a plan is made, and score workers for a
model. Pure.

The numbers of all workers are in arrays, one row per worker, because a plan for thousands of models
scores thousands of workers; only the few best rows for a model are examined one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from shoal.v1 import models_pb2

from libs.fleet import WorkerRecord
from libs.fleet.affinity import AFFINITY, HORIZON_SECONDS, affinity

MAX_CONCURRENT_LOADS: Final = 4
"""Maximum concurrent loads of a worker: more would only delay all of them, because they share its
disk and network.
"""
IDLE_COST: Final = 0.2
"""Subtracted from a worker's score if it must evict idle models: less than the value of having the
model in memory or on disk.
"""
BUSY_COST: Final = 0.4
"""Subtracted if it must evict models in use."""
TIE_SHARE: Final = 0.1
"""Workers with scores within this share of the best one count as equal. One of them is chosen by a
hash, so that models are spread over equal workers.
"""
_MAX_SCORED: Final = 8
"""Number of best rows that are scored with affinity."""

Floats = NDArray[np.float64]
_NO_COST: Final[Floats] = np.zeros(1)


class PoolWorkers:
    """The workers of one pool that can load models. A row is a worker's index in `workers`."""

    def __init__(self, workers: Sequence[WorkerRecord]) -> None:
        self.workers = sorted(workers, key=lambda worker: worker.worker_id)
        self.rows = {worker.worker_id: row for row, worker in enumerate(self.workers)}
        self.local = [row for row, worker in enumerate(self.workers) if worker.local_models_only]
        """Rows of workers that cannot fetch models."""
        self.free: Floats = np.array(
            [worker.free_bytes for worker in self.workers], dtype=np.float64
        )
        """Bytes that are neither used nor reserved."""
        self.idle, self.old, self.movable, self.seconds = (
            np.zeros(len(self.workers)) for _ in range(4)
        )
        """The rows are: bytes of idle models, which may be evicted at once for waiting work; bytes
        of those that may also be evicted for a model without waiting work; bytes of all models that
        are not pinned; and the time for which each worker has work.
        """
        self.loads = np.zeros(len(self.workers), dtype=np.int64)
        """Loads in progress."""
        # Cached, because every model needs them: the number of rows that can take another load and,
        # after the first call of `best`, the scores before affinity and evictions.
        self._open = len(self.workers)
        self._base: Floats | None = None

    def expect(self, row: int, size: int, load_seconds: float) -> None:
        """Reserve `size` bytes and the load time for a model that the row's worker will load."""
        self.free[row] -= size
        self.seconds[row] += load_seconds
        self.loads[row] += 1
        self._open -= int(self.loads[row] == MAX_CONCURRENT_LOADS)
        if self._base is not None:
            self._base[row] = self._score(row)

    @property
    def is_closed(self) -> bool:
        """Return whether every worker has MAX_CONCURRENT_LOADS loads in progress."""
        return self._open == 0

    def best(
        self,
        model: str,
        size: int,
        *,
        near: Mapping[int, float],
        banned: Collection[int],
        evictable: Sequence[tuple[Floats, float]],
        draw: int,
        within_seconds: float = np.inf,
    ) -> list[int]:
        """Return the rows with the best scores for the model, best first. Empty if no row has the
        memory now.

        Args:
            model: The name of the model.
            size: Bytes of the model.
            near: Known affinities by row; other rows have the model at most on disk.
            banned: Rows that must not be used.
            evictable: Bytes by row that may be evicted, and the cost of that; the most expensive
                first.
            draw: Decides, together with the model's name, which of equal rows is first.
            within_seconds: Use only rows that finish their present loads sooner.
        """
        if self._base is None:
            self._base = np.array([self._score(row) for row in range(len(self.workers))])
        base = self._base - self._cost(size, evictable)
        if within_seconds < np.inf:
            base[self.seconds >= within_seconds] = -np.inf
        if banned:
            base[list(banned)] = -np.inf
        chance = crc32(f"{model} {draw}".encode())
        scores = self._scores(model, base, near, chance)
        if not scores:
            return []
        ranked = sorted(scores, key=lambda row: (-scores[row], row))
        worst_alike = scores[ranked[0]] - _tolerance(scores[ranked[0]])
        alike = [row for row in ranked if scores[row] >= worst_alike]
        turn = chance % len(alike)
        return [*alike[turn:], *alike[:turn], *ranked[len(alike) :]]

    def _score(self, row: int) -> float:
        """Return the score of a worker's row before affinity and evictions; -inf if the worker has
        MAX_CONCURRENT_LOADS loads in progress.
        """
        is_closed = self.loads[row] >= MAX_CONCURRENT_LOADS
        return -np.inf if is_closed else -min(float(self.seconds[row]) / HORIZON_SECONDS, 1.0)

    def _cost(self, size: int, evictable: Sequence[tuple[Floats, float]]) -> Floats:
        """Return, by row, the cost of the evictions that `size` bytes need; infinite if evictions
        do not free enough.
        """
        fits = self.free >= size
        if fits.all():
            return _NO_COST
        cost = np.full(len(self.workers), np.inf)
        for pool_workers, price in evictable:
            cost[self.free + pool_workers >= size] = price
        cost[fits] = 0.0
        return cost

    def _scores(
        self, model: str, base: Floats, near: Mapping[int, float], chance: int
    ) -> dict[int, float]:
        """Return the scores of some rows, including the best one or one equal to it."""
        if len(base) <= _MAX_SCORED:
            return self._scored(range(len(base)), model, base, near)
        top = float(base.max())
        if top == -np.inf:
            return {}
        least = top - _tolerance(top)
        alike = np.flatnonzero(base >= least)
        turn = chance % len(alike)
        some = [
            *alike[turn : turn + _MAX_SCORED].tolist(),
            *alike[: max(0, turn + _MAX_SCORED - len(alike))].tolist(),
        ]
        scores = self._scored({*some, *near}, model, base, near)
        # The other rows have the model at most on disk, which bounds their scores. If one of them
        # may still be the best, score every row with the model on disk.
        if max(scores.values()) < least + AFFINITY[models_pb2.MODEL_STATE_COLD]:
            on_disk = [row for row, worker in enumerate(self.workers) if model in worker.models]
            scores |= self._scored(on_disk, model, base, near)
        return scores

    def _scored(
        self, rows: Iterable[int], model: str, base: Floats, near: Mapping[int, float]
    ) -> dict[int, float]:
        scores = {}
        for row in rows:
            score = float(base[row])
            if score > -np.inf:
                scores[row] = score + (
                    near[row] if row in near else affinity(self.workers[row], model)
                )
        return scores


def _tolerance(score: float) -> float:
    return max(TIE_SHARE * abs(score), 0.01)
