"""What a caller's documents are expected to cost, by pages and by the processor time of its last
ones: decisions only.

`preparing.py` charges a caller in advance with it, so that a caller whose pages have been slow is
served after one whose pages are not, although none of the documents that wait was opened yet.
"""

from __future__ import annotations

import math
from typing import Final

from services.worker.scheduling.batcher import Caller

PAGE_SECONDS: Final = 0.05
"""Processor time of a page of a caller that has sent none recently: an A4 page of text at 144 dots
per inch.
"""

MAX_PAGE_SECONDS: Final = 20.0
"""The most that a page is expected to cost: opening a document and drawing a page may take 10 s
each.
"""

NEW_SHARE: Final = 0.5
"""Weight of the last document against those before it."""

HALF_LIFE_SECONDS: Final = 30.0
"""After so long without a document, a caller's excess over PAGE_SECONDS counts half."""

MAX_CALLERS: Final = 1024
"""Callers that are remembered; the one that sent no document for the longest time is forgotten."""


class DocumentCosts:
    """Processor seconds of a page, by caller. `now`: seconds of any monotonic clock."""

    def __init__(self) -> None:
        # Mutable state: seconds a page and when they were recorded, the caller that was recorded
        # last at the end.
        self._known: dict[Caller, tuple[float, float]] = {}

    def expected_seconds(self, caller: Caller, pages: int, now: float) -> float:
        """Processor seconds that a document of `pages` pages of this caller is expected to take."""
        return pages * self._page_seconds(caller, now)

    def record(self, caller: Caller, pages: int, seconds: float, now: float) -> None:
        """Adds a measurement: a document of at least one page that took `seconds` of processor
        time.
        """
        measured = min(seconds / pages, MAX_PAGE_SECONDS)
        mean = (1 - NEW_SHARE) * self._page_seconds(caller, now) + NEW_SHARE * measured
        self._known.pop(caller, None)
        self._known[caller] = mean, now
        if len(self._known) > MAX_CALLERS:
            del self._known[next(iter(self._known))]

    def _page_seconds(self, caller: Caller, now: float) -> float:
        if caller not in self._known:
            return PAGE_SECONDS
        seconds, since = self._known[caller]
        return PAGE_SECONDS + (seconds - PAGE_SECONDS) * math.pow(
            0.5, (now - since) / HALF_LIFE_SECONDS
        )
