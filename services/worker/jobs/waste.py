"""How long the device computed, and how much of that for nobody.

Beside the way of a request: `runner.py` tells of each forward pass, `delivery.py` of jobs that nobody waits for any more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from services.worker.jobs.held import HeldJob


class Waste:
    """Sums since the process began. A forward pass is shared out to its jobs by tokens. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The state; guarded by the lock, as `device_seconds` of every job.
        self._device_seconds = 0.0
        self._wasted_seconds = 0.0

    @property
    def device_seconds(self) -> float:
        return self._device_seconds

    @property
    def wasted_seconds(self) -> float:
        return self._wasted_seconds

    def computed(self, jobs: Sequence[HeldJob], tokens: Sequence[int], seconds: float) -> None:
        """A forward pass is over; `tokens[i]` of it were of `jobs[i]`, which may occur more than once."""
        a_token = seconds / max(1, sum(tokens))
        with self._lock:
            self._device_seconds += seconds
            for held, count in zip(jobs, tokens, strict=True):
                if held.unwanted:
                    self._wasted_seconds += count * a_token
                else:
                    held.device_seconds += count * a_token

    def dropped(self, held: HeldJob) -> None:
        """Nobody waits for the job any more: what it took was for nothing. Call it after setting `held.unwanted`, once or more."""
        with self._lock:
            self._wasted_seconds += held.device_seconds
            held.device_seconds = 0.0

    def refused(self, seconds: float) -> None:
        """So much went into answers that their routers had no use for: cancelled on their way, or answered by another worker."""
        with self._lock:
            self._wasted_seconds += seconds
