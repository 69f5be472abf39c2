"""Check that Redis can hold the queue: at the start, and again after an outage or a failover."""

from __future__ import annotations

import math
import time
from typing import Final

from libs.queue.lanes import Lanes

REPEATED_CHECK_SECONDS: Final = 10.0
"""Interval of the checks while some master of a cluster has not answered one."""


class RedisCheck:
    """Runs the check when it is due, and remembers which Redis server passed it."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        # The state: whether a check has passed, against which master (with Sentinels) or masters
        # (of a cluster), and whether Redis was away since; when the check is due in any case, in
        # monotonic seconds.
        self._is_known = False
        self._server: object = None
        self._was_away = False
        self._due_at = math.inf

    def mark_away(self) -> None:
        """Make the check due again after an outage: the server may be another, or have lost its
        data.
        """
        self._was_away = True

    async def run_if_due(self) -> None:
        """Run the check if it is due. Raises UnsuitableRedis, and NoCapacity while Redis is
        away.
        """
        if (
            self._is_known
            and not self._was_away
            and self._server == self._lanes.masters.addresses
            and time.monotonic() < self._due_at
        ):
            return
        is_complete = await self._lanes.check(again=self._is_known)
        self._is_known, self._was_away = True, False
        self._server = self._lanes.masters.addresses
        self._due_at = math.inf if is_complete else time.monotonic() + REPEATED_CHECK_SECONDS
