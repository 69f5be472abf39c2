"""Choose the models to evict for another one: the hard rules of eviction, above every policy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from libs.eviction.policies import Candidate, Policy

MIN_RESIDENT_SECONDS: Final = 10.0
LOADS_RESIDENT: Final = 3.0
"""Against thrashing, a model stays resident for at least this multiple of its load time, and
MIN_RESIDENT_SECONDS, unless much more work waits for another.
"""
YIELD_FACTOR: Final = 2.0
"""The challenger's waiting work must exceed this multiple of the candidate's, to evict a candidate
that is in use or young.
"""
LAST_COPY_FACTOR: Final = 2.0


@dataclass(frozen=True, slots=True)
class Challenger:
    """The model that needs memory."""

    name: str
    bytes: int
    waiting_seconds: float = 0.0
    """Device time of its waiting work or, if more, the time that requests have waited for it; 0 if
    nothing waits.
    """


def may_yield(candidate: Candidate, challenger: Challenger) -> bool:
    """Return whether the rules allow evicting the candidate for the challenger.

    1. Never if it is pinned, leaving already, or the challenger itself.
    2. If it is busy, young or has waiting work, only for a challenger with much more waiting work.
    3. Otherwise always.
    """
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
    """Choose the cheapest set of candidates to evict so that `needed_bytes` more are free.

    Each is necessary. None: the rules do not allow evicting enough now.
    """
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
    for candidate in reversed(chosen[:]):  # keep the most valuable that is not necessary
        if missing + candidate.bytes <= 0:
            chosen.remove(candidate)
            missing += candidate.bytes
    return chosen


def _value(candidate: Candidate, policy: Policy) -> float:
    value = policy(candidate)
    if candidate.is_last_copy:
        value = value * LAST_COPY_FACTOR if value > 0 else value / LAST_COPY_FACTOR
    return value
