"""When may a refused request come back? Pure: the clock is an argument.

If all were told when the lane has room for one, all would come back for it: in an overload of five times every request is refused
four times out of five, so most would come twice or more, and the load that is refused would grow by being refused. So each refused
request that could still come in time books its cost, and the next one is told a later time. What cannot come in time any more books
nothing: it is told a time after its deadline, and its client gives up. Of what a lane can do, so much may come back and no more.
"""

from __future__ import annotations

from typing import Final

from libs.queue import LaneKey

BOOKED: Final = 2.0
"""How many times its cost a request books: as if there were two routers, each of which knows only its own refusals."""
LONGEST_SECONDS: Final = 60.0


class Appointments:
    """Of one router, by lane."""

    def __init__(self) -> None:
        # The state: until when a lane's time is booked, on the caller's clock. Only lanes that are served are ever full.
        self._until: dict[LaneKey, float] = {}

    def give(self, lane: LaneKey, *, soonest: float, remaining: float, cost: float, now: float) -> float:
        """Seconds until a request may come back that is worth nothing in `remaining` seconds: not before `soonest`, when there is
        room for it alone. `cost`: seconds that it takes the lane."""
        until = self._until.get(lane, 0.0)
        at = max(now + soonest, until)
        if at <= now + remaining:
            self._until[lane] = at + BOOKED * cost
        return min(at - now, LONGEST_SECONDS)
