"""Estimates of waiting work: one rule, and the same answer wherever it is asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.v1 import models_pb2

from libs.fleet import FleetSnapshot, WorkerModelRecord, WorkerRecord
from libs.fleet.affinity import busy_seconds
from libs.fleet.claims import wait_seconds
from libs.queue import LaneGauges, LaneKey
from libs.work_estimate import (
    UNKNOWN_LOAD_SECONDS,
    assumed_load_seconds,
    assumed_speed,
    average_speed,
    busy_copies,
    work_seconds,
)
from services.router.state.throughput import lane_throughput

MODEL = "org/model"
speeds = st.floats(1.0, 1e6)
reports = st.lists(st.one_of(st.just(0.0), speeds), max_size=9)
tokens = st.integers(0, 10**9)
sizes = st.integers(0, 10**12)
devices = st.sampled_from(["cpu", "cuda"])


@given(reports)
def test_average_is_within_the_measured_speeds(found: list[float]) -> None:
    measured = [speed for speed in found if speed]
    average = average_speed(found)
    if measured:
        assert min(measured) * 0.999 <= average <= max(measured) * 1.001
    else:
        assert average == 0.0


@given(reports, st.integers(0, 9))
def test_copies_without_a_measurement_count_as_average(found: list[float], loading: int) -> None:
    assert average_speed([*found, *[0.0] * loading]) == average_speed(found)


@given(tokens, tokens, speeds, st.integers(1, 99))
def test_copies_divide_the_work_evenly(one: int, other: int, speed: float, copies: int) -> None:
    alone = work_seconds(one, speed)
    assert work_seconds(one, speed, copies) * copies == pytest.approx(alone)
    assert work_seconds(one, speed, copies + 1) <= work_seconds(one, speed, copies) <= alone
    assert work_seconds(one + other, speed) == pytest.approx(alone + work_seconds(other, speed))
    assert work_seconds(one, speed, 0) == alone
    assert busy_copies(one / 60, speed) == pytest.approx(alone / 60)


@given(devices, sizes, sizes)
def test_assumed_speed_falls_with_the_size(device: str, one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert assumed_speed(device, max(1, small)) >= assumed_speed(device, max(1, large)) > 0
    assert assumed_speed(device, 0) > 0
    assert assumed_speed("cuda", one) > assumed_speed("cpu", one)


@given(devices, sizes, reports)
def test_measured_peers_take_precedence_over_the_size(
    device: str, size: int, peers: list[float]
) -> None:
    expected = average_speed(peers) or assumed_speed(device, size)
    assert assumed_speed(device, size, peers) == expected


@given(sizes, sizes)
def test_assumed_load_grows_with_the_size(one: int, other: int) -> None:
    small, large = sorted((max(1, one), max(1, other)))
    assert 0 < assumed_load_seconds(small) <= assumed_load_seconds(large)
    assert assumed_load_seconds(0) == UNKNOWN_LOAD_SECONDS


@given(reports, st.integers(0, 10**6), st.integers(1, 10**6))
def test_claims_admission_and_placement_estimate_the_same_wait(
    found: list[float], leased: int, queued: int
) -> None:
    fleet = FleetSnapshot(
        {
            f"w{number}": WorkerRecord(
                f"w{number}", "1", "cpu", "cpu", 0, 0, 8192, False, 0, {MODEL: record(speed)}
            )
            for number, speed in enumerate(found)
        },
        {},
        {},
        0,
    )
    lane = LaneGauges(LaneKey("cpu", MODEL), 1, queued, leased, 1, 0, 0, 0, 0)
    throughput = lane_throughput(lane.lane, fleet, {})
    waits = busy_seconds(fleet, [lane])
    if any(found):
        expected = work_seconds(queued + leased, average_speed(found), len(found))
        assert wait_seconds(lane, fleet) == pytest.approx(expected)
        assert throughput.seconds(queued + leased) == pytest.approx(expected)
        assert waits == pytest.approx(dict.fromkeys(fleet.workers, expected))
    else:
        assert wait_seconds(lane, fleet) is None
        assert not throughput.is_known
        assert not any(waits.values())


def record(speed: float) -> WorkerModelRecord:
    return WorkerModelRecord(MODEL, models_pb2.MODEL_STATE_RESIDENT, 1, 1.0, speed, 0.0, False)
