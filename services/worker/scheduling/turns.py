"""Who is next of several that share something, by start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): decisions only.

Whoever has had the fewest device seconds for its weight is next. The virtual time is where the one in service stands; who comes
anew begins BURST_SECONDS behind it, and is owed no more for the time it was away.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

BURST_SECONDS: Final = 0.25
"""Of the device, for weight 1: what somebody who has had less than its share gets at once, before those who have had theirs.
Requests come in bunches, also of a client that needs little; sharing evenly with a backlog would double what a bunch takes."""

REMEMBERED_SECONDS: Final = 5.0
"""How long it counts what somebody had who has nothing waiting. That is long against the time in which a busy lane is filled up
again, and bounds what is kept."""

Key = TypeVar("Key", bound=Hashable)


class Turns(Generic[Key]):
    """Who is next of several that share something. A tag is what one has had for its weight; those with equal tags take turns in
    the order in which they came."""

    def __init__(self) -> None:
        self._virtual = 0.0
        # The state: tags of those who wait, in order of arrival; tags of those who do not, and when they were served or left last,
        # in order of that.
        self._tags: dict[Key, float] = {}
        self._away: dict[Key, tuple[float, float]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._tags or key in self._away

    def __len__(self) -> int:
        """How many wait, or did so lately."""
        return len(self._tags) + len(self._away)

    @property
    def anybody(self) -> bool:
        return bool(self._tags)

    def tag(self, key: Key) -> float:
        """Of one who is not known: where it would begin."""
        if key in self._tags:
            return self._tags[key]
        begin = self._virtual - BURST_SECONDS
        return max(begin, self._away[key][0]) if key in self._away else begin

    def come(self, key: Key) -> None:
        """It has something waiting."""
        if key not in self._tags:
            self._tags[key] = self.tag(key)
            self._away.pop(key, None)

    def leave(self, key: Key, now: float) -> None:
        """It has nothing waiting any more."""
        self._away[key] = (self._tags.pop(key), now)

    def first(self) -> Key:
        """Whose turn it is, of those who wait."""
        return min(self._tags, key=self._tags.__getitem__)

    def next(self) -> Key:
        """Whose turn it is; it begins."""
        key = self.first()
        self._virtual = max(self._virtual, self._tags[key])
        return key

    def charge(self, key: Key, cost: float, now: float) -> None:
        """It was served: `cost` is what it got, for its weight."""
        if key in self._tags:
            self._tags[key] += cost
        else:
            self._away[key] = (self._away.pop(key, (self._virtual,))[0] + cost, now)

    def forget(self, now: float) -> None:
        """Those who left long ago."""
        while self._away:
            oldest = next(iter(self._away))
            if self._away[oldest][1] >= now - REMEMBERED_SECONDS:
                return
            del self._away[oldest]
