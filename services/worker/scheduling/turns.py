"""Start-time fair queueing of flows that share one resource (Goyal, Vin, Cheng, SIGCOMM 1996):
decisions only.

The flow with the least device seconds divided by its weight is next. The virtual time is the start
tag of the flow in service. A new flow begins BURST_SECONDS behind it, and gets no more credit for
its absence. A flow without burst credit begins at the virtual time.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

BURST_SECONDS: Final = 0.25
"""Burst credit in device seconds for weight 1: a new flow gets this much service before flows that
have had their share. Light clients send requests in bursts too; sharing evenly with a backlog would
double the duration of a burst.
"""

REMEMBERED_SECONDS: Final = 5.0
"""Time for which the tag of a flow without waiting work is remembered. This is long against the
time in which a busy lane is refilled, and bounds the state.
"""

Key = TypeVar("Key", bound=Hashable)


class Turns(Generic[Key]):
    """One fair queue. A flow's tag is its virtual start time: its service so far divided by its
    weight. Flows with equal tags are served in order of arrival.
    """

    def __init__(self) -> None:
        self._virtual = 0.0
        # Mutable state: tags of the waiting flows, in order of arrival; tags of the others with the
        # time when they were last served or left, in order of that time.
        self._tags: dict[Key, float] = {}
        self._away: dict[Key, tuple[float, float]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._tags or key in self._away

    def __len__(self) -> int:
        """Return the number of flows that wait or recently did."""
        return len(self._tags) + len(self._away)

    @property
    def has_waiting(self) -> bool:
        return bool(self._tags)

    def tag(self, key: Key) -> float:
        """Return the flow's tag, or the tag it would begin with if it does not wait."""
        return self._tags[key] if key in self._tags else self._begin(key, BURST_SECONDS)

    def join(self, key: Key, credit: float = BURST_SECONDS) -> None:
        """Add a waiting flow. It begins at most `credit` behind the virtual time."""
        if key not in self._tags:
            self._tags[key] = self._begin(key, credit)
            self._away.pop(key, None)

    def _begin(self, key: Key, credit: float) -> float:
        begin = self._virtual - credit
        return max(begin, self._away[key][0]) if key in self._away else begin

    def leave(self, key: Key, now: float) -> None:
        """Mark the flow as having nothing waiting."""
        self._away[key] = (self._tags.pop(key), now)

    def first(self) -> Key:
        """Return the least-served waiting flow."""
        return min(self._tags, key=self._tags.__getitem__)

    def next(self) -> Key:
        """Return `first`, and advance the virtual time to it: its service begins."""
        key = self.first()
        self._virtual = max(self._virtual, self._tags[key])
        return key

    def charge(self, key: Key, cost: float, now: float) -> None:
        """Charge the flow for service. `cost` is the service divided by the flow's weight."""
        if key in self._tags:
            self._tags[key] += cost
        else:
            self._away[key] = (self._away.pop(key, (self._virtual,))[0] + cost, now)

    def forget(self, now: float) -> None:
        """Forget the flows that left or were last served more than REMEMBERED_SECONDS ago."""
        while self._away:
            oldest = next(iter(self._away))
            if self._away[oldest][1] >= now - REMEMBERED_SECONDS:
                return
            del self._away[oldest]
