"""Rules: the graphs that a model keeps, and when all of them are dropped so others can be captured.

The graphs of a model share their memory, so dropping one of them would free next to nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

STALE_FORWARDS: Final = 1000
"""A graph is stale if this many forwards did not use it."""

MAX_BYTES: Final = 1 << 30
"""Maximum device memory of one model's graphs."""

_Graph = TypeVar("_Graph")


@dataclass(slots=True)
class GraphEntry(Generic[_Graph]):
    """A graph.

    Attributes:
        used_at: Number of the last forward that used it.
        uses: Number of forwards that used it.
    """

    graph: _Graph
    used_at: int
    uses: int = 0


class GraphStore(Generic[_Graph]):
    """Keeps at most `most` graphs. `now` in all methods: the number of the current forward."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: dict[Hashable, GraphEntry[_Graph]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    @property
    def is_full(self) -> bool:
        return len(self._entries) >= self._most

    def use(self, key: Hashable, now: int) -> GraphEntry[_Graph] | None:
        """Return the graph of this key and mark it as used, or None."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.used_at, entry.uses = now, entry.uses + 1
        return entry

    def is_stale(self, now: int) -> bool:
        """Return whether at least half of the graphs are stale: the shapes of batches have changed,
        so capturing again is worthwhile.
        """
        stale = sum(now - entry.used_at >= STALE_FORWARDS for entry in self._entries.values())
        return 0 < len(self._entries) <= 2 * stale

    def add(self, key: Hashable, graph: _Graph, now: int) -> None:
        self._entries[key] = GraphEntry(graph, now)

    def clear(self) -> None:
        self._entries.clear()
