"""Claims on a memory of fixed size, and evictions for a new claim."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.errors import InternalError
from libs.eviction import Candidate, Challenger, lru
from services.worker.memory.budget import (
    Holding,
    Ledger,
    LedgerClaim,
    ModelSize,
    never_fits,
    victims,
)

HURRY = Challenger("new", 0, waiting_seconds=1e9)


def ledger(limit: int, *sizes: ModelSize) -> tuple[Ledger, list[Holding]]:
    """Return a ledger with idle models of these sizes, the first idle for the longest."""
    made = Ledger(limit)
    holdings = []
    for number, size in enumerate(sizes):
        claim = made.claim(f"m{number}", size)
        assert claim is not None
        holdings.append(
            Holding(Candidate(f"m{number}", size.bytes, 1.0, idle_seconds=100.0 - number), claim)
        )
    return made, holdings


def names(chosen: list[Candidate] | None) -> list[str] | None:
    return None if chosen is None else sorted(one.name for one in chosen)


def test_activations_are_reserved_once_for_all_models() -> None:
    made = Ledger(100)
    first = made.claim("a", ModelSize(30, 20))
    assert first is not None
    assert made.claim("b", ModelSize(51, 10)) is None, "30 + 51 + 20"
    second = made.claim("b", ModelSize(50, 10))
    assert second is not None
    assert (made.used_bytes, made.free_bytes, made.peak_bytes) == (80, 0, 100)
    assert not made.resize(second, ModelSize(50, 21))
    made.release(first)
    assert made.resize(second, ModelSize(50, 50))
    assert (made.used_bytes, made.free_bytes, made.peak_bytes) == (50, 0, 100)


def test_claim_beyond_the_limit_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = Ledger(100)
    monkeypatch.setattr(made, "missing", lambda size, without=(): 0)  # simulates a bug
    assert made.claim("a", ModelSize(60, 40)) is not None
    with pytest.raises(InternalError, match="101 bytes, limit 100"):
        made.claim("b", ModelSize(1))
    assert caplog.records[-1].levelname == "CRITICAL"


def test_only_the_needed_least_recently_used_models_are_evicted() -> None:
    made, holdings = ledger(100, ModelSize(10), ModelSize(60), ModelSize(30))
    assert names(victims(made, holdings, ModelSize(10), lru, HURRY)) == ["m0"]
    assert names(victims(made, holdings, ModelSize(50), lru, HURRY)) == ["m1"], (
        "m0 alone is too little, and with m1 not needed"
    )
    assert names(victims(made, holdings, ModelSize(100), lru, HURRY)) == ["m0", "m1", "m2"]
    assert victims(made, holdings, ModelSize(101), lru, HURRY) is None
    assert victims(made, holdings, ModelSize(20), lru, HURRY, own=holdings[0].claim) is not None


def test_evictions_in_progress_are_counted() -> None:
    made, holdings = ledger(100, ModelSize(50), ModelSize(50))
    leaving = Holding(Candidate("m0", 50, 1.0, 1.0, leaving=True), holdings[0].claim)
    assert victims(made, [leaving, holdings[1]], ModelSize(50), lru, HURRY) == []
    assert names(victims(made, [leaving, holdings[1]], ModelSize(51), lru, HURRY)) == ["m1"]


def test_evicting_the_largest_activations_frees_them() -> None:
    made, holdings = ledger(100, ModelSize(20, 0), ModelSize(30, 50))
    assert names(victims(made, holdings, ModelSize(70, 10), lru, HURRY)) == ["m1"], (
        "30 of weights and 40 of activations"
    )


def test_shared_activations_are_free_when_both_models_are_evicted() -> None:
    made, holdings = ledger(100, ModelSize(10, 50), ModelSize(10, 50), ModelSize(10))
    assert names(victims(made, holdings, ModelSize(60, 10), lru, HURRY)) == ["m0", "m1"]
    made, holdings = ledger(115, ModelSize(10, 50), ModelSize(10, 50), ModelSize(45))
    assert names(victims(made, holdings, ModelSize(60, 10), lru, HURRY)) == ["m0", "m1"], (
        "as much as all three by themselves"
    )


def test_adapters_are_freed_with_their_model() -> None:
    made, holdings = ledger(100, ModelSize(30), ModelSize(30))
    for holding in holdings:
        assert made.claim(f"{holding.claim.name} + adapter", ModelSize(20)) is not None
    with_adapters = [Holding(one.candidate, one.claim, 20) for one in holdings]
    assert names(victims(made, with_adapters, ModelSize(50), lru, HURRY)) == ["m0"]
    assert names(victims(made, with_adapters, ModelSize(51), lru, HURRY)) == ["m0", "m1"]
    assert not never_fits(made, [holdings[0].claim], ModelSize(50), more_bytes=20)
    assert never_fits(made, [holdings[0].claim], ModelSize(51), more_bytes=20)


def test_pinned_memory_decides_whether_a_model_can_ever_fit() -> None:
    made, holdings = ledger(100, ModelSize(40, 30), ModelSize(20))
    pinned = holdings[0].claim
    assert not never_fits(made, [pinned], ModelSize(30, 30))
    assert never_fits(made, [pinned], ModelSize(31, 30))
    assert not never_fits(made, [pinned], ModelSize(100), own=pinned)
    holdings[1].claim.is_stuck = True
    assert never_fits(made, [pinned], ModelSize(30, 30))


SIZES = st.builds(ModelSize, st.integers(0, 40), st.integers(0, 40))


@settings(max_examples=150, deadline=None)
@given(st.lists(SIZES, max_size=6), st.integers(20, 150), SIZES, st.data())
def test_victims_are_sufficient_and_each_is_necessary(
    sizes: list[ModelSize], limit: int, size: ModelSize, data: st.DataObject
) -> None:
    made = Ledger(limit)
    holdings = []
    for number, one in enumerate(sizes):
        claim = made.claim(f"m{number}", one)
        if claim is not None:
            candidate = Candidate(
                f"m{number}",
                one.bytes,
                1.0,
                data.draw(st.floats(0, 100)),
                pinned=data.draw(st.booleans()),
                leaving=data.draw(st.booleans()),
            )
            holdings.append(Holding(candidate, claim))
    going: list[LedgerClaim] = [one.claim for one in holdings if one.candidate.leaving]
    free = [one.claim for one in holdings if not (one.candidate.leaving or one.candidate.pinned)]
    chosen = victims(made, holdings, size, lru, HURRY)
    assert (chosen is None) == (made.missing(size, [*going, *free]) > 0)
    if chosen is not None:
        claims = [
            one.claim for one in holdings if one.candidate.name in {name.name for name in chosen}
        ]
        assert not any(one.pinned or one.leaving for one in chosen)
        assert made.missing(size, [*going, *claims]) <= 0
        for spared in claims:
            assert (
                made.missing(size, [*going, *(claim for claim in claims if claim is not spared)])
                > 0
            )
