"""The batcher on random waiting rooms: budgets hold, device time is shared by weight, and no
sequence starves, is lost or is duplicated.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.models import GENERATE
from services.worker.scheduling.batcher import (
    BULK_WEIGHT,
    CANDIDATES,
    COBATCH_WINDOW_SECONDS,
    NO_CALLER,
    Batch,
    BatchGroup,
    BatchLimits,
    Flow,
    Waiting,
    WaitingRoom,
)

GROUPS = [BatchGroup("org/a", "dense"), BatchGroup("org/a", "logits"), BatchGroup("org/b", "dense")]
FLOWS = [
    NO_CALLER,
    Flow(tenant="x"),
    Flow(tenant="y"),
    Flow(adapter="org/adapter"),
    Flow(is_bulk=True),
]
A, B = GROUPS[0], GROUPS[2]
X, Y = Flow(tenant="x"), Flow(tenant="y")
sequences = st.lists(
    st.tuples(
        st.sampled_from(GROUPS), st.sampled_from(FLOWS), st.integers(1, 60), st.integers(0, 5)
    ),
    min_size=1,
    max_size=60,
)
limits = st.builds(
    BatchLimits,
    tokens=st.integers(1, 100),
    items=st.integers(1, 20),
    max_age=st.integers(1, 30).map(float),
)
WIDE = BatchLimits(tokens=100, items=10, max_age=1.0)


@dataclass(frozen=True)
class Arrived:
    group: BatchGroup
    flow: Flow
    waiting: Waiting


Everything = dict[tuple[int, int], Arrived]


def fill(
    arrivals: list[tuple[BatchGroup, Flow, int, int]],
) -> tuple[WaitingRoom, Everything, float]:
    """Return a room with sequences that arrived in turn, its contents, and the time of the last
    arrival.
    """
    room, now, everything = WaitingRoom(), 0.0, {}
    for number, (group, flow, tokens, pause) in enumerate(arrivals):
        now += pause
        waiting = Waiting(number // 3, number % 3, tokens, now)
        room.add(group, [waiting], flow)
        everything[waiting.job, waiting.index] = Arrived(group, flow, waiting)
    return room, everything, now


def take_from(everything: Everything, batch: Batch) -> list[Arrived]:
    return [everything.pop((one.job, one.index)) for one in batch.chosen]


def serve(room: WaitingRoom, limits: BatchLimits, now: float, seconds: float = 1.0) -> Batch:
    batch = room.take(limits, now)
    assert batch is not None
    room.ran(batch, seconds, now + seconds)
    return batch


@given(sequences, limits)
def test_every_sequence_is_served_once_within_the_budget(
    arrivals: list[tuple[BatchGroup, Flow, int, int]], limits: BatchLimits
) -> None:
    room, everything, now = fill(arrivals)
    while batch := room.take(limits, now):
        assert batch.tokens == sum(one.tokens for one in batch.chosen)
        assert len(batch.chosen) <= limits.items
        assert batch.tokens <= limits.tokens or len(batch.chosen) == 1
        taken = take_from(everything, batch)
        assert {one.group for one in taken} == {batch.group}
        assert tuple(one.waiting for one in taken) == batch.chosen
        assert {one.flow for one in taken} == set(batch.weighed)
        assert room.tokens == sum(one.waiting.tokens for one in everything.values())
        assert sum(sum(flows.values()) for flows in room.lanes.values()) == room.tokens
        assert {model for model, _ in room.lanes} == {
            one.group.model for one in everything.values()
        }
        now += 1
        room.ran(batch, 1.0, now)
    assert not everything
    assert not room.lanes


@given(sequences, limits)
def test_batch_begins_with_the_oldest_sequence_of_its_flow(
    arrivals: list[tuple[BatchGroup, Flow, int, int]], limits: BatchLimits
) -> None:
    room, everything, now = fill(arrivals)
    while batch := room.take(limits, now):
        first = everything[batch.chosen[0].job, batch.chosen[0].index]
        alike = [
            one.waiting.since
            for one in everything.values()
            if (one.group, one.flow) == (first.group, first.flow)
        ]
        assert first.waiting.since == min(alike)
        take_from(everything, batch)
        now += 1
        room.ran(batch, 1.0, now)


@given(sequences, limits)
def test_overdue_sequences_of_a_flow_are_served_in_order(
    arrivals: list[tuple[BatchGroup, Flow, int, int]], limits: BatchLimits
) -> None:
    room, everything, now = fill(arrivals)
    while batch := room.take(limits, now):
        first = everything[batch.chosen[0].job, batch.chosen[0].index]
        alike = [one for one in everything.values() if one.group == batch.group]
        own = [
            one.waiting
            for one in alike
            if one.flow == first.flow and one.waiting.since < now - limits.max_age
        ]
        chosen = [one for one in batch.chosen if one in own]
        assert chosen == own[: len(chosen)]
        if len(chosen) < len(own):
            assert len(batch.chosen) == max(1, len(chosen)), (
                "nothing younger may pass an overdue sequence"
            )
        take_from(everything, batch)
        now += 1
        room.ran(batch, 1.0, now)


@given(sequences, limits)
def test_skipped_sequences_do_not_fit_the_remaining_budget(
    arrivals: list[tuple[BatchGroup, Flow, int, int]], limits: BatchLimits
) -> None:
    """All flows are new, so they may all share a batch."""
    room, everything, now = fill(arrivals)
    batch = room.take(limits, now)
    assert batch is not None
    left = [
        one.waiting
        for one in everything.values()
        if one.group == batch.group and one.waiting not in batch.chosen
    ]
    if len(batch.chosen) < limits.items and not any(
        one.since < now - limits.max_age for one in left
    ):
        assert all(one.tokens > limits.tokens - batch.tokens for one in left)


@given(sequences, st.sets(st.integers(0, 20)))
def test_removed_jobs_leave_nothing_behind(
    arrivals: list[tuple[BatchGroup, Flow, int, int]], removed: set[int]
) -> None:
    room, everything, now = fill(arrivals)
    room.remove(removed)
    left = [one.waiting for one in everything.values() if one.waiting.job not in removed]
    assert room.jobs() == {waiting.job for waiting in left}
    assert room.tokens == sum(waiting.tokens for waiting in left)
    served = 0
    while batch := room.take(WIDE, now):
        served += len(batch.chosen)
    assert served == len(left)


ADAPTED = Flow(adapter="org/adapter")
weights = st.dictionaries(
    st.tuples(st.sampled_from([A, B]), st.sampled_from([NO_CALLER, ADAPTED, X, Y])),
    st.sampled_from([0.5, 1.0, 2.0, 7.0]),
    min_size=2,
)
costs = st.lists(st.integers(1, 50), min_size=1, max_size=7)


@settings(deadline=None, max_examples=50)
@given(weights, costs)
def test_backlogged_flows_get_device_time_by_weight_within_one_batch(
    weights: dict[tuple[BatchGroup, Flow], float], costs: list[int]
) -> None:
    """Fairness holds between callers, between models of a caller, and between lines of a model.
    Each batch has one sequence.
    """
    room, number = WaitingRoom(), 0
    got = dict.fromkeys(weights, 0.0)
    costliest = max(costs)

    def arrive(of: tuple[BatchGroup, Flow]) -> None:
        nonlocal number
        number += 1
        room.add(of[0], [Waiting(number, 0, 10, float(number))], of[1], weights[of])

    for of in weights:
        arrive(of)
    for turn in range(300):
        batch = room.take(BatchLimits(10, 1, 1e9), float(number))
        assert batch is not None
        (flow,) = batch.weighed
        seconds = costs[turn % len(costs)]
        arrive((batch.group, flow))  # during the batch, as in a worker
        room.ran(batch, seconds, float(number))
        got[batch.group, flow] += seconds
        slack = costliest / min(weights.values()) + 1e-6
        assert spread(got, weights, lambda group, flow: flow.caller) <= slack
        for one in {flow.caller for _, flow in weights}:
            own = {of: seconds for of, seconds in got.items() if of[1].caller == one}
            assert spread(own, weights, lambda group, flow: group) <= slack
            for model in {group for group, _ in own}:
                of_model = {of: seconds for of, seconds in own.items() if of[0] == model}
                assert spread(of_model, weights, lambda group, flow: flow) <= slack


def spread(
    got: Mapping[tuple[BatchGroup, Flow], float],
    weights: Mapping[tuple[BatchGroup, Flow], float],
    key: Callable[[BatchGroup, Flow], Hashable],
) -> float:
    """Return the spread of weighted seconds between flows that share a key."""
    sums: dict[Hashable, float] = defaultdict(float)
    for of, seconds in got.items():
        sums[key(*of)] += seconds / weights[of]
    return max(sums.values()) - min(sums.values())


@settings(deadline=None, max_examples=50)
@given(sequences, costs)
def test_newcomer_waits_for_one_batch_of_each_other_flow(
    arrivals: list[tuple[BatchGroup, Flow, int, int]], costs: list[int]
) -> None:
    """The bound holds for other callers and for other models of the same caller, however much waits
    and continues to arrive.
    """
    room, everything, now = fill(arrivals)
    others = {(one.group, one.flow) for one in everything.values()}
    numbers = itertools.count(1000)
    new_model, new_caller = Waiting(900, 0, 10, now + 10), Waiting(901, 0, 10, now + 10)
    for turn in range(100):
        if turn == 10:
            for group, flow in others:
                room.add(group, [Waiting(next(numbers), 0, 50, now) for _ in range(5)], flow)
            room.add(BatchGroup("org/new", "dense"), [new_model])
            room.add(A, [new_caller], Flow(tenant="new"))
            before: list[Batch] = []
        batch = serve(room, BatchLimits(50, 5, 1.0), now, costs[turn % len(costs)])
        now += 1
        for flow in batch.weighed:
            room.add(batch.group, [Waiting(next(numbers), 0, 50, now)], flow)
        if turn >= 10:
            before.append(batch)
            if new_caller in batch.chosen:
                assert len(before) - 1 <= len(
                    {flow.caller for _, flow in others} | {NO_CALLER.caller}
                )
            if new_model in batch.chosen:
                models = {group.model for group, flow in others if flow.caller == NO_CALLER.caller}
                own = [
                    one
                    for one in before
                    if any(flow.caller == NO_CALLER.caller for flow in one.weighed)
                ]
                assert len(own) - 1 <= len(models)
    assert new_model.job not in room.jobs()
    assert new_caller.job not in room.jobs()


def test_light_model_is_next_despite_a_backlog_of_another() -> None:
    room = WaitingRoom()
    room.add(A, [Waiting(number, 0, 50, 0.0) for number in range(100)])
    for now in range(10):
        assert serve(room, WIDE, now).group == A
    room.add(B, [Waiting(1000, 0, 1, 10.0)])
    assert [serve(room, WIDE, 10.0).group, serve(room, WIDE, 10.0).group] == [B, A]


def test_light_tenant_is_next_and_does_not_share_its_batch() -> None:
    room = WaitingRoom()
    room.add(A, [Waiting(number, 0, 50, 0.0) for number in range(100)], X)
    serve(room, WIDE, 0.0)
    room.add(A, [Waiting(1000, 0, 1, 1.0), Waiting(1000, 1, 2, 1.0)], Y)
    assert [one.job for one in serve(room, WIDE, 1.0).chosen] == [1000, 1000]


def test_generative_model_has_half_weight_and_no_burst_credit() -> None:
    room, writer = WaitingRoom(), BatchGroup("org/writer", GENERATE)
    arrived = 0

    def one_more(now: float) -> None:
        nonlocal arrived
        room.add(A, [Waiting(arrived := arrived + 1, 0, 10, now)])

    for now in range(3):
        one_more(now)
        serve(room, WIDE, now, seconds=0.1)
    room.add(writer, [Waiting(1000, 0, 10, 3.0)])
    order = []
    for now in range(3, 13):
        one_more(now)
        batch = serve(room, WIDE, now, seconds=0.1)
        order.append(batch.group)
        if batch.group == writer:
            room.add(writer, batch.chosen)  # unfinished
    assert order[:2] != [writer, writer], (
        "else all that arrives in the meantime waits for the whole credit"
    )
    assert order.count(writer) == 4, "and from then on it gets every third turn"


def test_sequences_that_have_begun_stay_in_the_batch() -> None:
    """Others cannot take their place: they may wait for the memory that these free at their end."""
    room, writer, now = WaitingRoom(), BatchGroup("org/writer", GENERATE), 0.0
    begun = [Waiting(number, 0, 1, now, 20, 5) for number in (1, 2)]
    room.add(writer, begun, Y)
    room.add(writer, [Waiting(number, 0, 90, now, 20) for number in range(10, 20)], X)
    assert room.lanes == {("org/writer", ""): {Y: 2, X: 10 * 110}}
    for turn in range(5):
        batch = serve(room, BatchLimits(tokens=100, items=8, max_age=1.0), now + turn)
        assert [one.job for one in batch.chosen] == [1, 2, 10], "and the oldest of the others"
        room.add(writer, batch.chosen[:2], Y)
        room.add(writer, batch.chosen[2:], X)
    few = serve(room, BatchLimits(tokens=100, items=2, max_age=1.0), now + 6)
    assert [one.job for one in few.chosen] == [1, 10]


def test_flows_with_equal_service_share_batches() -> None:
    room = WaitingRoom()
    for flow, first in ((X, 0), (Y, 100)):
        room.add(A, [Waiting(first + number, 0, 10, 0.0) for number in range(50)], flow)
    for now in range(5):
        batch = serve(room, WIDE, now, seconds=COBATCH_WINDOW_SECONDS / 2)
        assert len(batch.chosen) == 10
    assert room.tokens == 500


def test_bulk_work_gets_a_tenth_next_to_interactive_work() -> None:
    room, bulk = WaitingRoom(), Flow(is_bulk=True)
    got: Counter[Flow] = Counter()
    for flow in (NO_CALLER, bulk):
        room.add(
            A, [Waiting(number + 1000 * flow.is_bulk, 0, 100, 0.0) for number in range(300)], flow
        )
    for _ in range(200):
        (flow,) = serve(room, WIDE, 0.0).weighed
        got[flow] += 1
    assert got[bulk] == pytest.approx(200 * BULK_WEIGHT / (1 + BULK_WEIGHT), abs=1)


def test_sequence_longer_than_the_budget_runs_alone() -> None:
    room = WaitingRoom()
    room.add(A, [Waiting(1, 0, 500, 0.0), Waiting(2, 0, 1, 0.0)])
    assert [one.job for one in serve(room, WIDE, 0.0).chosen] == [1]


def test_sequences_that_are_not_overdue_are_chosen_by_length() -> None:
    room = WaitingRoom()
    room.add(
        A,
        [
            Waiting(1, 0, 40, 0.0),
            Waiting(2, 0, 10, 0.0),
            Waiting(3, 0, 45, 0.0),
            Waiting(4, 0, 60, 0.0),
        ],
    )
    assert [one.job for one in serve(room, WIDE, 0.5).chosen] == [1, 3, 2]


def test_group_cap_limits_its_batches() -> None:
    room = WaitingRoom()
    room.add(A, [Waiting(number, 0, 10, 0.0) for number in range(10)])
    batch = room.take(WIDE, 0.0, lambda group: 30 if group == A else 100)
    assert batch is not None
    assert batch.tokens == 30


def test_number_of_considered_sequences_is_bounded() -> None:
    room = WaitingRoom()
    room.add(A, [Waiting(number, 0, 1, 0.0) for number in range(2 * CANDIDATES)])
    assert len(serve(room, BatchLimits(10**6, 10**6, 1.0), 0.0).chosen) == CANDIDATES


def test_empty_room_gives_no_batch() -> None:
    assert WaitingRoom().take(BatchLimits(1, 1, 1.0), now=0.0) is None


@pytest.mark.parametrize(("heavy", "batches"), [(X, 0), (Flow(tenant="new"), 1)])
def test_another_model_gives_a_heavy_caller_no_credit(heavy: Flow, batches: int) -> None:
    """A light tenant uses another model. A new caller takes turns with it immediately."""
    room, now = WaitingRoom(), 0.0
    one_each, numbers = BatchLimits(tokens=10, items=1, max_age=1e9), itertools.count()

    def served() -> Batch | None:
        nonlocal now
        batch = room.take(one_each, now)
        if batch is not None:
            now += 0.05 if batch.tokens > 1 else 0.005
            room.ran(batch, 0.05 if batch.tokens > 1 else 0.005, now)
        return batch

    for _ in range(100):
        room.add(A, [Waiting(next(numbers), 0, 10, now)], X)
        room.add(A, [Waiting(next(numbers), 0, 1, now)], Y)
        while served() is not None:
            pass
    for _ in range(20):
        room.add(B, [Waiting(next(numbers), 0, 10, now)], heavy)
    room.add(A, [Waiting(next(numbers), 0, 1, now)], Y)
    before = list(
        itertools.takewhile(
            lambda batch: batch is not None and batch.group == B, iter(served, object())
        )
    )
    assert len(before) == batches


def test_heavy_callers_work_does_not_join_a_light_tenants_batch() -> None:
    """The heavy caller has not used this model yet."""
    room = WaitingRoom()
    room.add(B, [Waiting(number, 0, 100, 0.0) for number in range(5)], X)
    for now in range(5):
        serve(room, WIDE, now)
    room.add(A, [Waiting(number, 0, 10, 5.0) for number in range(100, 110)], X)
    room.add(A, [Waiting(1000, 0, 1, 5.0)], Y)
    assert [one.job for one in serve(room, WIDE, 5.0).chosen] == [1000]


def running(room: WaitingRoom, first: Flow = X, had: float = 1.0) -> Batch:
    """Take a batch of 50 tokens of a caller that has already used `had` seconds."""
    room.add(A, [Waiting(0, 0, 50, 0.0)], first)
    serve(room, WIDE, 0.0, had)
    room.add(A, [Waiting(1, 0, 50, 0.0)], first)
    batch = room.take(WIDE, 0.0)
    assert batch is not None
    return batch


@pytest.mark.parametrize(
    ("other", "tokens", "had", "is_overtaken"),
    [
        (Y, 50, 1.0, True),
        (Y, 51, 1.0, False),  # both together exceed the budget
        (Y, 50, WIDE.seconds, False),  # it has had little more service
        (Y, 50, WIDE.seconds + 0.001, True),
        (X, 50, 1.0, False),  # the same caller's work
        (Flow(tenant="x", adapter="org/adapter"), 50, 1.0, False),
        (Flow(tenant="y", is_bulk=True), 50, 1.0, False),
        (Flow(tenant="x", is_bulk=True), 50, 1.0, False),
    ],
)
def test_batch_preempts_callers_with_more_service_between_layers(
    other: Flow, tokens: int, had: float, is_overtaken: bool
) -> None:
    room = WaitingRoom()
    batch = running(room, had=had)
    assert not room.preempts(batch, WIDE)
    room.add(B, [Waiting(2, 0, tokens, 0.0)], other)
    assert room.preempts(batch, WIDE) is is_overtaken


def test_interactive_work_preempts_bulk_work_of_the_same_tenant() -> None:
    room = WaitingRoom()
    batch = running(room, Flow(tenant="x", is_bulk=True))
    room.add(A, [Waiting(2, 0, 1, 0.0)], X)
    assert room.preempts(batch, WIDE)
