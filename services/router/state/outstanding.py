"""The work of this router that has no answer yet, in tokens: what quotas and admission control
count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from libs.queue import LaneKey


class Outstanding:
    """Tokens of jobs without an answer, by lane and tenant."""

    def __init__(self) -> None:
        # The state: the sums, without entries of 0; and which of these lanes were opened when no
        # worker knew their model.
        self._tokens: dict[LaneKey, Counter[str]] = {}
        self._unknown: set[LaneKey] = set()

    @property
    def lanes(self) -> Mapping[LaneKey, Mapping[str, int]]:
        """Tokens by lane and tenant; no entry where there are none."""
        return self._tokens

    def unknown(self) -> dict[LaneKey, Mapping[str, int]]:
        """The same, of lanes whose model no worker knew when they were opened."""
        return {lane: self._tokens[lane] for lane in self._unknown}

    def of_tenant(self, tenant: str) -> int:
        """The tenant's tokens in all lanes."""
        return sum(tokens[tenant] for tokens in self._tokens.values() if tenant in tokens)

    def open(self, lane: LaneKey, *, is_unknown: bool) -> None:
        """To be called before a request's first job is added. `is_unknown`: no worker knows the
        lane's model.
        """
        if is_unknown and lane not in self._tokens:
            self._unknown.add(lane)

    def add(self, lane: LaneKey, tenant: str, tokens: int) -> None:
        """Adds a job's tokens; below 0, removes those of an answered or cancelled one."""
        at_lane = self._tokens.setdefault(lane, Counter())
        at_lane[tenant] += tokens
        if not at_lane[tenant]:
            del at_lane[tenant]
            if not at_lane:
                del self._tokens[lane]
                self._unknown.discard(lane)
