"""Retry times for refused requests, by reservation. Pure: the clock is an argument.

If every refused request received the time when the lane has room for one, all would retry then. At
five times overload four of five requests are refused, so most would retry twice or more and add to
the overload.

1. A refused request that a retry can still serve in time reserves its cost, and the next one gets a
  later time.
2. A request that is too late reserves nothing: it gets a time after its deadline, and its client
  gives up.

So the lane can serve all retries.
"""

from __future__ import annotations

from typing import Final

from libs.queue import LaneKey

RESERVED_FACTOR: Final = 2.0
"""A request reserves this multiple of its cost, as if there were two routers: each router knows
only its own refusals.
"""
MAX_SECONDS: Final = 60.0


class RetrySlots:
    """The reservations of one router, by lane."""

    def __init__(self) -> None:
        # The state: the end of each lane's reserved time, by the clock of `now`. Only lanes that
        # are served are ever full.
        self._until: dict[LaneKey, float] = {}

    def reserve(
        self, lane: LaneKey, *, soonest: float, remaining: float, cost: float, now: float
    ) -> float:
        """Return the seconds after which a refused request should be retried.

        Args:
            soonest: Seconds until the lane has room for this request alone.
            remaining: Seconds until the request's deadline.
            cost: Seconds of the lane's time that it takes.
        """
        until = self._until.get(lane, 0.0)
        at = max(now + soonest, until)
        if at <= now + remaining:
            self._until[lane] = at + RESERVED_FACTOR * cost
        return min(at - now, MAX_SECONDS)
