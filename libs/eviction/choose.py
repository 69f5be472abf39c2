"""Which models make room for another one: the hard rules of eviction, above every policy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from libs.eviction.policies import Candidate, Policy

MIN_RESIDENT_SECONDS: Final = 10.0
LOADS_RESIDENT: Final = 3.0
"""A model stays so many times its load time at least, and MIN_RESIDENT_SECONDS, unless much more work waits for another."""
YIELD_FACTOR: Final = 2.0
"""How many times a candidate's waiting work the challenger's must be, for a candidate in use or young to yield."""
LAST_COPY_FACTOR: Final = 2.0


@dataclass(frozen=True, slots=True)
class Challenger:
    """The model that needs room.

    `waiting_seconds`: how long its waiting work would keep the device busy, or how long it has been asked for, whichever is more;
    0 if nobody waits for it.
    """

    name: str
    bytes: int
    waiting_seconds: float = 0.0


def may_yield(candidate: Candidate, challenger: Challenger) -> bool:
    """Whether the rules let the candidate leave for the challenger: never a pinned one; one that is busy, has work waiting or is
    young only for much more waiting work; none for itself, when it needs more room."""
    if candidate.pinned or candidate.leaving or candidate.name == challenger.name:
        return False
    is_young = candidate.resident_seconds < max(MIN_RESIDENT_SECONDS, LOADS_RESIDENT * candidate.load_seconds)
    if candidate.is_busy or candidate.waiting_seconds > 0 or is_young:
        return challenger.waiting_seconds > YIELD_FACTOR * candidate.waiting_seconds
    return True


def choose_victims(
    candidates: Collection[Candidate], needed_bytes: int, policy: Policy, challenger: Challenger
) -> list[Candidate] | None:
    """The candidates to evict so that `needed_bytes` more are free, cheapest first; no one of them could be spared. None: the rules
    let too few leave, for now."""
    free_to_go = [one for one in candidates if may_yield(one, challenger)]
    # An idle model goes before one in use, whatever it is worth.
    ordered = sorted(free_to_go, key=lambda one: (one.is_busy or one.waiting_seconds > 0, _value(one, policy), one.name))
    chosen: list[Candidate] = []
    missing = needed_bytes
    for candidate in ordered:
        if missing <= 0:
            break
        chosen.append(candidate)
        missing -= candidate.bytes
    if missing > 0:
        return None
    for candidate in reversed(chosen[:]):  # the dearest first
        if missing + candidate.bytes <= 0:
            chosen.remove(candidate)
            missing += candidate.bytes
    return chosen


def _value(candidate: Candidate, policy: Policy) -> float:
    value = policy(candidate)
    if candidate.is_last_copy:
        value = value * LAST_COPY_FACTOR if value > 0 else value / LAST_COPY_FACTOR
    return value
