"""Start-time fair queueing of flows that share one resource (Goyal, Vin, Cheng, SIGCOMM 1996):
decisions only.

The least-served flow, in device seconds divided by its weight, is next. The virtual time is the
start tag of the flow in service; a new flow begins BURST_SECONDS behind it, and gets no more credit
for the time it was away. A flow that comes without burst credit begins at the virtual time.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

BURST_SECONDS: Final = 0.25
"""Burst credit, in device seconds for weight 1: a flow that has had less than its share gets this
much before those that have had theirs. Light clients send requests in bursts too; sharing evenly
with a backlog would double the time that a burst takes."""

REMEMBERED_SECONDS: Final = 5.0
"""How long the tag of a flow that has nothing waiting is remembered. That is long against the time
in which a busy lane is refilled, and bounds the state."""

Key = TypeVar("Key", bound=Hashable)


class Turns(Generic[Key]):
    """One fair queue. A flow's tag is its virtual start time: the service it has had, divided by
    its weight. Flows with equal tags are served in order of arrival."""

    def __init__(self) -> None:
        self._virtual = 0.0
        # The state: tags of the waiting flows, in order of arrival; tags of the others with the
        # time when they last were served or left, in order of that time.
        self._tags: dict[Key, float] = {}
        self._away: dict[Key, tuple[float, float]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._tags or key in self._away

    def __len__(self) -> int:
        """How many flows wait, or did so lately."""
        return len(self._tags) + len(self._away)

    @property
    def has_waiting(self) -> bool:
        return bool(self._tags)

    def tag(self, key: Key) -> float:
        """The flow's tag; of one that does not wait, the tag it would begin with."""
        return self._tags[key] if key in self._tags else self._begin(key, BURST_SECONDS)

    def come(self, key: Key, credit: float = BURST_SECONDS) -> None:
        """The flow has something waiting. `credit`: how far behind the virtual time it begins at
        most.
        """
        if key not in self._tags:
            self._tags[key] = self._begin(key, credit)
            self._away.pop(key, None)

    def _begin(self, key: Key, credit: float) -> float:
        begin = self._virtual - credit
        return max(begin, self._away[key][0]) if key in self._away else begin

    def leave(self, key: Key, now: float) -> None:
        """The flow has nothing waiting any more."""
        self._away[key] = (self._tags.pop(key), now)

    def first(self) -> Key:
        """The least-served waiting flow."""
        return min(self._tags, key=self._tags.__getitem__)

    def next(self) -> Key:
        """As `first`, and advances the virtual time to it: its service begins."""
        key = self.first()
        self._virtual = max(self._virtual, self._tags[key])
        return key

    def charge(self, key: Key, cost: float, now: float) -> None:
        """Charges the flow for service. `cost`: what it got, divided by its weight."""
        if key in self._tags:
            self._tags[key] += cost
        else:
            self._away[key] = (self._away.pop(key, (self._virtual,))[0] + cost, now)

    def forget(self, now: float) -> None:
        """Forgets the flows that left or were served last more than REMEMBERED_SECONDS ago."""
        while self._away:
            oldest = next(iter(self._away))
            if self._away[oldest][1] >= now - REMEMBERED_SECONDS:
                return
            del self._away[oldest]
