"""Chooses the models to evict for another one: the hard rules of eviction, above every policy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from libs.eviction.policies import Candidate, Policy

MIN_RESIDENT_SECONDS: Final = 10.0
LOADS_RESIDENT: Final = 3.0
"""Against thrashing, a model stays resident for so many times its load time, and
MIN_RESIDENT_SECONDS, at least, unless much more work waits for another."""
YIELD_FACTOR: Final = 2.0
"""The challenger's waiting work must exceed so many times the candidate's, to evict a candidate
that is in use or young.
"""
LAST_COPY_FACTOR: Final = 2.0


@dataclass(frozen=True, slots=True)
class Challenger:
    """The model that needs room.

    `waiting_seconds`: how long its waiting work would keep the device busy, or for how long
    requests have waited for it, whichever is more; 0 if nothing waits.
    """

    name: str
    bytes: int
    waiting_seconds: float = 0.0


def may_yield(candidate: Candidate, challenger: Challenger) -> bool:
    """Whether the rules allow evicting the candidate for the challenger. Never if it is pinned,
    leaving already, or the challenger itself; if it is busy, young or has waiting work, only for a
    challenger with much more waiting work."""
    if candidate.pinned or candidate.leaving or candidate.name == challenger.name:
        return False
    is_young = candidate.resident_seconds < max(
        MIN_RESIDENT_SECONDS, LOADS_RESIDENT * candidate.load_seconds
    )
    if candidate.is_busy or candidate.waiting_seconds > 0 or is_young:
        return challenger.waiting_seconds > YIELD_FACTOR * candidate.waiting_seconds
    return True


def choose_victims(
    candidates: Collection[Candidate], needed_bytes: int, policy: Policy, challenger: Challenger
) -> list[Candidate] | None:
    """The candidates to evict so that `needed_bytes` more are free, cheapest first; none of them
    could be spared. None: the rules allow evicting too few now."""
    evictable = [one for one in candidates if may_yield(one, challenger)]
    # An idle model is evicted before one in use, whatever its value.
    ordered = sorted(
        evictable,
        key=lambda one: (one.is_busy or one.waiting_seconds > 0, _value(one, policy), one.name),
    )
    chosen: list[Candidate] = []
    missing = needed_bytes
    for candidate in ordered:
        if missing <= 0:
            break
        chosen.append(candidate)
        missing -= candidate.bytes
    if missing > 0:
        return None
    for candidate in reversed(chosen[:]):  # spares the most valuable first
        if missing + candidate.bytes <= 0:
            chosen.remove(candidate)
            missing += candidate.bytes
    return chosen


def _value(candidate: Candidate, policy: Policy) -> float:
    value = policy(candidate)
    if candidate.is_last_copy:
        value = value * LAST_COPY_FACTOR if value > 0 else value / LAST_COPY_FACTOR
    return value
