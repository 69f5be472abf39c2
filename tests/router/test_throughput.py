"""Throughput of a lane, and the waiting time of a request in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.v1 import models_pb2

from libs.fleet import FleetSnapshot, WorkerModelRecord, WorkerRecord
from libs.queue import LaneGauges, LaneKey
from libs.queue.queue_position import QueuePosition
from services.router.state.throughput import (
    BULK_SHARE,
    MIN_DRAIN_SHARE,
    Drains,
    Neighbour,
    Throughput,
    holders,
    lane_rate,
    lane_throughput,
    wait_seconds,
)
from services.worker.scheduling.meter import Meter

LANE = LaneKey("cpu", "a/b")
TUNED = LaneKey("cpu", "a/b", "a/tuned")
EMPTY = LaneGauges(LANE, *[0] * 8)


def worker(
    worker_id: str,
    rates: dict[str, float],
    *,
    pool: str = "cpu",
    adapters: tuple[str, ...] = (),
    draining: bool = False,
) -> WorkerRecord:
    """Return a worker with these models resident."""
    models = {
        model: WorkerModelRecord(
            model, models_pb2.MODEL_STATE_RESIDENT, 1, load_seconds=1.0, tokens_per_second=rate,
            idle_seconds=0.0, pinned=False,
            adapters=adapters,
        )
        for model, rate in rates.items()
    }  # fmt: skip
    return WorkerRecord(worker_id, "e", pool, "d", 1, 1, 2048, draining, 0, models)


def fleet(*workers: WorkerRecord) -> FleetSnapshot:
    return FleetSnapshot({one.worker_id: one for one in workers}, {}, {}, 0)


def rate(lane: LaneKey, *workers: WorkerRecord) -> float:
    return lane_rate(lane, holders(lane, fleet(*workers)))


def test_lane_is_as_fast_as_the_workers_of_its_pool_that_serve_it() -> None:
    assert (
        rate(
            LANE,
            worker("w1", {"a/b": 100}),
            worker("w2", {"a/b": 50}),
            worker("w3", {"a/b": 9}, pool="l4"),
        )
        == 150
    )
    assert rate(LANE, worker("w1", {"a/b": 100}), worker("w2", {"a/b": 50}, draining=True)) == 100
    assert rate(LANE, worker("w1", {"c/d": 100})) == 0


def test_copy_that_was_not_measured_is_taken_for_average() -> None:
    assert (
        rate(LANE, worker("w1", {"a/b": 100}), worker("w2", {"a/b": 50}), worker("w3", {"a/b": 0}))
        == 225
    )
    assert rate(LANE, worker("w1", {"a/b": 0})) == 0


def test_adapters_lane_is_as_fast_as_the_workers_that_have_it() -> None:
    assert (
        rate(
            TUNED,
            worker("w1", {"a/b": 100}, adapters=("a/tuned",)),
            worker("w2", {"a/b": 50}, adapters=("o/other",)),
        )
        == 100
    )
    assert (
        rate(TUNED, worker("w1", {"a/b": 100}), worker("w2", {"a/b": 50}, adapters=("o/other",)))
        == 150
    )


def test_other_models_on_the_same_workers_take_their_share_as_long_as_they_have_work() -> None:
    both = {"a/b": 100.0, "c/d": 10.0}
    snapshot = fleet(worker("w1", both), worker("w2", {"a/b": 100.0}))
    throughput = lane_throughput(
        LANE, snapshot, {("cpu", "c/d"): 30, ("cpu", "e/f"): 10**6, ("gpu", "c/d"): 10**6}
    )
    assert throughput == Throughput(200.0, 0.0, 2048 / 100, (Neighbour(3.0, 0.5),), 4096)
    assert throughput.seconds(200) == pytest.approx(1.0 + 0.5), (
        "half of its workers serve both in turn"
    )
    assert throughput.seconds(2000) == pytest.approx(10.0 + 1.5), (
        "the other's work is done after 3 s"
    )


def test_slower_drain_counts_down_to_a_limit() -> None:
    assert Throughput(100.0, drain=50.0).seconds(100) == pytest.approx(2.0)
    assert Throughput(100.0, drain=500.0).seconds(100) == pytest.approx(1.0)
    assert Throughput(100.0, drain=0.001).seconds(100) == pytest.approx(1.0 / MIN_DRAIN_SHARE)


def test_nothing_is_known_before_a_worker_has_reported_a_speed() -> None:
    """Found by the chaos driver: a model's only holder had died, and the drain of the lane without
    workers was applied to its successor.
    """
    assert not lane_throughput(LANE, fleet(worker("w1", {"a/b": 0})), {}, drain=0.1).is_known
    assert not lane_throughput(LANE, fleet(), {}, drain=70.0).is_known, (
        "nobody has the model: it must be loaded first"
    )


def test_wait_by_priority() -> None:
    throughput = Throughput(100.0)
    lane = QueuePosition(
        leased=100, interactive=400, bulk=900, interactive_ahead=200, bulk_ahead=300
    )
    interactive = (100 + 200 / (1 - BULK_SHARE)) / 100
    assert wait_seconds(throughput, lane, "interactive") == pytest.approx(interactive)
    assert wait_seconds(throughput, replace(lane, bulk=0), "interactive") == pytest.approx(3.0)
    assert wait_seconds(throughput, replace(lane, interactive_ahead=0), "interactive") < 1.2, (
        "a light tenant passes a heavy one's backlog"
    )
    assert wait_seconds(throughput, lane, "bulk") == pytest.approx(1.0 + 3.0 / BULK_SHARE), (
        "interactive work continues to arrive"
    )
    assert wait_seconds(throughput, replace(lane, interactive=20), "bulk") == pytest.approx(
        1.0 + 0.2 + 3.0
    )
    assert wait_seconds(
        throughput, replace(lane, interactive=20, bulk_ahead=1), "bulk"
    ) == pytest.approx(1.0 + 0.1), "its tenth is sooner"
    assert wait_seconds(throughput, replace(lane, interactive=0), "bulk") == pytest.approx(
        1.0 + 3.0
    )
    assert wait_seconds(
        throughput, replace(lane, bulk=0), "interactive", since=100
    ) == pytest.approx(4.0)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), max_size=5),
    st.floats(1, 1e5),
    st.floats(0, 1e5),
    st.integers(0, 10**7),
    st.integers(0, 10**7),
)
def test_more_work_never_takes_less_time(
    beside: list[tuple[float, float]], speed: float, drain: float, tokens: int, more: int
) -> None:
    throughput = Throughput(speed, drain, 0.0, tuple(Neighbour(*one) for one in beside))
    assert tokens / speed <= throughput.seconds(tokens) * (1 + 1e-9)
    assert throughput.seconds(tokens) <= throughput.seconds(tokens + more)


def begin_pull(drains: Drains, *gauges: LaneGauges) -> None:
    """A look a second."""
    for second, gauge in enumerate(gauges, 100):
        drains.record({LANE: gauge}, float(second))


def backlogged(queued: int, enqueued: int, leased: int = 0) -> LaneGauges:
    return replace(EMPTY, queued_tokens=queued, leased_tokens=leased, enqueued_tokens=enqueued)


def test_drain_is_tokens_per_second_while_backlogged() -> None:
    drains = Drains()
    begin_pull(drains, *(backlogged(1000, 1000 + second * 50, leased=100) for second in range(6)))
    assert drains.rate(LANE) == pytest.approx(50.0)


def test_short_or_interrupted_backlog_gives_no_drain() -> None:
    short, dry = Drains(), Drains()
    begin_pull(short, backlogged(1000, 1000), backlogged(950, 1000))
    begin_pull(dry, *(backlogged(10, 1000 + second * 50) for second in range(6)))
    assert short.rate(LANE) == dry.rate(LANE) == 0


def test_second_without_a_batch_is_part_of_the_average() -> None:
    drains = Drains()
    steps = [0, 0, 200, 200, 400, 400, 600, 600, 800, 800]
    begin_pull(drains, *(backlogged(1000, 1000 + enqueued) for enqueued in steps))
    assert drains.rate(LANE) == pytest.approx(100.0, rel=0.3)


def test_removed_lane_is_forgotten() -> None:
    drains = Drains()
    begin_pull(drains, *(backlogged(1000, 1000 + second * 50) for second in range(6)))
    drains.record({}, 106.0)
    drains.record({LANE: backlogged(1000, 1000)}, 107.0)
    assert drains.rate(LANE) == 0


def test_speed_measured_on_small_batches_refuses_nothing_that_full_ones_could_do() -> None:
    def measured_on(tokens: int) -> float:
        one = worker("w1", {"a/b": 100})
        record = replace(one.models["a/b"], measured_batch_tokens=tokens)
        return rate(LANE, replace(one, models={"a/b": record}))

    assert measured_on(0) == 100, "a worker that does not report"
    assert measured_on(2048) == measured_on(512) == 100
    assert measured_on(8) == 100 * 64


def test_speed_of_a_generative_model_is_taken_as_reported() -> None:
    meter = Meter()
    for _ in range(3):
        meter.add_steps(8, 0.01, 0, 8 / 64)
    one = worker("w1", {"a/b": meter.tokens_per_second})
    record = replace(one.models["a/b"], measured_batch_tokens=meter.batch_tokens)
    assert rate(LANE, replace(one, models={"a/b": record})) == pytest.approx(64 / 0.01)


def test_another_tenants_job_counts_for_a_batch_however_large_it_is_and_ones_own_counts_whole() -> (
    None
):
    throughput = Throughput(rate=1000.0, batch_tokens=2000)
    huge = QueuePosition(
        leased=500_000, interactive=900_000, interactive_ahead=300_000, interactive_jobs=1
    )
    assert wait_seconds(throughput, huge, "interactive") == 3 * 2 + 2
    assert wait_seconds(throughput, huge, "interactive", own=800_000) == 500 + 300
    assert wait_seconds(throughput, huge, "bulk") == pytest.approx(3 * 2)
    small = QueuePosition(
        leased=5000, interactive=3000, interactive_ahead=3000, interactive_jobs=30
    )
    assert wait_seconds(throughput, small, "interactive") == 8
