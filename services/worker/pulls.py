"""How many pulls to have in flight: decisions only.

On the way of a request before everything else in the worker; `intake.py` acts on what is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PREFETCHED_BATCHES: Final = 2
"""Pull while less than so many batches wait: one is always ready when the device is free, and no work is hoarded."""

LEAD_SECONDS: Final = 0.015
"""How long before the device is free the next work is asked for: a pull and its tokenising take a few milliseconds."""

LaneName = tuple[str, str]
"""Model and adapter; an empty adapter is none."""


@dataclass(frozen=True, slots=True)
class Pull:
    """A pull in flight: the lanes it was sent for, and whether it may be answered with a model to load."""

    lanes: frozenset[LaneName]
    can_load: bool


@dataclass(frozen=True, slots=True)
class Situation:
    """Of the worker now.

    `lanes`: of what is loaded. `waiting_tokens`: pulled, not yet in a forward pass. `busy_seconds`: until the device is free.
    """

    lanes: frozenset[LaneName]
    can_load: bool
    flying: tuple[Pull, ...]
    waiting_tokens: int
    busy_seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Pulls to start now, and after how many seconds to look again even if nothing happens (None: no need)."""

    start: int
    look_again: float | None = None


def plan_pulls(situation: Situation, budget_tokens: int) -> Plan:
    """Each pull asks for up to `budget_tokens`.

    At idle two are in flight, so that one is waiting at the router while the other's job is worked on. While the device is busy and
    something waits already, the next is held back until the device is nearly free: what arrives in between then comes in one answer
    and goes back in one, instead of in many.
    """
    offers = bool(situation.lanes) or situation.can_load
    room = PREFETCHED_BATCHES * budget_tokens - situation.waiting_tokens
    if not offers or room <= 0:
        return Plan(0)
    is_busy = situation.busy_seconds > LEAD_SECONDS
    if is_busy and situation.waiting_tokens > 0:
        return Plan(0, situation.busy_seconds - LEAD_SECONDS)
    unclaimed = -(-room // budget_tokens) - len(situation.flying)
    allowed = (1 if is_busy else 2) - len(situation.flying)
    return Plan(max(min(unclaimed, allowed), 1 if _has_news(situation) else 0))


def _has_news(situation: Situation) -> bool:
    """Whether no pull in flight mentions a model or adapter that was loaded since, or that there is room for one more model."""
    asked = {lane for pull in situation.flying for lane in pull.lanes}
    may_load = any(pull.can_load for pull in situation.flying)
    return bool(situation.lanes - asked) or (situation.can_load and not may_load)
