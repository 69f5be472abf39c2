"""How many pulls fly, by what the worker is doing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.pulls import LEAD_SECONDS, LaneName, Plan, Pull, Situation, plan_pulls

A = frozenset({("org/a", "")})
BUDGET = 1000


def situation(
    lanes: frozenset[LaneName] = A, can_load: bool = False, flying: int = 0, waiting_tokens: int = 0, busy_seconds: float = 0.0
) -> Situation:
    return Situation(lanes, can_load, (Pull(lanes, can_load),) * flying, waiting_tokens, busy_seconds)


def test_an_idle_worker_keeps_two_pulls_in_flight() -> None:
    assert plan_pulls(situation(), BUDGET).start == 2
    assert plan_pulls(situation(flying=1), BUDGET).start == 1
    assert plan_pulls(situation(flying=2), BUDGET).start == 0


def test_a_worker_without_models_pulls_only_if_it_may_load_one() -> None:
    assert plan_pulls(situation(lanes=frozenset()), BUDGET).start == 0
    assert plan_pulls(situation(lanes=frozenset(), can_load=True), BUDGET).start == 2


def test_a_busy_worker_looks_one_batch_ahead_and_no_further() -> None:
    assert plan_pulls(situation(busy_seconds=1.0), BUDGET).start == 1
    assert plan_pulls(situation(busy_seconds=1.0, flying=1), BUDGET).start == 0
    assert plan_pulls(situation(waiting_tokens=2 * BUDGET), BUDGET) == Plan(0)


def test_the_next_pull_is_held_back_until_the_device_is_nearly_free() -> None:
    plan = plan_pulls(situation(waiting_tokens=10, busy_seconds=1.0), BUDGET)
    assert plan == Plan(0, 1.0 - LEAD_SECONDS)
    assert plan_pulls(situation(waiting_tokens=10, busy_seconds=LEAD_SECONDS), BUDGET).start == 2


def test_news_is_told_at_once() -> None:
    flying = (Pull(A, False), Pull(A, False))
    assert plan_pulls(Situation(A | {("org/b", "")}, False, flying, 0, 0.0), BUDGET).start == 1
    assert plan_pulls(Situation(A | {("org/a", "org/adapter")}, False, flying, 0, 0.0), BUDGET).start == 1
    assert plan_pulls(Situation(A, True, flying, 0, 0.0), BUDGET).start == 1


@given(st.integers(0, 5000), st.integers(0, 4), st.floats(0, 3))
def test_no_work_is_hoarded(waiting_tokens: int, flying: int, busy_seconds: float) -> None:
    plan = plan_pulls(situation(flying=flying, waiting_tokens=waiting_tokens, busy_seconds=busy_seconds), BUDGET)
    if plan.start:
        assert waiting_tokens + (flying + plan.start - 1) * BUDGET < 2 * BUDGET
