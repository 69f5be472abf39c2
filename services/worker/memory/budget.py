"""What models take of a memory of fixed size, and who goes when a further one wants in: accounting and decisions only.

Beside the way of a request: `space.py` keeps one Ledger for the device and one for warm models in host memory, and does what is
decided here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from libs.errors import InternalError
from libs.eviction import Candidate, Challenger, Policy, choose_victims, may_yield
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

UNMEASURED_TOKENS_PER_SECOND: Final = 2000.0
"""Of a model that has not run yet: a small encoder on one slow core."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of a model: `bytes` all the time, `activation_bytes` more while a batch of it runs. One batch runs at a time."""

    bytes: int
    activation_bytes: int = 0


@dataclass(slots=True, eq=False)
class Claim:
    """A part of a Ledger's memory that is taken. `is_stuck`: by a load that hangs, nobody knows until when."""

    name: str
    size: Size
    is_stuck: bool = False


class Ledger:
    """Claims on `limit_bytes`, which they never exceed: the sum of their bytes and the largest of their activations."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        # Mutable state.
        self._claims: set[Claim] = set()
        self.peak_bytes = 0
        """The most that was ever taken."""

    @property
    def used_bytes(self) -> int:
        """Of all claims, activations aside."""
        return sum(claim.size.bytes for claim in self._claims)

    @property
    def free_bytes(self) -> int:
        """What a claim without activations may take."""
        return -self.missing(Size(0))

    @property
    def stuck(self) -> list[Claim]:
        return [claim for claim in self._claims if claim.is_stuck]

    def missing(self, size: Size, without: Collection[Claim] = ()) -> int:
        """How many bytes are lacking for a further claim, if some were given up; 0 or less: it fits."""
        sizes = [size, *(claim.size for claim in self._claims if claim not in without)]
        return _total(sizes) - self.limit_bytes

    def claim(self, name: str, size: Size) -> Claim | None:
        """A new claim, if it fits."""
        if self.missing(size) > 0:
            return None
        claim = Claim(name, size)
        self._claims.add(claim)
        self._check()
        return claim

    def resize(self, claim: Claim, size: Size) -> bool:
        """Whether the claim could be changed."""
        if self.missing(size, [claim]) > 0:
            return False
        claim.size = size
        self._check()
        return True

    def release(self, claim: Claim) -> None:
        self._claims.remove(claim)

    def _check(self) -> None:
        """At each allocation: what can only be a bug of ours must not become a machine that is out of memory."""
        taken = _total([claim.size for claim in self._claims])
        self.peak_bytes = max(self.peak_bytes, taken)
        if taken > self.limit_bytes:
            log.critical("memory is overcommitted", extra=fields({"taken": taken, "limit": self.limit_bytes}))
            raise InternalError(f"models take {taken:,} bytes of {self.limit_bytes:,}")


def _total(sizes: Sequence[Size]) -> int:
    return sum(size.bytes for size in sizes) + max((size.activation_bytes for size in sizes), default=0)


@dataclass(frozen=True, slots=True)
class Holding:
    """A model in a Ledger: what policies see of it, its claim, and the bytes of claims that go with it (its adapters')."""

    candidate: Candidate
    claim: Claim
    more_bytes: int = 0


def victims(
    ledger: Ledger,
    holdings: Collection[Holding],
    size: Size,
    policy: Policy,
    challenger: Challenger,
    own: Claim | None = None,
) -> list[Candidate] | None:
    """Who must leave so that `size` fits, in the place of `own`, once those that leave already have gone; [] if that is enough.
    None: the rules let too few leave, for now."""
    leaving = [one for one in holdings if one.candidate.leaving]
    staying = [one for one in holdings if not one.candidate.leaving]

    def missing(further: Collection[Holding] = ()) -> int:
        """Once those that leave and further ones have gone."""
        gone = [*leaving, *further]
        claims = [one.claim for one in gone] + ([] if own is None else [own])
        return ledger.missing(size, claims) - sum(one.more_bytes for one in gone)

    if missing() <= 0:
        return []
    # The model with the largest activations frees their excess over the next one's, too.
    freed = [replace(one.candidate, bytes=missing() - missing([one])) for one in staying]
    chosen = choose_victims(freed, missing(), policy, challenger)
    names = {one.name for one in freed if may_yield(one, challenger)} if chosen is None else {one.name for one in chosen}
    # Models whose activations are of the same size free these only if all of them leave, which no sum of single ones tells.
    going = [one for one in staying if one.candidate.name in names]
    if missing(going) > 0:
        return None
    for spared in sorted(going, key=lambda one: (one.candidate.is_busy, policy(one.candidate)), reverse=True):
        rest = [one for one in going if one is not spared]
        if missing(rest) <= 0:
            going = rest
    return [one.candidate for one in going]


def never_fits(ledger: Ledger, staying: Collection[Claim], size: Size, own: Claim | None = None, *, more_bytes: int = 0) -> bool:
    """Whether `size` does not even fit beside what nothing makes go: pinned models, `more_bytes` with them, and loads that hang."""
    kept = [claim.size for claim in {*staying, *ledger.stuck} if claim is not own]
    return _total([size, *kept]) + more_bytes > ledger.limit_bytes


def seconds_of(tokens: float, tokens_per_second: float) -> float:
    """How long a device works on so many tokens."""
    return tokens / (tokens_per_second or UNMEASURED_TOKENS_PER_SECOND)
