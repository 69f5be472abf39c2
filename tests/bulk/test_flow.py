"""The number of chunks in flight, and rates."""

from __future__ import annotations

from shoal.bulk.flow import FlowControl, JobThroughput


def test_limit_grows_by_one_for_each_round_of_answers() -> None:
    flow = FlowControl(4)
    limits = []
    for _ in range(12):
        limits.append(flow.limit)
        flow.succeeded()
    assert limits == [2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4]


def test_overload_halves_the_limit_once_for_chunks_sent_before() -> None:
    flow = FlowControl(8)
    for _ in range(100):
        flow.succeeded()
    assert flow.limit == 8
    flow.overloaded(sent_at=1.0, now=3.0)
    flow.overloaded(sent_at=2.0, now=4.0)
    assert flow.limit == 4
    for time in (5.0, 6.0, 7.0, 8.0):
        flow.overloaded(sent_at=time, now=time)
    assert flow.limit == 1


def test_rates_are_of_the_last_seconds() -> None:
    rate = JobThroughput(0.0)
    rate.add(100, 1000, 10.0)
    assert rate.per_second(20.0) == (5.0, 50.0)
    for second in range(60, 100):
        rate.add(10, 20, float(second))
    assert rate.per_second(99.0) == (10.0, 20.0)
