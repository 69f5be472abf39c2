"""This scheduler's last look at the mesh: written by `control.py`, read by the scaler and the
metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from libs.fleet import FleetSnapshot
from libs.queue import LaneGauges, LaneKey


@dataclass(frozen=True, slots=True)
class Look:
    """The workers and the lanes as Redis had them at one moment.

    `at`: this process' monotonic clock, seconds, for the age of the look; `fleet.now_ms` is Redis'
    clock. `leads`: whether this scheduler is `fleet.leader`.
    """

    fleet: FleetSnapshot
    gauges: Mapping[LaneKey, LaneGauges]
    at: float
    leads: bool = False


class View:
    """The latest look, and an event for tasks that wait for the next one. `look` is None until
    Redis answered for the first time."""

    def __init__(self) -> None:
        # The state: the last look, and the event that the next look sets.
        self._look: Look | None = None
        self._changed = asyncio.Event()

    @property
    def look(self) -> Look | None:
        return self._look

    def update(self, look: Look) -> None:
        """Sets a new look; wakes all tasks that wait for it."""
        self._look = look
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Returns at the next look."""
        await self._changed.wait()
