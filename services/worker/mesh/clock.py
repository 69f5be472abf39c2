"""Clock synchronisation: estimates Redis' clock, which deadlines use, from times that routers send.

Not on the request path: every reply to a pull updates it. A worker's own clock may be wrong by
minutes. Deadlines checked by it would drop jobs that are still in time, or let the device compute
expired ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class MeshClock:
    """Redis' clock, or this machine's until a router has sent its time. Thread-safe."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._unix_time = unix_time
        # Mutable state: seconds that Redis' clock is ahead of `clock`; None before the first
        # estimate.
        self._ahead: float | None = None

    def now(self) -> float:
        """Return the Unix time in seconds."""
        return self._unix_time() if self._ahead is None else self._clock() + self._ahead

    def local(self, at: float) -> float:
        """Convert a time of this clock to the machine's Unix time."""
        return self._unix_time() + at - self.now()

    def synchronise(self, now_unix_ms: int, sent_at: float, received_at: float) -> None:
        """Update the estimate from a call that was sent and received at these times of `clock`.

        The router read its time between the two, which bounds the offset on both sides. An estimate
        outside the bounds moves to the nearer one. The quickest reply therefore determines the
        estimate, however long others waited, and a clock that was reset is followed immediately.

        Args:
            now_unix_ms: The router's time; 0 if it does not know Redis' time yet.
        """
        if not now_unix_ms:
            return
        router_time = now_unix_ms / 1000
        least, most = router_time - received_at, router_time - sent_at
        self._ahead = least if self._ahead is None else min(max(self._ahead, least), most)
