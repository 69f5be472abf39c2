"""Meters the cost of a job: the time of the workers that have its model while it runs, by pool.

A worker costs its pool's price whether it computes or not, and the answer of a request does not
name its worker. So a pool that other callers use too is charged to the job as a whole, and one
that is scaled for the job alone is charged for its real time.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from shoal.errors import PermissionDenied, ShoalError, Unauthenticated
from shoal.status import Mesh, WorkerStatus

COST_POLL_SECONDS: Final = 10.0
"""The interval at which the mesh is asked for its workers."""
_HOUR_SECONDS: Final = 3600.0


class MeshClient(Protocol):
    """The part of a client that reports the workers."""

    async def mesh(self) -> Mesh: ...


class CostMeter:
    """Adds up the cost of a job, without prices nothing.

    Args:
        prices: The price of a worker for an hour, by pool.
        spent: The cost of earlier runs of the job, by pool.
    """

    def __init__(
        self,
        client: MeshClient,
        model: str,
        prices: Mapping[str, float],
        spent: Mapping[str, float],
    ) -> None:
        self._client, self._model, self._prices = client, model, prices
        self._spent = defaultdict(float, spent)
        # The state: the price of an hour of the workers at the last poll, by pool, and the time up
        # to which `_spent` counts.
        self._per_hour: Mapping[str, float] = {}
        self._counted_at = 0.0

    async def run(self) -> None:
        """Poll until cancelled. Raises PermissionDenied or Unauthenticated for a caller that may
        not see the workers.
        """
        while self._prices:
            try:
                self.observe((await self._client.mesh()).workers, time.monotonic())
            except (PermissionDenied, Unauthenticated):
                raise
            except ShoalError:
                pass  # The workers of the last poll count until the next one.
            await asyncio.sleep(COST_POLL_SECONDS)

    def observe(self, workers: Iterable[WorkerStatus], now: float) -> None:
        """Count the time until now for the workers of the last poll, and remember these."""
        self._count(now)
        found: dict[str, float] = defaultdict(float)
        for worker in workers:
            if worker.pool in self._prices and self._model in worker.resident:
                found[worker.pool] += self._prices[worker.pool]
        self._per_hour = found

    def spent(self, now: float) -> dict[str, float]:
        """Return the cost until now, by pool."""
        self._count(now)
        return {pool: round(cost, 6) for pool, cost in sorted(self._spent.items())}

    def left(self, seconds: float) -> float:
        """Return the cost of further seconds with the workers of the last poll."""
        return sum(self._per_hour.values()) * seconds / _HOUR_SECONDS

    def _count(self, now: float) -> None:
        for pool, price in self._per_hour.items():
            self._spent[pool] += price * (now - self._counted_at) / _HOUR_SECONDS
        self._counted_at = now
