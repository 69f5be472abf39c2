"""Each policy's order on cases worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from libs.eviction import DEFAULT, POLICIES, Candidate, Policy, cost_aware, gdsf, lru


def model(
    name: str,
    size: int = 100,
    load_seconds: float = 1.0,
    idle_seconds: float = 0.0,
    uses: float = 1.0,
    floor: float = 0.0,
) -> Candidate:
    return Candidate(name, size, load_seconds, idle_seconds, uses, floor)


def leaving_order(policy: Policy, candidates: Sequence[Candidate]) -> list[str]:
    return [one.name for one in sorted(candidates, key=policy)]


def test_lru_looks_at_the_last_use_and_at_nothing_else() -> None:
    candidates = [
        model("new", size=1000, load_seconds=0.1, idle_seconds=1),
        model("old", size=1, load_seconds=100, idle_seconds=9, uses=50),
        model("middle", idle_seconds=3),
    ]
    assert leaving_order(lru, candidates) == ["old", "middle", "new"]


def test_cost_weighs_the_benefit_of_a_byte_by_the_time_since_its_use() -> None:
    """The values after one use are load seconds ÷ bytes ÷ (idle + 5): 1/100/5 = 0.002, 1/10/45 =
    0.00222, 4/100/15 = 0.00267, 2/100/5 = 0.004.
    """
    candidates = [
        model("dear", load_seconds=2.0),
        model("dearer but older", load_seconds=4.0, idle_seconds=10),
        model("cheap", load_seconds=1.0),
        model("small but long idle", size=10, idle_seconds=40),
    ]
    assert leaving_order(cost_aware, candidates) == [
        "cheap",
        "small but long idle",
        "dearer but older",
        "dear",
    ]


def test_cost_policy_keeps_expensive_older_model() -> None:
    dear, cheap = (
        model("dear", load_seconds=15, idle_seconds=20),
        model("cheap", load_seconds=2, idle_seconds=10),
    )
    assert leaving_order(cost_aware, [dear, cheap]) == ["cheap", "dear"]
    assert leaving_order(lru, [dear, cheap]) == ["dear", "cheap"]


def test_cost_counts_uses_by_their_logarithm() -> None:
    """Three uses weigh twice as much as one, seven thrice: they make up for twice or thrice the
    age, and not for more.
    """
    for uses, factor in ((3, 2.0), (7, 3.0)):
        assert cost_aware(model("often", uses=uses)) == pytest.approx(
            factor * cost_aware(model("once"))
        )
    once = model("once", idle_seconds=0)
    assert leaving_order(cost_aware, [once, model("often", uses=3, idle_seconds=4)]) == [
        "once",
        "often",
    ]
    assert leaving_order(cost_aware, [once, model("often", uses=3, idle_seconds=6)]) == [
        "often",
        "once",
    ]


def test_gdsf_is_floor_and_uses_by_cost_over_size() -> None:
    assert gdsf(model("a", size=200, load_seconds=4, uses=3, floor=0.5)) == 0.5 + 3 * 4 / 200
    often, once = model("often", uses=10), model("once", uses=1)
    assert leaving_order(gdsf, [often, once]) == ["once", "often"]


def test_gdsf_floor_ages_old_uses() -> None:
    """The famous one has not been used since the floor was 0; it leaves once victims of its worth
    have raised the floor above.
    """
    famous = model("famous", load_seconds=1, uses=50)
    assert leaving_order(gdsf, [famous, model("new", floor=0.48)]) == ["new", "famous"]
    assert leaving_order(gdsf, [famous, model("new", floor=0.5)]) == ["famous", "new"]


def test_models_of_no_bytes_and_no_cost_have_a_value() -> None:
    for policy in POLICIES.values():
        assert policy(Candidate("empty", 0, 0.0, 0.0)) == pytest.approx(0.0)


def test_default_is_cost_aware() -> None:
    assert POLICIES[DEFAULT] is cost_aware
