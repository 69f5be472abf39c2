"""Counts device seconds, and those wasted on answers without a waiting client.

Not on the request path: `runner.py` reports each forward pass, `delivery.py` jobs that were
cancelled or refused.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from services.worker.jobs.held import HeldJob


class Waste:
    """Sums since the process began. The time of a forward pass is divided between its jobs by
    tokens. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Mutable state; the lock also guards `device_seconds` of every job.
        self._device_seconds = 0.0
        self._wasted_seconds = 0.0

    @property
    def device_seconds(self) -> float:
        return self._device_seconds

    @property
    def wasted_seconds(self) -> float:
        return self._wasted_seconds

    def computed(self, jobs: Sequence[HeldJob], tokens: Sequence[int], seconds: float) -> None:
        """Add a forward pass in which `tokens[i]` tokens belonged to `jobs[i]`. A job may occur
        repeatedly.
        """
        a_token = seconds / max(1, sum(tokens))
        with self._lock:
            self._device_seconds += seconds
            for held, count in zip(jobs, tokens, strict=True):
                if held.unwanted:
                    self._wasted_seconds += count * a_token
                else:
                    held.device_seconds += count * a_token

    def dropped(self, held: HeldJob) -> None:
        """Count a cancelled job's device seconds as wasted. Idempotent; call it after setting
        `held.unwanted`.
        """
        with self._lock:
            self._wasted_seconds += held.device_seconds
            held.device_seconds = 0.0

    def refused(self, seconds: float) -> None:
        """Count device seconds of answers that a router refused because the job was cancelled or
        answered by another worker.
        """
        with self._lock:
            self._wasted_seconds += seconds
