"""Redis' clock, by which deadlines count, as a worker reckons it from what routers tell.

Beside the way of a request: set by every answer to a pull. A worker's own clock may be wrong by minutes, and deadlines judged by it
would throw good work away, or let the device compute for nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class MeshClock:
    """Until a router has told its time (those of wire version 0 do not), it is this machine's own. From any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, unix_time: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._unix_time = unix_time
        # The state: by how many seconds Redis' clock is ahead of `clock`; None until it was heard.
        self._ahead: float | None = None

    def now(self) -> float:
        """Unix time, seconds."""
        return self._unix_time() if self._ahead is None else self._clock() + self._ahead

    def local(self, at: float) -> float:
        """A moment of this clock on the machine's own, Unix time."""
        return self._unix_time() + at - self.now()

    def hear(self, now_unix_ms: int, asked_at: float, heard_at: float) -> None:
        """A call that was sent and answered at those moments of `clock` brought the router's time (0: it does not tell).

        It was told between the two, which bounds the truth on both sides: an estimate outside moves to the nearer bound. So the
        quickest answer counts, however long others waited, and a clock that was set anew is followed at once.
        """
        if not now_unix_ms:
            return
        told = now_unix_ms / 1000
        least, most = told - heard_at, told - asked_at
        self._ahead = least if self._ahead is None else min(max(self._ahead, least), most)
