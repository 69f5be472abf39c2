"""Estimates the cost of a caller's documents from the processor time of its recent ones. Decisions
only.

`preparing.py` charges this estimate in advance, so that a caller with slow pages is served after
others even before its next document is opened.
"""

from __future__ import annotations

import math
from typing import Final

from services.worker.scheduling.batcher import Caller

DEFAULT_PAGE_SECONDS: Final = 0.05
"""Default processor time of a page: an A4 page of text at 144 dots per inch."""

MAX_PAGE_SECONDS: Final = 20.0
"""Maximum expected cost of a page. Opening a document and drawing a page may take 10 s each."""

NEW_SHARE: Final = 0.5
"""Weight of the last document against those before it."""

HALF_LIFE_SECONDS: Final = 30.0
"""Half-life of a caller's excess over DEFAULT_PAGE_SECONDS while it sends no documents."""

MAX_REMEMBERED_CALLERS: Final = 1024
"""Maximum number of remembered callers. The one that has been silent longest is forgotten."""


class DocumentCosts:
    """Processor seconds of a page, by caller. `now` is in seconds of any monotonic clock."""

    def __init__(self) -> None:
        # Mutable state: seconds per page and when they were recorded, most recent caller last.
        self._known: dict[Caller, tuple[float, float]] = {}

    def expected_seconds(self, caller: Caller, pages: int, now: float) -> float:
        """Return the processor seconds that a document of `pages` pages of this caller should
        take.
        """
        return pages * self._page_seconds(caller, now)

    def record(self, caller: Caller, pages: int, seconds: float, now: float) -> None:
        """Add a measurement: `seconds` of processor time for a document of at least one page."""
        measured = min(seconds / pages, MAX_PAGE_SECONDS)
        mean = (1 - NEW_SHARE) * self._page_seconds(caller, now) + NEW_SHARE * measured
        self._known.pop(caller, None)
        self._known[caller] = mean, now
        if len(self._known) > MAX_REMEMBERED_CALLERS:
            del self._known[next(iter(self._known))]

    def _page_seconds(self, caller: Caller, now: float) -> float:
        if caller not in self._known:
            return DEFAULT_PAGE_SECONDS
        seconds, since = self._known[caller]
        return DEFAULT_PAGE_SECONDS + (seconds - DEFAULT_PAGE_SECONDS) * math.pow(
            0.5, (now - since) / HALF_LIFE_SECONDS
        )
