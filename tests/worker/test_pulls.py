"""The choice of pulls, by the worker's state and the waiting tokens of each lane."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.jobs.pulling.pulls import (
    FULL_LANE_BATCHES,
    LEAD_SECONDS,
    LOW_WATERMARK_BATCHES,
    MAX_BATCHES,
    MAX_EXCLUDED_TENANTS,
    MAX_PULLS,
    PROMPT_SECONDS,
    QUICK_BATCH_SECONDS,
    RESERVED_PULLS,
    LaneName,
    LaneState,
    Lead,
    Pull,
    PullPlan,
    Situation,
    plan_pulls,
)

A, B, C = ("org/a", ""), ("org/b", ""), ("org/b", "org/adapter")
BUDGET = 1000
LEAD = 0.01


def lane(
    waiting_tokens: int = 0,
    batch_tokens: int = BUDGET,
    batch_seconds: float = 0.1,
    tenants: dict[str, int] | None = None,
) -> LaneState:
    return LaneState(waiting_tokens, batch_tokens, batch_seconds, tenants or {})


def plan(
    lanes: dict[LaneName, LaneState],
    *in_flight: Pull,
    can_load: bool = False,
    busy_seconds: float = 0.0,
    waiting_tokens: int = -1,
) -> PullPlan:
    if waiting_tokens < 0:
        waiting_tokens = sum(state.waiting_tokens for state in lanes.values())
    return plan_pulls(
        Situation(lanes, can_load, in_flight, waiting_tokens, busy_seconds, LEAD), BUDGET
    )


def pull(*lanes: LaneName, tokens: int = BUDGET // 2, can_load: bool = False) -> Pull:
    return Pull(frozenset(lanes), can_load, tokens)


def test_idle_worker_keeps_two_pulls_for_all_lanes() -> None:
    lanes = {A: lane(), B: lane()}
    everything = pull(A, B)
    assert plan(lanes) == PullPlan((everything, everything))
    assert plan(lanes, everything) == PullPlan((everything,))
    assert plan(lanes, everything, everything) == PullPlan()


def test_worker_without_models_pulls_only_if_it_may_load_one() -> None:
    assert plan({}) == PullPlan()
    assert plan({}, can_load=True) == PullPlan((pull(can_load=True),))
    assert plan({}, pull(can_load=True), can_load=True) == PullPlan()


def test_busy_worker_prefetches_half_a_batch_and_more_when_nearly_free() -> None:
    half = pull(A)
    assert plan({A: lane()}, busy_seconds=1.0) == PullPlan((half,))
    assert plan({A: lane()}, half, busy_seconds=1.0) == PullPlan()
    assert plan({A: lane(500)}, busy_seconds=1.0) == PullPlan((), 1.0 - LEAD)
    assert plan({A: lane(500)}, busy_seconds=LEAD) == PullPlan((half,))
    assert plan({A: lane(1500)}, busy_seconds=LEAD) == PullPlan((half,))
    assert plan({A: lane(1501)}, busy_seconds=LEAD) == PullPlan()


def test_lanes_below_the_low_watermark_are_always_pulled() -> None:
    asked = plan({A: lane(1000), B: lane(), C: lane()}, busy_seconds=1.0)
    assert asked.pulls == (pull(B, C),)
    assert plan({A: lane(1000), B: lane(), C: lane()}, *asked.pulls, busy_seconds=1.0).pulls == ()
    little = int(LOW_WATERMARK_BATCHES * BUDGET)
    assert plan({A: lane(1000), B: lane(little), C: lane(little + 1)}, busy_seconds=1.0).pulls == (
        pull(B),
    )


def test_lane_without_a_pull_in_flight_is_pulled() -> None:
    in_flight = pull(B)
    assert plan({A: lane(), B: lane()}, in_flight, busy_seconds=1.0).pulls == (pull(A, B),)
    assert plan({A: lane(), C: lane()}, pull(A), pull(A)).pulls == (pull(A, C), pull(A, C))
    assert plan({A: lane()}, pull(A), pull(A), can_load=True).pulls == (pull(A, can_load=True),)


def test_lanes_with_quick_batches_have_two_pulls() -> None:
    quick = {A: lane(batch_seconds=QUICK_BATCH_SECONDS / 2)}
    whole = pull(A, tokens=BUDGET)
    assert plan(quick) == PullPlan((whole, whole))
    assert plan({A: lane(1000, batch_seconds=QUICK_BATCH_SECONDS / 2)}) == PullPlan((whole,))
    assert plan({A: lane(1000, batch_seconds=QUICK_BATCH_SECONDS / 2)}, whole) == PullPlan()
    assert plan({A: lane(1501, batch_seconds=QUICK_BATCH_SECONDS / 2)}) == PullPlan()


def test_slow_model_has_small_pulls() -> None:
    """Half a batch of a fast model would be many batches of a slow one, which tenants that arrive
    later would wait for.
    """
    lanes = {A: lane(), B: lane(batch_tokens=100)}
    assert plan(lanes, busy_seconds=1.0).pulls == (pull(A), pull(B, tokens=62 // 2))
    assert plan({B: lane(188, batch_tokens=100)}, busy_seconds=0.0).pulls == ()
    assert plan({B: lane(batch_tokens=0)}, busy_seconds=1.0).pulls[0].tokens == 15 // 2


def test_every_lane_is_eventually_pulled() -> None:
    """Models of any size are loaded in turn: none waits forever behind second pulls of others."""
    lanes = {
        (f"org/{tokens}", ""): lane(batch_tokens=tokens, batch_seconds=0.01)
        for tokens in (1, 3, 10, 30, 100, 300, 1000)
    }
    pulls = plan(lanes, can_load=True).pulls
    assert len(pulls) <= MAX_PULLS - 2
    assert frozenset().union(*(one.lanes for one in pulls)) == lanes.keys()
    for tokens in (1000, 2):
        new = (f"org/new-{tokens}", "")
        lanes[new] = lane(batch_tokens=tokens)
        more = plan(lanes, *pulls, can_load=True).pulls
        assert any(new in one.lanes for one in more)
        pulls += more


@given(
    st.dictionaries(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from(["", "x"])),
        st.builds(
            lane,
            st.integers(0, 3000),
            st.integers(0, 3000),
            st.sampled_from([0.0, 0.01, 0.1, 3.0]),
            st.dictionaries(st.sampled_from("tu"), st.integers(1, 3000)),
        ),
    ),
    st.lists(
        st.frozensets(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["", "x"]))),
        max_size=MAX_PULLS,
    ),
    st.floats(0, 3),
    st.booleans(),
)
def test_bounds(
    lanes: dict[LaneName, LaneState],
    in_flight: list[frozenset[LaneName]],
    busy_seconds: float,
    can_load: bool,
) -> None:
    pulls = [Pull(asked, False, BUDGET) for asked in in_flight]
    planned = plan(lanes, *pulls, busy_seconds=busy_seconds, can_load=can_load)
    waiting = sum(state.counted(BUDGET) for state in lanes.values())
    assert len(pulls) + len(planned.pulls) <= MAX_PULLS
    for one in planned.pulls:
        assert waiting < MAX_BATCHES * BUDGET
        assert one.lanes or one.can_load, "a pull for nothing is never sent"
        assert 1 <= one.tokens <= BUDGET
        for name in one.lanes:
            if one.except_tenants:
                assert lanes[name].counted(BUDGET) <= FULL_LANE_BATCHES * BUDGET
                assert not one.can_load
                continue
            assert lanes[name].waiting_tokens + one.tokens <= 2.5 * BUDGET
            if busy_seconds > LEAD:
                assert lanes[name].waiting_tokens <= LOW_WATERMARK_BATCHES * BUDGET
    if waiting < MAX_BATCHES * BUDGET and len(pulls) + len(planned.pulls) < MAX_PULLS:
        asked = {name for one in (*pulls, *planned.pulls) for name in one.lanes}
        assert {name for name, state in lanes.items() if not state.waiting_tokens} <= asked


def others(*tenants: str) -> Pull:
    return Pull(frozenset({A}), False, BUDGET // 2, frozenset(tenants))


def test_heavy_tenant_is_excluded_by_a_pull_for_others_of_its_lane() -> None:
    heavy = {"heavy": 900, "too": 500, "light": 100}
    full = {A: lane(1500, tenants=heavy)}
    assert plan(full, busy_seconds=1.0).pulls == (others("heavy", "too"),)
    assert plan(full, others("heavy", "too"), busy_seconds=1.0).pulls == ()
    assert plan(full, others("heavy"), busy_seconds=1.0).pulls == ()
    assert plan(full, others("heavy", "light"), busy_seconds=1.0).pulls == (others("heavy", "too"),)
    assert plan({A: lane(1501, tenants=heavy)}, busy_seconds=LEAD).pulls == (
        others("heavy", "too"),
    )
    assert plan(full, others("heavy"), busy_seconds=LEAD).pulls == (pull(A),), (
        "that waits for others brings not whatever there is"
    )
    assert plan({A: lane(3000, tenants=heavy)}, busy_seconds=1.0).pulls == (others("heavy", "too"),)
    crowd = {str(number): BUDGET for number in range(4)}
    assert plan({A: lane(4 * BUDGET, tenants=crowd)}, busy_seconds=1.0).pulls == (), (
        "there may be very many others"
    )
    assert (
        plan(
            {A: lane(1500, batch_seconds=QUICK_BATCH_SECONDS / 2, tenants=heavy)}, busy_seconds=1.0
        ).pulls
        == ()
    ), "no sooner so"
    (many,) = plan(
        {A: lane(1500, tenants={str(number): 50 + number for number in range(30)})},
        busy_seconds=1.0,
    ).pulls
    assert many.except_tenants == {str(number) for number in range(30 - MAX_EXCLUDED_TENANTS, 30)}


def test_full_lane_without_a_pull_takes_a_reserved_one() -> None:
    """Second pulls of idle lanes do not keep a light tenant of a full lane waiting."""
    full = {A: lane(1500, tenants={"heavy": 1500})}
    waiting = [pull(B), pull(B), pull(C), pull(C), pull(B, C), pull(B, C)]
    assert len(waiting) == MAX_PULLS - RESERVED_PULLS
    assert plan(full, *waiting, busy_seconds=1.0).pulls == (others("heavy"),)
    assert plan(full, *waiting[1:], others("too"), busy_seconds=1.0).pulls == (), (
        "its second pull may take none of the reserved ones"
    )


def test_lead_is_the_duration_of_a_pull() -> None:
    lead = Lead()
    for seconds, expected in ((0.008, 0.01), (0.0001, LEAD_SECONDS[0]), (0.04, LEAD_SECONDS[1])):
        for _ in range(100):
            lead.add(seconds)
            lead.add(PROMPT_SECONDS)  # it waited for work, so it is not a measurement
        assert lead.seconds == pytest.approx(expected, rel=0.01)


def test_job_of_many_batches_does_not_block_others() -> None:
    """Neither tenants of its lane nor other lanes are blocked."""
    huge = lane(50 * BUDGET, tenants={"heavy": 50 * BUDGET})
    assert plan({A: huge}, busy_seconds=1.0).pulls == (others("heavy"),)
    assert plan({A: huge, B: lane()}, busy_seconds=1.0).pulls == (pull(B), others("heavy"))
    quick = lane(50 * BUDGET, batch_seconds=QUICK_BATCH_SECONDS / 2, tenants={"heavy": 50 * BUDGET})
    (one,) = plan({A: quick}, busy_seconds=1.0).pulls
    assert one.except_tenants == {"heavy"}
    bulk = lane(50 * BUDGET)
    assert plan({A: bulk, B: lane()}, busy_seconds=1.0).pulls == (pull(B),)
