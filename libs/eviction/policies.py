"""Three eviction policies with one signature: the value of keeping a resident model. The model with
the lowest value is evicted first.

Used by the worker, the scheduler's plan and the simulator. docs/placement.md compares the policies
on traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

AGE_OFFSET_SECONDS: Final = 5.0
"""Added to the age of the last use, so that models used within this time are ranked by cost, not
recency.
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A resident model, as input of policies and rules. Times in seconds."""

    name: str
    bytes: int
    """Freed by its eviction."""
    load_seconds: float
    """Time to load it again from the tier to which it is evicted."""
    idle_seconds: float
    """Time since its last use."""
    uses: float = 1.0
    """Number of uses since it became resident."""
    floor: float = 0.0
    """The value of the last victim when the candidate was last used: the ageing term of GDSF."""
    pinned: bool = False
    leaving: bool = False
    is_busy: bool = False
    """Jobs of it are leased or in a forward pass."""
    waiting_seconds: float = 0.0
    """Device time of its work, waiting and in flight."""
    resident_seconds: float = float("inf")
    """Time since it became resident."""
    is_last_copy: bool = True
    """No other worker has it resident."""


Policy = Callable[[Candidate], float]
"""The value of keeping a candidate; comparable only between candidates at the same moment."""


def lru(candidate: Candidate) -> float:
    """Evict the least recently used first."""
    return -candidate.idle_seconds


def gdsf(candidate: Candidate) -> float:
    """GreedyDual-Size with frequency: floor + uses × cost ÷ size (Cherkasova 1998)."""
    return candidate.floor + candidate.uses * candidate.load_seconds / max(candidate.bytes, 1)


def cost_aware(candidate: Candidate) -> float:
    """Return the seconds of loading saved per byte, times the likelihood of the next use, by
    frequency and recency.

    Uses count by their logarithm (one 1, three 2, seven 3): a popular model stays longer than one
    that was tried once, and a single large batch does not count as popularity. docs/placement.md
    has the results without that.
    """
    saved = candidate.load_seconds / max(candidate.bytes, 1)
    return (
        saved
        * math.log2(1.0 + max(candidate.uses, 1.0))
        / (candidate.idle_seconds + AGE_OFFSET_SECONDS)
    )


DEFAULT: Final = "cost"
POLICIES: Final[Mapping[str, Policy]] = MappingProxyType(
    {"cost": cost_aware, "lru": lru, "gdsf": gdsf}
)
"""Policies by their names in settings."""
