"""Memory accounting: the use of a fixed-size memory by models, and which models to evict for
another. Decisions only.

Not on the request path: `space.py` keeps a Ledger for the device and `host.py` one for host memory;
both carry out these decisions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from libs.errors import InternalError
from libs.eviction import Candidate, Challenger, Policy, choose_victims, may_yield
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Memory that a model needs: `bytes` always, plus `activation_bytes` while it runs a batch. One
    batch runs at a time.
    """

    bytes: int
    activation_bytes: int = 0


@dataclass(slots=True, eq=False)
class LedgerClaim:
    """A reservation in a Ledger. `is_stuck` marks one that a hanging load holds."""

    name: str
    size: ModelSize
    is_stuck: bool = False


class Ledger:
    """Memory reservations (claims). The sum of their bytes plus the largest of their activations
    never exceeds `limit_bytes`.

    Thread-safe: preparing threads claim memory for decoding.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.RLock()
        # Mutable state, guarded by the lock.
        self._claims: set[LedgerClaim] = set()
        self.peak_bytes = 0
        """The highest memory use so far."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all claims, without activations."""
        with self._lock:
            return sum(claim.size.bytes for claim in self._claims)

    @property
    def free_bytes(self) -> int:
        """The largest claim without activations that would fit."""
        return -self.missing(ModelSize(0))

    @property
    def stuck(self) -> list[LedgerClaim]:
        with self._lock:
            return [claim for claim in self._claims if claim.is_stuck]

    def missing(self, size: ModelSize, without: Collection[LedgerClaim] = ()) -> int:
        """Return the bytes lacking for another claim if those in `without` were released; <= 0 if
        it fits.
        """
        with self._lock:
            sizes = [size, *(claim.size for claim in self._claims if claim not in without)]
        return _total(sizes) - self.limit_bytes

    def claim(self, name: str, size: ModelSize) -> LedgerClaim | None:
        """Add a claim if it fits."""
        with self._lock:
            if self.missing(size) > 0:
                return None
            claim = LedgerClaim(name, size)
            self._claims.add(claim)
            self._check()
            return claim

    def resize(self, claim: LedgerClaim, size: ModelSize) -> bool:
        """Change the claim's size if the new one fits. Return whether it did."""
        with self._lock:
            if self.missing(size, [claim]) > 0:
                return False
            claim.size = size
            self._check()
            return True

    def release(self, claim: LedgerClaim) -> None:
        with self._lock:
            self._claims.remove(claim)

    def _check(self) -> None:
        """Assert the limit at each allocation: an accounting bug must raise here rather than
        exhaust the machine's memory.
        """
        taken = _total([claim.size for claim in self._claims])
        self.peak_bytes = max(self.peak_bytes, taken)
        if taken > self.limit_bytes:
            log.critical(
                "models exceed the memory limit",
                extra=fields({"taken": taken, "limit": self.limit_bytes}),
            )
            raise InternalError(f"models use {taken:,} bytes, limit {self.limit_bytes:,}")


def _total(sizes: Sequence[ModelSize]) -> int:
    return sum(size.bytes for size in sizes) + max(
        (size.activation_bytes for size in sizes), default=0
    )


@dataclass(frozen=True, slots=True)
class Holding:
    """A model in a Ledger."""

    candidate: Candidate
    """The model as eviction policies see it."""
    claim: LedgerClaim
    more_bytes: int = 0
    """Bytes of its adapters' claims, freed with it."""


def victims(
    ledger: Ledger,
    holdings: Collection[Holding],
    size: ModelSize,
    policy: Policy,
    challenger: Challenger,
    own: LedgerClaim | None = None,
) -> list[Candidate] | None:
    """Choose further models to evict so that `size` fits in place of the claim `own`.

    Return [] if the evictions in progress free enough, None if the rules forbid enough evictions
    for now.
    """
    leaving = [one for one in holdings if one.candidate.leaving]
    staying = [one for one in holdings if not one.candidate.leaving]

    def missing(further: Collection[Holding] = ()) -> int:
        """Return the bytes lacking after the evictions in progress and those of `further`."""
        gone = [*leaving, *further]
        claims = [one.claim for one in gone] + ([] if own is None else [own])
        return ledger.missing(size, claims) - sum(one.more_bytes for one in gone)

    if missing() <= 0:
        return []
    # Evicting the model with the largest activations also frees their excess over the second
    # largest.
    freed = [replace(one.candidate, bytes=missing() - missing([one])) for one in staying]
    chosen = choose_victims(freed, missing(), policy, challenger)
    names = (
        {one.name for one in freed if may_yield(one, challenger)}
        if chosen is None
        else {one.name for one in chosen}
    )
    # If models share the largest activations, only evicting all of them frees these. A sum over
    # single models does not show that.
    going = [one for one in staying if one.candidate.name in names]
    if missing(going) > 0:
        return None
    for spared in sorted(
        going, key=lambda one: (one.candidate.is_busy, policy(one.candidate)), reverse=True
    ):
        rest = [one for one in going if one is not spared]
        if missing(rest) <= 0:
            going = rest
    return [one.candidate for one in going]


def never_fits(
    ledger: Ledger,
    staying: Collection[LedgerClaim],
    size: ModelSize,
    own: LedgerClaim | None = None,
    *,
    more_bytes: int = 0,
) -> bool:
    """Return whether `size` can never fit with the pinned models (`staying`), `more_bytes` of their
    adapters, and hanging loads.
    """
    kept = [claim.size for claim in {*staying, *ledger.stuck} if claim is not own]
    return _total([size, *kept]) + more_bytes > ledger.limit_bytes
