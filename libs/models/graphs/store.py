"""The graphs that a model keeps: bounded in number and bytes, the least recently used dropped first. Decisions only."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

STALE: Final = 1000
"""A graph that was used within so many forwards is not dropped for another: shapes that take turns would be captured forever."""

MOST_BYTES: Final = 1 << 30
"""Of one model's graphs."""


class HasBytes(Protocol):
    @property
    def bytes(self) -> int:
        """Device memory that it takes."""


_Graph = TypeVar("_Graph", bound=HasBytes)


@dataclass(slots=True)
class Entry(Generic[_Graph]):
    """A graph. `used_at`: the number of the forward that used it last. `uses`: how many did."""

    graph: _Graph
    used_at: int
    uses: int = 0


class GraphStore(Generic[_Graph]):
    """`now` in all methods: the number of the present forward."""

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._entries: dict[Hashable, Entry[_Graph]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        return sum(entry.graph.bytes for entry in self._entries.values())

    def use(self, key: Hashable, now: int) -> Entry[_Graph] | None:
        """The graph of this key, if there is one, which counts as used."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.used_at, entry.uses = now, entry.uses + 1
        return entry

    def make_room(self, size: int, now: int) -> bool:
        """Drops stale graphs until one more of `size` bytes fits. False, and nothing is dropped, if it would not even then."""
        ordered = sorted(self._entries, key=lambda key: self._entries[key].used_at)
        count, taken, victims = len(ordered), self.bytes, 0
        while count >= self._most or taken + size > self._most_bytes:
            if victims == len(ordered) or now - self._entries[ordered[victims]].used_at < STALE:
                return False
            taken -= self._entries[ordered[victims]].graph.bytes
            count, victims = count - 1, victims + 1
        for key in ordered[:victims]:
            del self._entries[key]
        return True

    def add(self, key: Hashable, graph: _Graph, now: int) -> None:
        self._entries[key] = Entry(graph, now)

    def clear(self) -> None:
        self._entries.clear()
