"""The batcher on random waiting rooms: budgets hold, nothing starves, nothing is lost or doubled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.batcher import Group, Limits, Waiting, WaitingRoom, next_batch

GROUPS = [Group("org/a", "dense"), Group("org/a", "logits"), Group("org/b", "dense")]
sequences = st.lists(st.tuples(st.sampled_from(GROUPS), st.integers(1, 60), st.integers(0, 5)), min_size=1, max_size=60)
limits = st.builds(Limits, tokens=st.integers(1, 100), items=st.integers(1, 20), max_age=st.integers(1, 30).map(float))


def fill(arrivals: list[tuple[Group, int, int]]) -> tuple[WaitingRoom, dict[tuple[int, int], tuple[Group, Waiting]], float]:
    """A room into which sequences came one after another, what is in it, and the time of the last arrival."""
    room, now, everything = WaitingRoom(), 0.0, {}
    for number, (group, tokens, pause) in enumerate(arrivals):
        now += pause
        waiting = Waiting(number // 3, number % 3, tokens, now)
        room.add(group, [waiting])
        everything[waiting.job, waiting.index] = (group, waiting)
    return room, everything, now


@given(sequences, limits)
def test_every_sequence_is_served_once_within_the_budget(arrivals: list[tuple[Group, int, int]], limits: Limits) -> None:
    room, everything, now = fill(arrivals)
    while batch := room.take(limits, now):
        assert batch.tokens == sum(one.tokens for one in batch.chosen)
        assert len(batch.chosen) <= limits.items
        assert batch.tokens <= limits.tokens or len(batch.chosen) == 1
        for one in batch.chosen:
            group, waiting = everything.pop((one.job, one.index))
            assert (group, waiting) == (batch.group, one)
        assert room.tokens == sum(waiting.tokens for _, waiting in everything.values())
        now += 1
    assert not everything


@given(sequences, limits)
def test_the_longest_waiting_sequence_is_always_in_the_next_batch(arrivals: list[tuple[Group, int, int]], limits: Limits) -> None:
    room, everything, now = fill(arrivals)
    while batch := room.take(limits, now):
        oldest = min(waiting.since for _, waiting in everything.values())
        assert batch.chosen[0].since == oldest
        for one in batch.chosen:
            del everything[one.job, one.index]
        now += 1


@given(sequences, limits)
def test_overdue_sequences_are_served_in_order(arrivals: list[tuple[Group, int, int]], limits: Limits) -> None:
    room, everything, now = fill(arrivals)
    while batch := room.take(limits, now):
        overdue = [w for g, w in everything.values() if g == batch.group and w.since < now - limits.max_age]
        chosen = [one for one in batch.chosen if one in overdue]
        assert chosen == overdue[: len(chosen)]
        if len(chosen) < len(overdue):
            assert len(batch.chosen) == max(1, len(chosen)), "nothing younger may pass an overdue sequence"
        for one in batch.chosen:
            del everything[one.job, one.index]
        now += 1


@given(sequences, limits)
def test_a_batch_has_no_room_for_a_sequence_that_was_left(arrivals: list[tuple[Group, int, int]], limits: Limits) -> None:
    room, everything, now = fill(arrivals)
    batch = room.take(limits, now)
    assert batch is not None
    left = [w for g, w in everything.values() if g == batch.group and w not in batch.chosen]
    if len(batch.chosen) < limits.items and not any(w.since < now - limits.max_age for w in left):
        assert all(w.tokens > limits.tokens - batch.tokens for w in left)


@given(sequences, st.sets(st.integers(0, 20)))
def test_removed_jobs_leave_nothing_behind(arrivals: list[tuple[Group, int, int]], removed: set[int]) -> None:
    room, everything, _ = fill(arrivals)
    room.remove(removed)
    left = [waiting for _, waiting in everything.values() if waiting.job not in removed]
    assert room.jobs() == {waiting.job for waiting in left}
    assert room.tokens == sum(waiting.tokens for waiting in left)


def test_a_sequence_longer_than_the_budget_goes_alone() -> None:
    waiting = {GROUPS[0]: [Waiting(1, 0, 500, 0.0), Waiting(2, 0, 1, 0.0)]}
    batch = next_batch(waiting, Limits(tokens=100, items=10, max_age=1.0), now=0.0)
    assert batch is not None
    assert [one.job for one in batch.chosen] == [1]


def test_what_is_not_overdue_is_chosen_by_length() -> None:
    waiting = {GROUPS[0]: [Waiting(1, 0, 40, 0.0), Waiting(2, 0, 10, 0.0), Waiting(3, 0, 45, 0.0), Waiting(4, 0, 60, 0.0)]}
    batch = next_batch(waiting, Limits(tokens=100, items=10, max_age=1.0), now=0.5)
    assert batch is not None
    assert [one.job for one in batch.chosen] == [1, 3, 2]


def test_an_empty_room_gives_no_batch() -> None:
    assert next_batch({}, Limits(1, 1, 1.0), now=0.0) is None
