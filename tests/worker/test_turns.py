"""Fair queueing of device time between flows: credits, remembered service and freed state."""

from __future__ import annotations

import math

import pytest
from hypothesis import given

from services.worker.scheduling.batcher import (
    NO_CALLER,
    BatchGroup,
    BatchLimits,
    Flow,
    Waiting,
    WaitingRoom,
)
from services.worker.scheduling.turns import BURST_SECONDS, REMEMBERED_SECONDS
from tests.worker.test_batcher import WIDE, A, B, X, Y, fill, limits, running, sequences, serve


@pytest.mark.parametrize(("group", "flow"), [(B, NO_CALLER), (A, Y)])
def test_burst_of_a_light_client_precedes_a_backlog_within_its_credit(
    group: BatchGroup, flow: Flow
) -> None:
    room = WaitingRoom()
    room.add(A, [Waiting(number, 0, 100, 0.0) for number in range(100)], X)
    for now in range(3):
        serve(room, WIDE, now, seconds=0.1)
    for number in range(20):
        room.add(group, [Waiting(1000 + number, 0, 100, 3.0)], flow)
    order = [serve(room, WIDE, 3.0, seconds=0.1).chosen[0].job >= 1000 for _ in range(12)]
    most = math.ceil(BURST_SECONDS / 0.1)
    assert all(order[:most])
    assert sum(order) - sum(not one for one in order) <= most + 2, "then they take turns"


def test_service_of_an_idle_flow_is_remembered_briefly() -> None:
    """Otherwise a busy lane that is refilled for each batch would always be new."""
    for pause, next_is in ((REMEMBERED_SECONDS / 2, Y), (REMEMBERED_SECONDS * 2, X)):
        room = WaitingRoom()
        room.add(A, [Waiting(1, 0, 10, 0.0)], X)
        serve(room, WIDE, 0.0)
        now = 1.0 + pause
        assert room.take(WIDE, now) is None
        room.add(A, [Waiting(2, 0, 100, now)], X)
        room.add(A, [Waiting(3, 0, 100, now)], Y)
        assert list(serve(room, WIDE, now).weighed) == [next_is]


def test_device_is_shared_with_flows_that_recently_had_work() -> None:
    room = WaitingRoom()
    room.add(A, [Waiting(1, 0, 10, 0.0)])
    assert not room.is_shared(A.model)
    room.add(B, [Waiting(2, 0, 10, 0.0)])
    assert room.is_shared(A.model)
    for _ in range(2):
        serve(room, WIDE, 0.0, seconds=0.1)
    assert room.take(WIDE, 0.5) is None
    assert room.is_shared(A.model)
    assert room.take(WIDE, 0.2 + 2 * REMEMBERED_SECONDS) is None
    assert not room.is_shared(A.model)
    for number, flow in enumerate((X, Y)):
        room.add(A, [Waiting(3 + number, 0, 10, 5.0)], flow)
    assert room.is_shared(A.model)


@given(sequences, limits)
def test_state_of_departed_flows_is_freed(
    arrivals: list[tuple[BatchGroup, Flow, int, int]], limits: BatchLimits
) -> None:
    room, _, now = fill(arrivals)
    while batch := room.take(limits, now):
        room.ran(batch, 0.1, now)
    assert room.take(limits, now + 2 * REMEMBERED_SECONDS) is None
    assert not room._models._away
    assert not room._callers._away
    assert not room._shares
    assert not room._lines
    assert not room._jobs


def test_preempting_caller_uses_its_burst_and_then_waits() -> None:
    room, overtaking, now = WaitingRoom(), 0, 0.0
    batch = running(room)
    for number in range(2, 100):
        room.add(B, [Waiting(number, 0, 1, now)], Y)
    while room.preempts(batch, WIDE):
        overtaking, now = overtaking + 1, now + 0.04
        serve(room, BatchLimits(tokens=50, items=1, max_age=1.0), now, 0.04)
    assert overtaking * 0.04 == pytest.approx(BURST_SECONDS - WIDE.seconds, abs=0.04)
    room.ran(batch, 0.1, now)
