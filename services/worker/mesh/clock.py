"""Clock synchronisation: estimates Redis' clock, by which deadlines count, from the times that
routers send.

Not on the request path: updated by every answer to a pull. A worker's own clock may be wrong by
minutes, and deadlines checked by it would drop jobs that are still in time, or let the device
compute for nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class MeshClock:
    """Redis' clock; this machine's own until a router has sent its time (those of wire version 0 do
    not). Thread-safe.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._unix_time = unix_time
        # The state: by how many seconds Redis' clock is ahead of `clock`; None before the first
        # estimate.
        self._ahead: float | None = None

    def now(self) -> float:
        """Unix time, seconds."""
        return self._unix_time() if self._ahead is None else self._clock() + self._ahead

    def local(self, at: float) -> float:
        """Converts a moment of this clock to the machine's own, Unix time."""
        return self._unix_time() + at - self.now()

    def synchronise(self, now_unix_ms: int, sent_at: float, received_at: float) -> None:
        """Updates the estimate from a call that was sent and answered at these moments of `clock`.
        `now_unix_ms`: the router's time (0: it sends none).

        The router read its time between the two moments, which bound the offset on both sides: an
        estimate outside moves to the nearer bound. So the quickest answer determines the estimate,
        however long others waited, and a clock that was reset is followed at once.
        """
        if not now_unix_ms:
            return
        router_time = now_unix_ms / 1000
        least, most = router_time - received_at, router_time - sent_at
        self._ahead = least if self._ahead is None else min(max(self._ahead, least), most)
