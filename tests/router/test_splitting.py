"""Dividing a request into jobs."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.splitting import (
    MAX_JOBS,
    RequestPart,
    job_id,
    job_target,
    request_digest,
    split,
)
from tests.router.test_rules import LANE, fleet, worker


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=400),
    st.integers(1, 5000),
    st.integers(0, 300),
)
def test_parts_cover_all_items_once_in_order_within_the_target(
    costs: list[int], target: int, repeated: int
) -> None:
    parts = split(costs, target, repeated)
    assert [
        index for part in parts for index in range(part.first, part.first + part.count)
    ] == list(range(len(costs)))
    for part in parts:
        own = sum(costs[part.first : part.first + part.count])
        assert part.tokens == own + repeated
        assert own <= target or part.count == 1
    for left, right in pairwise(parts):
        assert left.tokens - repeated + costs[right.first] > target


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=3000), st.integers(0, 5))
def test_no_request_becomes_more_jobs_than_one_call_takes(costs: list[int], workers: int) -> None:
    snapshot = fleet(*(worker(f"w{number}") for number in range(workers)))
    target = job_target(sum(costs), LANE, snapshot)
    assert len(split(costs, target)) <= MAX_JOBS + 1


def test_middling_request_is_spread_over_the_workers_that_hold_the_model() -> None:
    costs = [100] * 120
    one, four = fleet(worker("w1")), fleet(*(worker(f"w{number}") for number in range(4)))
    assert len(split(costs, job_target(12_000, LANE, four))) == 8
    assert len(split(costs, job_target(12_000, LANE, one))) == 3
    assert len(split([100] * 5, job_target(500, LANE, four))) == 1


def test_jobs_of_a_slow_model_are_small() -> None:
    """Tenants overtake each other between jobs: none may take a device for seconds."""
    targets = [
        job_target(100_000, LANE, fleet(worker("w1", rate=40_000.0), worker("w2", rate=rate)))
        for rate in (0.0, 1e5, 1e4, 1.0)
    ]
    assert targets == [
        4096,
        4096,
        1024,
        800,
    ]  # the last two: at least 128, and at most 250 jobs a request
    assert job_target(2_000, LANE, fleet(worker("w1", rate=1.0))) == 128


def test_job_ids_differ_by_request_and_match_for_retries() -> None:
    same = request_digest("t", "r", "/Encode", "o/m", b"body")
    assert same == request_digest("t", "r", "/Encode", "o/m", b"body")
    others = [
        ("u", "r", "/Encode", "o/m", b"body"),
        ("t", "s", "/Encode", "o/m", b"body"),
        ("t", "r", "/Score", "o/m", b"body"),
        ("t", "r", "/Encode", "o/n", b"body"),
        ("t", "r", "/Encode", "o/m", b"b"),
    ]
    assert same not in {request_digest(*other) for other in others}
    assert request_digest("ab", "c", "m", "", b"") != request_digest("a", "bc", "m", "", b"")
    assert job_id(same, RequestPart(0, 5, 1)) != job_id(same, RequestPart(0, 6, 1))
