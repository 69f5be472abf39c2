"""Who leaves: enough and no more, never against a rule, the same for the same question."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from libs.eviction import POLICIES, Candidate, Challenger, Policy, choose_victims, lru, may_yield

seconds = st.one_of(st.just(0.0), st.floats(0, 100, allow_nan=False))
candidate = st.builds(
    Candidate,
    name=st.text("abcdefgh", min_size=1, max_size=4),
    bytes=st.integers(0, 50),
    load_seconds=seconds,
    idle_seconds=seconds,
    uses=st.integers(0, 9).map(float),
    floor=seconds,
    pinned=st.booleans(),
    leaving=st.booleans(),
    is_busy=st.booleans(),
    waiting_seconds=seconds,
    resident_seconds=seconds,
    is_last_copy=st.booleans(),
)
candidates = st.lists(candidate, max_size=9, unique_by=lambda one: one.name)
challengers = st.builds(
    Challenger,
    name=st.sampled_from(["new", "a"]),
    bytes=st.integers(0, 200),
    waiting_seconds=seconds,
)
policies = st.sampled_from(list(POLICIES.values()))
needs = st.integers(0, 200)
NEW = Challenger("new", 100, waiting_seconds=1.0)


def breaks_a_rule(one: Candidate, challenger: Challenger) -> bool:
    """The hard rules once more, in the words of the design."""
    in_use = one.is_busy or one.waiting_seconds > 0
    young = one.resident_seconds < 10 or one.resident_seconds < 3 * one.load_seconds
    much_more_waits = challenger.waiting_seconds > 2 * one.waiting_seconds
    return (
        one.pinned
        or one.leaving
        or one.name == challenger.name
        or ((in_use or young) and not much_more_waits)
    )


@given(candidates, needs, policies, challengers)
def test_victims_free_enough_and_each_is_necessary(
    candidates: list[Candidate], needed: int, policy: Policy, challenger: Challenger
) -> None:
    victims = choose_victims(candidates, needed, policy, challenger)
    may_go = sum(one.bytes for one in candidates if not breaks_a_rule(one, challenger))
    if victims is None:
        assert may_go < needed
        return
    assert not any(breaks_a_rule(one, challenger) for one in victims)
    freed = sum(one.bytes for one in victims)
    assert freed >= needed
    assert all(freed - one.bytes < needed for one in victims)
    assert len({one.name for one in victims}) == len(victims)
    assert all(one in candidates for one in victims)


@given(candidates, needs, policies, challengers, st.randoms(use_true_random=False))
def test_order_in_which_models_are_named_does_not_matter(
    candidates: list[Candidate],
    needed: int,
    policy: Policy,
    challenger: Challenger,
    chance: random.Random,
) -> None:
    shuffled = chance.sample(candidates, len(candidates))
    assert choose_victims(shuffled, needed, policy, challenger) == choose_victims(
        candidates, needed, policy, challenger
    )


@given(st.lists(candidate, min_size=1, max_size=9, unique_by=lambda one: one.name), policies)
@example([Candidate("a", 10, 1, 1), Candidate("b", 10, 1, 2)], lru)
def test_cheapest_of_equal_size_idle_models_is_evicted(
    candidates: list[Candidate], policy: Policy
) -> None:
    alike = [
        replace(
            one,
            bytes=10,
            pinned=False,
            leaving=False,
            is_busy=False,
            waiting_seconds=0.0,
            is_last_copy=False,
        )
        for one in candidates
    ]
    victims = choose_victims(alike, 10, policy, NEW)
    assert victims is not None
    assert [policy(one) for one in victims] == [min(policy(one) for one in alike)]


def idle(name: str, size: int = 10, age: float = 1.0, **changes: object) -> Candidate:
    return replace(Candidate(name, size, load_seconds=1.0, idle_seconds=age), **changes)  # type: ignore[arg-type]


def chosen(
    candidates: list[Candidate], needed: int, challenger: Challenger = NEW, policy: Policy = lru
) -> list[str] | None:
    victims = choose_victims(candidates, needed, policy, challenger)
    return None if victims is None else [one.name for one in victims]


def test_nothing_is_evicted_with_free_memory() -> None:
    assert chosen([idle("a")], 0) == []
    assert chosen([], -5) == []
    assert chosen([], 1) is None


def test_cheapest_go_first_and_those_not_needed_stay() -> None:
    old, middle, used = idle("old", 2, age=9), idle("middle", 3, age=5), idle("used", 10, age=1)
    assert chosen([used, middle, old], 4) == ["old", "middle"]
    # The two old ones are too small: the big one must go, and then they need not.
    assert chosen([used, middle, old], 10) == ["used"]
    assert chosen([used, middle, old], 11) == ["old", "used"]


def test_pinned_and_leaving_models_and_the_challenger_itself_never_go() -> None:
    for protected in (idle("a", pinned=True), idle("a", leaving=True), idle("new")):
        assert chosen([protected], 1, Challenger("new", 10, waiting_seconds=1e9)) is None


def test_busy_model_yields_only_to_more_than_twice_its_waiting_work() -> None:
    busy = idle("a", is_busy=True, waiting_seconds=4.0)
    assert not may_yield(busy, Challenger("new", 10, waiting_seconds=8.0))
    assert may_yield(busy, Challenger("new", 10, waiting_seconds=8.001))
    backlogged = replace(busy, is_busy=False)
    assert not may_yield(backlogged, Challenger("new", 10, waiting_seconds=8.0))


def test_idle_model_is_evicted_before_cheaper_busy_one() -> None:
    busy = idle("busy", age=100, is_busy=True, waiting_seconds=0.1)
    assert chosen([busy, idle("idle", age=0)], 10) == ["idle"]
    assert chosen([busy, idle("idle", 5, age=0)], 10) == ["busy"]


@pytest.mark.parametrize(("load_seconds", "grown_up"), [(0.5, 10.0), (20.0, 60.0)])
def test_young_model_stays_without_waiting_challenger(load_seconds: float, grown_up: float) -> None:
    young = idle("a", load_seconds=load_seconds, resident_seconds=grown_up - 0.01)
    assert not may_yield(young, Challenger("new", 10))
    assert may_yield(young, Challenger("new", 10, waiting_seconds=0.01))
    assert may_yield(replace(young, resident_seconds=grown_up), Challenger("new", 10))


def test_fifth_busy_model_does_not_starve() -> None:
    """Four busy models fill the device; the fifth's wait grows until it is over twice the work of
    one of them.
    """
    four = [
        idle(name, is_busy=True, waiting_seconds=work)
        for name, work in zip("abcd", (3.0, 0.6, 1.0, 2.0), strict=True)
    ]
    waited = 0.0
    while (victims := chosen(four, 10, Challenger("fifth", 10, waited))) is None:
        waited += 0.1
    assert victims == ["b"]
    assert waited == pytest.approx(1.3)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_last_copy_counts_twice(policy: Policy) -> None:
    surplus, last = replace(idle("surplus", age=10), is_last_copy=False), idle("last", age=14)
    assert chosen([surplus, last], 10, policy=policy) == ["surplus"]
    assert chosen([replace(surplus, is_last_copy=True), last], 10, policy=policy) == ["last"]


def test_last_copy_counts_twice_and_not_more_where_values_are_negative() -> None:
    surplus = replace(idle("surplus", age=10), is_last_copy=False)
    assert chosen([surplus, idle("last", age=19.9)], 10) == ["surplus"]
    assert chosen([surplus, idle("last", age=20.1)], 10) == ["last"]
