"""Counts the time in which the device was idle although jobs were queued, and the CPU time of
forward passes.

Not on the request path: `runner.py` reports each forward pass, `metrics.py` reads the sums.
`waste.py` counts the seconds of the passes themselves.
"""

from __future__ import annotations

import math


class DeviceTime:
    """Sums of seconds since the process began.

    Only the device thread writes, without a lock; any thread may read. The device is idle from the
    end of a forward pass, or from the moment at which the first job of the next batch was queued if
    that is later, until the next pass begins. Times are of the worker's monotonic clock.
    """

    def __init__(self) -> None:
        self.starved_seconds = 0.0
        """Time in which the device thread waited for jobs that were queued, loading or in
        preparation.
        """
        self.turnaround_seconds = 0.0
        """Time between two forward passes in which the device thread passed on answers and cut the
        next batch. For batches that were launched ahead, the gap between the two as measured on the
        device.
        """
        self.cpu_seconds = 0.0
        """CPU time of the device thread in forward passes, without that of helper threads."""
        self._ended_at = -math.inf

    def began(self, started_at: float, queued_at: float, cut_at: float | None) -> None:
        """Record the start of a forward pass.

        Args:
            queued_at: When the first of its jobs was queued.
            cut_at: When its batch was cut, if the device thread had waited for it.
        """
        since = max(self._ended_at, queued_at)
        if cut_at is not None and cut_at > since:
            self.starved_seconds += cut_at - since
            since = cut_at
        self.turnaround_seconds += max(0.0, started_at - since)

    def computed(self, cpu_seconds: float) -> None:
        """Add the CPU time of a forward pass."""
        self.cpu_seconds += cpu_seconds

    def ended(self, ended_at: float) -> None:
        """Record the end of the forward pass."""
        self._ended_at = ended_at

    def idled(self, seconds: float) -> None:
        """Add device-measured idle time between two batches, the second of which was launched
        ahead.
        """
        self.turnaround_seconds += seconds

    def preempting_seconds(self, seconds: float) -> None:
        """Add the overhead of preemption: the time that preempting batches took beyond their
        passes.
        """
        self.turnaround_seconds += max(0.0, seconds)
