"""This router's unanswered work in tokens, which quotas and admission control count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from libs.queue import LaneKey


class Outstanding:
    """Tokens of jobs without an answer, by lane and tenant."""

    def __init__(self) -> None:
        # The state: the sums, without entries of 0; lanes that were opened when no worker knew
        # their model.
        self._tokens: dict[LaneKey, Counter[str]] = {}
        self._unknown: set[LaneKey] = set()

    @property
    def lanes(self) -> Mapping[LaneKey, Mapping[str, int]]:
        """Return tokens by lane and tenant, without entries of 0."""
        return self._tokens

    def unknown(self) -> dict[LaneKey, Mapping[str, int]]:
        """Return `lanes` limited to those opened when no worker knew their model."""
        return {lane: self._tokens[lane] for lane in self._unknown}

    def tenant_tokens(self, tenant: str) -> int:
        """Return the tenant's tokens in all lanes."""
        return sum(tokens[tenant] for tokens in self._tokens.values() if tenant in tokens)

    def open(self, lane: LaneKey, *, is_unknown: bool) -> None:
        """Open a lane; call before a request's first job is added.

        Args:
            is_unknown: No worker knows the lane's model.
        """
        if is_unknown and lane not in self._tokens:
            self._unknown.add(lane)

    def add(self, lane: LaneKey, tenant: str, tokens: int) -> None:
        """Add a job's tokens; a negative number removes those of an answered or cancelled job."""
        at_lane = self._tokens.setdefault(lane, Counter())
        at_lane[tenant] += tokens
        if not at_lane[tenant]:
            del at_lane[tenant]
            if not at_lane:
                del self._tokens[lane]
                self._unknown.discard(lane)
