"""Counts the time in which the device did not compute although there was work, and the CPU time of
forward passes.

Not on the request path: `runner.py` reports each forward pass, `metrics.py` reads the sums. Passes'
own seconds are in `waste.py`.
"""

from __future__ import annotations

import math


class DeviceTime:
    """Sums of seconds since the process began. Written by the device thread alone, without a lock;
    any thread may read.

    The device stalls from the end of a forward pass, or from the moment at which the first job of
    the next batch was queued if that is later, until the next pass begins. Times are of the
    worker's monotonic clock.
    """

    def __init__(self) -> None:
        self.starved_seconds = 0.0
        """Jobs of the next batch were queued, loading or in preparation, and the device thread
        waited for them.
        """
        self.turnaround_seconds = 0.0
        """Jobs of the next batch were there, and the device thread had other work between two
        forward passes: answers are handed on and the next batch is cut. For batches that were
        launched ahead, the gap between the two as measured on the device."""
        self.cpu_seconds = 0.0
        """CPU time of the device thread in forward passes; not of the threads that compute with
        it.
        """
        self._ended_at = -math.inf

    def began(self, started_at: float, queued_at: float, cut_at: float | None) -> None:
        """A forward pass begins. `queued_at`: when the first of its jobs was queued; `cut_at`: when
        its batch was cut, if the device thread had waited for it."""
        since = max(self._ended_at, queued_at)
        if cut_at is not None and cut_at > since:
            self.starved_seconds += cut_at - since
            since = cut_at
        self.turnaround_seconds += max(0.0, started_at - since)

    def computed(self, cpu_seconds: float) -> None:
        """A forward pass took this much CPU time."""
        self.cpu_seconds += cpu_seconds

    def ended(self, ended_at: float) -> None:
        """The forward pass that `began` is over."""
        self._ended_at = ended_at

    def idled(self, seconds: float) -> None:
        """The device had nothing to do for so long between two batches, of which the second was
        launched before the first was collected. Measured on the device."""
        self.turnaround_seconds += seconds

    def overtaken(self, seconds: float) -> None:
        """Other batches ran between two layers of a forward pass, and took so much longer than
        their own passes.
        """
        self.turnaround_seconds += max(0.0, seconds)
