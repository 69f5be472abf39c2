"""`Executor` scales one workload from zero and to zero as KEDA's operator does; between one and
many its HPA scales (`hpa.py`). Pure.

Replaces KEDA 2.20 in simulations and tests. Follows `pkg/scaling/executor/scale_scaledobjects.go`,
without fallback, pauses and `idleReplicaCount`.
"""

from __future__ import annotations

from typing import Final

POLLING_SECONDS: Final = 5.0
"""The pollingInterval of our ScaledObjects (k8s/components/keda)."""
SYNC_SECONDS: Final = 15.0
"""Time between two syncs of an HPA (--horizontal-pod-autoscaler-sync-period)."""


class Executor:
    """The executor of one ScaledObject that was created at `created`. Times in seconds of any
    monotonic clock.
    """

    def __init__(
        self,
        created: float,
        least: int = 0,
        cooldown_seconds: float = 600.0,
        initial_cooldown_seconds: float = 120.0,
    ) -> None:
        self._created = created
        self._least = least
        self._cooldown_seconds = cooldown_seconds
        self._initial_cooldown_seconds = initial_cooldown_seconds
        # The state: `status.lastActiveTime`.
        self.last_active: float | None = None

    def decide(self, now: float, replicas: int, active: bool) -> int:
        """Return the replicas to set after a poll, or a push (which is active)."""
        if active:
            self.last_active = now
            return replicas or max(self._least, 1)
        if replicas > 0 and self._least == 0:
            return 0 if self._has_cooled_down(now) else replicas
        return max(replicas, self._least)

    def _has_cooled_down(self, now: float) -> bool:
        if self.last_active is None:
            return self._created + self._initial_cooldown_seconds < now
        return self.last_active + self._cooldown_seconds < now
