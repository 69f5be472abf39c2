"""Retry times for refused requests, by reservation. Pure: the clock is an argument.

If all were told when the lane has room for one, all would retry then: in an overload of five times
every request is refused four times out of five, so most would retry twice or more, and refusals
would add to the overload. So each refused request that a retry can still serve in time reserves its
cost, and the next one is told a later time. One for which it is too late reserves nothing: it is
told a time after its deadline, and its client gives up. So no more retries come back than the lane
can serve.
"""

from __future__ import annotations

from typing import Final

from libs.queue import LaneKey

BOOKED: Final = 2.0
"""How many times its cost a request reserves: as if there were two routers, each of which knows
only its own refusals.
"""
MAX_SECONDS: Final = 60.0


class RetrySlots:
    """The reservations of one router, by lane."""

    def __init__(self) -> None:
        # The state: until when a lane's time is reserved, by the clock of `now`. Only lanes that
        # are served are ever full.
        self._until: dict[LaneKey, float] = {}

    def give(
        self, lane: LaneKey, *, soonest: float, remaining: float, cost: float, now: float
    ) -> float:
        """Seconds after which a request with a deadline in `remaining` seconds should be retried:
        not before `soonest`, when there is room for it alone. `cost`: seconds of the lane's time
        that it takes."""
        until = self._until.get(lane, 0.0)
        at = max(now + soonest, until)
        if at <= now + remaining:
            self._until[lane] = at + BOOKED * cost
        return min(at - now, MAX_SECONDS)
