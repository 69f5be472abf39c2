"""This scheduler's latest snapshot of the mesh: written by `control.py`, read by the scaler and the
metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from libs.fleet import FleetSnapshot
from libs.queue import LaneGauges, LaneKey


@dataclass(frozen=True, slots=True)
class MeshSnapshot:
    """The workers and the lanes as Redis had them at one moment."""

    fleet: FleetSnapshot
    gauges: Mapping[LaneKey, LaneGauges]
    at: float
    """This process' monotonic clock, seconds, for the snapshot's age; `fleet.now_ms` is Redis'
    clock.
    """
    leads: bool = False
    """This scheduler is `fleet.leader`."""


class SchedulerView:
    """The latest snapshot (None before Redis first answered), and an event for the next one."""

    def __init__(self) -> None:
        # The state: the last snapshot, and the event that the next one sets.
        self._snapshot: MeshSnapshot | None = None
        self._changed = asyncio.Event()

    @property
    def snapshot(self) -> MeshSnapshot | None:
        return self._snapshot

    def update(self, snapshot: MeshSnapshot) -> None:
        """Set a new snapshot, and wake all tasks that wait for it."""
        self._snapshot = snapshot
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Return at the next snapshot."""
        await self._changed.wait()
