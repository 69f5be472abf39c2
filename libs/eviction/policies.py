"""What a resident model is worth keeping, by three policies of one signature: the model of the lowest value leaves first.

Used by the worker, the scheduler's plan and the simulator alike. How the policies compare on traces: docs/placement.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

RECENT_SECONDS: Final = 5.0
"""Added to the age of the last use, so that two models used within this time are told apart by what they cost, not by when."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A resident model, as policies and rules see it. Times in seconds."""

    name: str
    bytes: int
    """Freed if it leaves."""
    load_seconds: float
    """What bringing it back would take, from where it would go."""
    idle_seconds: float
    """Since its last use."""
    uses: float = 1.0
    """How often it was used since it became resident."""
    floor: float = 0.0
    """The value of the last victim when the candidate was last used: what makes old fame fade in GDSF."""
    pinned: bool = False
    leaving: bool = False
    is_busy: bool = False
    """Jobs of it are leased or in a forward pass."""
    waiting_seconds: float = 0.0
    """How long its waiting work, that in flight included, would keep the device busy."""
    resident_seconds: float = float("inf")
    """Since it became resident."""
    is_last_copy: bool = True
    """No other worker has it resident."""


Policy = Callable[[Candidate], float]
"""What it is worth to keep a candidate; comparable between candidates of one moment only."""


def lru(candidate: Candidate) -> float:
    """The least recently used leaves first."""
    return -candidate.idle_seconds


def gdsf(candidate: Candidate) -> float:
    """GreedyDual-Size with frequency: floor + uses × cost ÷ size (Cherkasova 1998)."""
    return candidate.floor + candidate.uses * candidate.load_seconds / max(candidate.bytes, 1)


def cost_aware(candidate: Candidate) -> float:
    """Seconds of loading saved a byte, for a next use that is the likelier the more there were and the later the last one was.

    Uses count by their logarithm (one 1, three 2, seven 3): a model that many ask for stays longer than one that somebody tried,
    and a single large batch is not taken for fame. How it does without that: docs/placement.md.
    """
    saved = candidate.load_seconds / max(candidate.bytes, 1)
    return saved * math.log2(1.0 + max(candidate.uses, 1.0)) / (candidate.idle_seconds + RECENT_SECONDS)


DEFAULT: Final = "cost"
POLICIES: Final[Mapping[str, Policy]] = MappingProxyType({"cost": cost_aware, "lru": lru, "gdsf": gdsf})
"""By the names that settings take."""
