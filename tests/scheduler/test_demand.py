"""The number of workers that a pool needs: every term of the formula computed by hand, and what
must hold for any input.
"""

from __future__ import annotations

import math
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal.v1 import models_pb2

from libs.catalog.pools import Pools, PoolSpec
from services.scheduler.demand import (
    Demand,
    DemandOptions,
    Goals,
    ModelWork,
    PoolDemand,
    PoolInput,
    Track,
    compute_need,
    is_active,
)
from services.scheduler.rates import ArrivalRate, ColdStarts, LaneArrivals, Speeds
from services.worker.scheduling.meter import Meter
from tests.scheduler.snapshots import MODEL, Mesh, holding

GOALS = Goals(max_workers=1000, drain_seconds=30.0, target_utilization=0.75)


def work(
    queued: int = 0, leased: int = 0, fast: float = 0.0, slow: float = 0.0, speed: float = 100.0
) -> ModelWork:
    return ModelWork(MODEL, queued, leased, ArrivalRate(fast, slow), speed)


def pool(
    *models: ModelWork,
    ready: int = 0,
    starting: int = 0,
    cold_start: float = 60.0,
    first_ready: float = 60.0,
    preempting: int = 0,
    unhealthy: int = 0,
    is_loading: bool = False,
    is_pinned: bool = False,
    hot_bytes: int = 0,
    usable_bytes: int = 0,
    last_arrival: float | None = 0.0,
) -> PoolInput:
    """Return a pool at time 0 with an arrival just now."""
    return PoolInput(
        pool="cpu",
        at=0.0,
        cold_start_seconds=cold_start,
        first_ready_seconds=first_ready,
        models=models,
        ready=ready,
        starting=starting,
        preempting=preempting,
        unhealthy=unhealthy,
        is_loading=is_loading,
        is_pinned=is_pinned,
        hot_bytes=hot_bytes,
        usable_bytes=usable_bytes,
        last_arrival=last_arrival,
    )


def pools(**keys: float) -> Pools:
    spec = PoolSpec(
        "cpu", cold_start_seconds=60.0, max_workers=20, target_utilization=0.75, drain_seconds=30.0
    )
    changed = PoolSpec(**{slot: getattr(spec, slot) for slot in PoolSpec.__slots__} | keys)
    return Pools("cpu", MappingProxyType({"cpu": changed}))


def one(demand: Demand) -> PoolDemand:
    return demand.demands["cpu"]


def test_arrivals_need_workers_at_the_target_utilization() -> None:
    # 300 tokens/s at 100 tokens/s a worker are 3 busy workers, 4 at 75 %. ready = 4: no backlog is
    # left when a fifth would arrive.
    need = compute_need(pool(work(fast=300.0, slow=300.0), ready=4), GOALS)
    assert need.workers == pytest.approx(4.0)
    assert need.reason == "steady"


@pytest.mark.parametrize(("fast", "offered"), [(199.0, 1.0), (200.0, 2.0), (800.0, 8.0)])
def test_burst_counts_once_it_is_twice_the_usual(fast: float, offered: float) -> None:
    assert work(fast=fast, slow=100.0).offered_load == pytest.approx(offered)


@pytest.mark.parametrize("generated", [40, 400])
@pytest.mark.parametrize("occupied", [1.0, 1 / 64])
def test_generations_are_the_load_of_the_share_that_they_occupy(
    generated: int, occupied: float
) -> None:
    """Prices count the longest answer, 400 tokens here, whatever the model generates. A worker that
    always computes one text has room for more.
    """
    prompt, longest, meter = 10, 400, Meter()
    for _ in range(10):
        for step in range(generated):
            is_last = step == generated - 1
            meter.add_steps(
                prompt + 1 if step == 0 else 1,
                0.02,
                longest - generated if is_last else 0,
                occupied,
            )
    arrivals = (prompt + longest) / (generated * 0.02)
    one = work(fast=arrivals, slow=arrivals, speed=meter.tokens_per_second)
    assert one.offered_load == pytest.approx(occupied, rel=0.1)


def test_backlog_is_worked_off_in_the_drain_time() -> None:
    # W = (6000 + 600 / 2) / 100 = 63 s; nothing arrives and no worker reduces it until then: 63 /
    # 30 workers.
    need = compute_need(pool(work(queued=6000, leased=600)), GOALS)
    assert need.workers == pytest.approx(63 / 30)
    assert need.reason == "drain"


def test_backlog_left_at_new_workers_start_counts() -> None:
    # offered 3, ready 1, the first new worker in 20 s: 100 + 2 × 20 = 140 s of work by then; 3 +
    # 140 / 30.
    need = compute_need(
        pool(work(queued=10_000, fast=300, slow=300), ready=1, first_ready=20.0), GOALS
    )
    assert need.workers == pytest.approx(3 + 140 / 30)
    # With 5 there, 2 are free of arrivals: 100 - 2 × 20 = 60 s are left.
    need = compute_need(
        pool(work(queued=10_000, fast=300, slow=300), ready=5, first_ready=20.0, cold_start=30.0),
        GOALS,
    )
    assert need.workers == pytest.approx(3 + 60 / 30)


def test_no_worker_is_started_for_work_done_before_its_start() -> None:
    # 59 s of work, 1 worker, and another one would take 60 s: it would find nothing to do. One
    # token more, and it would.
    goals = Goals(max_workers=1000, drain_seconds=1.0)
    enough = compute_need(pool(work(queued=5900), ready=1, first_ready=0.0), goals)
    assert (enough.workers, enough.reason) == (1.0, "enough")
    assert compute_need(
        pool(work(queued=6001), ready=1, first_ready=0.0), goals
    ).workers == pytest.approx(60.01)
    # Workers that are starting already are kept.
    assert (
        compute_need(pool(work(queued=5900), ready=1, starting=2, first_ready=0.0), goals).workers
        == 3.0
    )


def test_workers_that_will_be_lost_are_replaced() -> None:
    need = compute_need(
        pool(work(fast=150.0, slow=150.0), ready=1, preempting=2, unhealthy=1, first_ready=0.0),
        GOALS,
    )
    assert need.workers == pytest.approx(5.0)
    assert need.lost == 3


def test_floors() -> None:
    assert compute_need(pool(), GOALS).workers == 0
    assert compute_need(pool(), Goals(min_workers=2)).reason == "minimum"
    assert compute_need(pool(is_pinned=True), GOALS).workers == 1
    # Ten bytes of models in use, four a worker.
    assert compute_need(pool(hot_bytes=10, usable_bytes=4), GOALS).workers == 3
    assert compute_need(pool(work(queued=10**9)), Goals(max_workers=7)).workers == 7


def test_pool_that_lies_idle_needs_nothing_though_averages_never_end() -> None:
    assert compute_need(pool(work(fast=0.01, slow=0.01), last_arrival=-59.0), GOALS).workers > 0
    assert compute_need(pool(work(fast=0.01, slow=0.01), last_arrival=-61.0), GOALS).workers == 0


@pytest.mark.parametrize(
    ("seen", "goals", "active"),
    [
        (pool(work(queued=1), last_arrival=None), GOALS, True),
        (pool(work(leased=1), last_arrival=None), GOALS, True),
        (pool(is_loading=True, last_arrival=None), GOALS, True),
        (pool(is_pinned=True, last_arrival=None), GOALS, True),
        (pool(last_arrival=None), Goals(min_workers=1), True),
        (pool(last_arrival=None), GOALS, False),
        (pool(last_arrival=-59.0), GOALS, True),
        (pool(last_arrival=-61.0), GOALS, False),
        (pool(last_arrival=-61.0), Goals(keep_warm_seconds=120.0), True),
        (pool(last_arrival=-1.0), Goals(keep_warm_seconds=0.0), False),
        (pool(ready=3, last_arrival=None), GOALS, False),
    ],
)
def test_active_conditions_keep_pool_above_zero(
    seen: PoolInput, goals: Goals, active: bool
) -> None:
    assert is_active(seen, goals) is active


works = st.builds(
    work,
    queued=st.integers(0, 10**9),
    leased=st.integers(0, 10**7),
    fast=st.floats(0, 1e7),
    slow=st.floats(0, 1e7),
    speed=st.floats(0.1, 1e6),
)
inputs = st.builds(
    pool,
    works,
    works,
    ready=st.integers(0, 50),
    starting=st.integers(0, 50),
    cold_start=st.floats(0, 1000),
    first_ready=st.floats(0, 1000),
    preempting=st.integers(0, 5),
    unhealthy=st.integers(0, 5),
    hot_bytes=st.integers(0, 10**12),
    usable_bytes=st.integers(0, 10**11),
)
goals_of_any_kind = st.builds(
    Goals,
    min_workers=st.integers(0, 20),
    max_workers=st.integers(0, 100),
    drain_seconds=st.floats(1, 1000),
    target_utilization=st.floats(0.05, 1),
)


@given(inputs, goals_of_any_kind)
def test_need_is_a_number_within_bounds(seen: PoolInput, goals: Goals) -> None:
    workers = compute_need(seen, goals).workers
    assert math.isfinite(workers)
    assert 0 <= workers <= goals.max_workers


@given(inputs, goals_of_any_kind, st.integers(1, 10**8))
def test_more_backlog_never_needs_fewer_workers(seen: PoolInput, goals: Goals, tokens: int) -> None:
    first = seen.models[0]
    longer = ModelWork(
        first.model,
        first.queued_tokens + tokens,
        first.leased_tokens,
        first.rate,
        first.tokens_per_second,
    )
    more = PoolInput(
        **{slot: getattr(seen, slot) for slot in PoolInput.__slots__}
        | {"models": (longer, seen.models[1])}
    )
    assert compute_need(more, goals).workers >= compute_need(seen, goals).workers - 1e-9


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0.5, 100), st.floats(0, 20)), min_size=1, max_size=60))
def test_answers_rise_at_once_and_fall_late(steps: list[tuple[float, float]]) -> None:
    track, at, past = Track(), 0.0, []
    before = 0
    for seconds, need in steps:
        at += seconds
        past.append((at, math.ceil(need - 1e-9)))
        desired = track.decide(need, at, 300.0)
        recent = max(whole for moment, whole in past if moment >= at - 300.0)
        assert desired >= need - 1e-9
        assert desired == before if before >= recent and need > before - 0.9 else desired == recent
        before = desired


def test_averages_of_arrivals() -> None:
    mesh, arrivals = Mesh(), LaneArrivals()
    mesh.lane(0, enqueued=5_000_000)
    (lane,) = mesh.gauges
    arrivals.update(mesh.snapshot().gauges, mesh.at)
    assert (
        arrivals.rate(lane) == ArrivalRate()
    )  # the arrival times before this process started are unknown
    for _ in range(1200):
        mesh.lane(0, enqueued=mesh.gauges[lane].enqueued_tokens + 50)
        arrivals.update(mesh.snapshot(0.5).gauges, mesh.at)
    steady = arrivals.rate(lane)
    assert steady.fast == pytest.approx(100.0, rel=1e-6)
    assert steady.slow == pytest.approx(100.0, rel=2e-3)
    arrivals.update(mesh.snapshot(10.0).gauges, mesh.at)
    quiet = arrivals.rate(lane)
    assert quiet.fast == pytest.approx(100 / math.e, rel=1e-6)
    assert quiet.slow == pytest.approx(100 * math.exp(-10 / 90), rel=2e-3)


def test_counter_that_begins_again_is_no_negative_arrival() -> None:
    mesh, arrivals = Mesh(), LaneArrivals()
    mesh.lane(0, enqueued=1000)
    (lane,) = mesh.gauges
    arrivals.update(mesh.snapshot().gauges, mesh.at)
    mesh.lane(0, enqueued=600)
    arrivals.update(mesh.snapshot(1.0).gauges, mesh.at)
    first = arrivals.rate(lane)
    assert first.fast > 0
    mesh.gauges.clear()
    arrivals.update(mesh.snapshot(1.0).gauges, mesh.at)
    assert 0 < arrivals.rate(lane).fast < first.fast
    mesh.lane(0, enqueued=600)  # Redis lost its data: the counter restarted at 0
    arrivals.update(mesh.snapshot(1.0).gauges, mesh.at)
    assert arrivals.rate(lane).fast > first.fast


def test_scheduler_that_starts_knows_a_rate_as_soon_as_others() -> None:
    mesh, young = Mesh(), LaneArrivals()
    mesh.lane(0, enqueued=10**6)
    (lane,) = mesh.gauges
    young.update(mesh.snapshot().gauges, mesh.at)
    for _ in range(40):
        mesh.lane(0, enqueued=mesh.gauges[lane].enqueued_tokens + 50)
        young.update(mesh.snapshot(0.5).gauges, mesh.at)
    assert young.rate(lane).slow == pytest.approx(100.0, rel=0.02)


def test_speeds_are_guessed_then_measured_and_small_batches_are_not_believed() -> None:
    speeds = Speeds()
    assert speeds.estimate("gpu", MODEL, "cuda", 0) > speeds.estimate("cpu", MODEL, "cpu", 0) > 0
    assert speeds.estimate("cpu", MODEL, "cpu", 10**8) > speeds.estimate("cpu", MODEL, "cpu", 10**9)
    speeds.measured("cpu", MODEL, 1000.0, is_loaded=True, seconds=0.0)
    assert speeds.estimate("cpu", MODEL, "cpu", 0) == 1000.0
    speeds.measured("cpu", MODEL, 100.0, is_loaded=False, seconds=6.0)
    assert speeds.estimate("cpu", MODEL, "cpu", 0) == pytest.approx(100 + 900 * math.exp(-0.01))
    speeds.measured("cpu", MODEL, 100.0, is_loaded=True, seconds=60.0)
    assert speeds.estimate("cpu", MODEL, "cpu", 0) < 105
    speeds.measured("cpu", MODEL, 2000.0, is_loaded=False, seconds=0.5)
    assert speeds.estimate("cpu", MODEL, "cpu", 0) == 2000.0


def test_cold_starts_are_measured_from_wanting_to_the_first_heartbeat() -> None:
    starts = ColdStarts()
    starts.record_workers(["old"], 0.0, 500.0)
    starts.want(3, 10.0)
    assert (starts.starting(10.0, 60.0), starts.first_ready_seconds(30.0, 60.0)) == (3, 40.0)
    starts.record_workers(["old", "a"], 50.0, 500.0)
    starts.record_workers(["old", "a", "b", "c"], 60.0, 500.0)
    assert starts.seconds(500.0) == 50.0  # 40, 50, 50
    assert starts.starting(60.0, 60.0) == 0
    starts.record_workers(["old", "a", "b", "c", "nobody-asked"], 70.0, 500.0)
    assert starts.seconds(500.0) == 50.0


def test_overdue_worker_is_not_counted() -> None:
    starts = ColdStarts()
    starts.want(1, 0.0)
    starts.want(2, 100.0)
    assert (starts.starting(179.0, 60.0), starts.starting(181.0, 60.0), starts.young(119.0)) == (
        2,
        1,
        2,
    )
    assert starts.first_ready_seconds(181.0, 60.0) == 0.0
    starts.want(1, 181.0)
    assert starts.starting(150.0, 60.0) == 1  # the one asked for last is taken back


def record_workers(starts: ColdStarts, name: str, wanted_at: float, seconds: float) -> None:
    """A worker is wanted, and there `seconds` later; it takes 60 until more was measured."""
    starts.want(1, wanted_at)
    starts.record_workers([name], wanted_at + seconds, 60.0)


def test_one_start_changes_the_expected_duration_of_a_start_little() -> None:
    starts = ColdStarts()
    for number in range(4):
        record_workers(starts, f"usual-{number}", number * 10_000.0, 50.0)
    record_workers(starts, "slow", 50_000.0, 3_000.0)
    assert starts.seconds(60.0) == 50.0
    # Five in a row are not an exception, but each counts as at most three usual ones.
    for number in range(5):
        record_workers(starts, f"slow-{number}", 60_000.0 + number * 10_000.0, 3_000.0)
    assert starts.seconds(60.0) == 150.0


def test_starts_that_take_longer_than_configured_are_learnt() -> None:
    starts = ColdStarts()
    for number in range(12):
        record_workers(starts, f"worker-{number}", number * 10_000.0, 400.0)
    assert starts.seconds(60.0) == 400.0
    unknown = ColdStarts()
    for number in range(12):
        unknown.want(1, number * 10_000.0)
        unknown.record_workers([f"worker-{number}"], number * 10_000.0 + 40.0, 0.0)
    assert unknown.seconds(0.0) == 40.0


def test_overdue_workers_are_not_matched_with_new_ones() -> None:
    starts = ColdStarts()
    starts.want(5, 0.0)  # a quota allows none of them
    for number in range(3):
        wanted = 1000.0 * (number + 1)
        starts.want(6, wanted)
        starts.record_workers([f"replacement-{number}"], wanted + 50.0, 60.0)
        starts.want(5, wanted + 50.0)
    assert starts.seconds(60.0) == 50.0


def test_from_zero_to_many_in_one_step() -> None:
    mesh, demand = Mesh(), Demand(pools())
    demand.update(mesh.snapshot())
    assert (one(demand).desired, one(demand).active) == (0, False)
    demand._speeds.measured("cpu", MODEL, 100.0, is_loaded=True, seconds=0.0)
    mesh.lane(18_000)
    demand.update(mesh.snapshot(0.5))
    assert (one(demand).desired, one(demand).active) == (20, True)


def test_fewer_workers_only_after_the_hold() -> None:
    mesh, demand = Mesh(), Demand(pools())
    demand.update(mesh.snapshot())
    demand.update(
        mesh.snapshot(301.0)
    )  # so that it no longer matters what this process found when it started
    mesh.worker("a", holding(speed=100.0))
    mesh.lane(30_000, enqueued=0)
    demand.update(mesh.snapshot(1.0))
    assert (
        one(demand).desired == 8
    )  # 300 s of work, 60 of them done before another worker could arrive; in 30 s
    mesh.lane(0, enqueued=0)
    for name in "bcdefgh":
        mesh.worker(name, holding(speed=100.0))
    for _ in range(300):
        demand.update(mesh.snapshot(1.0))
        assert one(demand).desired == 8
        assert one(demand).active is False
    demand.update(mesh.snapshot(1.0))
    assert one(demand).desired == 0


def test_hold_is_five_cold_starts_where_that_is_longer() -> None:
    mesh, demand = Mesh(), Demand(pools(cold_start_seconds=100.0, node_seconds=100.0))
    demand.update(mesh.snapshot())
    demand.update(mesh.snapshot(11.0))
    for number in range(20):
        mesh.worker(f"worker-{number}")
    mesh.lane(10**9, enqueued=0)
    demand.update(mesh.snapshot(1.0))
    mesh.lane(0, enqueued=0)
    demand.update(mesh.snapshot(1000.0))
    assert one(demand).desired == 20
    demand.update(mesh.snapshot(1.0))
    assert one(demand).desired == 0


def started(mesh: Mesh) -> Demand:
    """Return a demand past its start-up hold that knows the model's speed."""
    demand = Demand(pools(max_workers=3))
    demand._speeds.measured("cpu", MODEL, 100.0, is_loaded=True, seconds=0.0)
    demand.update(mesh.snapshot())
    demand.update(mesh.snapshot(301.0))
    return demand


def idle_after_a_burst(demand: Demand, mesh: Mesh) -> None:
    """Three workers were wanted, arrived after 2.5 s and are done; a minute later the pool is not
    active any more.
    """
    mesh.lane(9_000)
    demand.update(mesh.snapshot(1.0))
    for name in ("a", "b", "c"):
        mesh.worker(name, holding(speed=100.0), epoch=f"{mesh.at}")
    demand.update(mesh.snapshot(2.5))
    mesh.lane(0)
    demand.update(mesh.snapshot(61.0))
    assert (one(demand).desired, one(demand).active) == (3, False)


def test_workers_removed_by_keda_are_not_requested_again() -> None:
    mesh = Mesh()
    demand = started(mesh)
    idle_after_a_burst(demand, mesh)
    mesh.workers.clear()
    demand.update(mesh.snapshot(1.0))
    assert (one(demand).desired, one(demand).active, one(demand).input.starting) == (0, False, 0)
    mesh.lane(10)
    demand.update(mesh.snapshot(1.0))
    assert (one(demand).desired, one(demand).active) == (
        1,
        True,
    )  # a short text brings one worker, not the last burst's three


def test_worker_that_is_gone_while_nothing_needs_the_pool_is_not_replaced() -> None:
    mesh = Mesh()
    demand = started(mesh)
    idle_after_a_burst(demand, mesh)
    del mesh.workers["a"]
    demand.update(mesh.snapshot(1.0))
    assert one(demand).desired == 2
    mesh.lane(10)
    demand.update(mesh.snapshot(1.0))
    assert one(demand).desired == 2


def test_cold_start_begins_when_the_pool_is_needed() -> None:
    mesh = Mesh()
    demand = started(mesh)
    for _ in range(3):
        idle_after_a_burst(demand, mesh)
        mesh.workers.clear()  # KEDA's cooldown was shorter than the hold
        demand.update(mesh.snapshot(1.0))
        demand.update(mesh.snapshot(150.0))
    assert one(demand).input.cold_start_seconds == pytest.approx(2.5)


def test_scheduler_that_starts_keeps_the_workers_it_finds() -> None:
    mesh, demand = Mesh(), Demand(pools())
    demand.update(mesh.snapshot())  # Redis was emptied too: workers report again one by one
    for name in "abc":
        mesh.worker(name)
        demand.update(mesh.snapshot(1.0))
    assert (one(demand).desired, one(demand).active) == (3, True)
    demand.update(mesh.snapshot(296.0))
    assert (one(demand).desired, one(demand).active) == (3, True)
    demand.update(mesh.snapshot(2.0))
    assert (one(demand).desired, one(demand).active) == (0, False)


@pytest.mark.parametrize("failed_on", [["a"], ["x", "y", "z"]])
def test_unservable_work_keeps_no_worker(failed_on: list[str]) -> None:
    mesh, demand = Mesh(), Demand(pools())
    demand.update(mesh.snapshot())
    mesh.worker("a")
    mesh.lane(10**6)
    mesh.fail(MODEL, *failed_on)
    demand.update(mesh.snapshot(301.0))
    assert (one(demand).desired, one(demand).active, one(demand).need.workers) == (0, False, 0)
    mesh.worker("b", holding())  # it can, after all
    demand.update(mesh.snapshot(1.0))
    assert (one(demand).desired, one(demand).active) == (20, True)


def test_three_dead_workers_failures_count_though_no_worker_is_left() -> None:
    mesh, demand = Mesh(), Demand(pools())
    mesh.lane(10**6)
    mesh.fail(MODEL, "gone-1", "gone-2")
    demand.update(mesh.snapshot())
    assert one(demand).active
    mesh.fail(MODEL, "gone-1", "gone-2", "gone-3")
    demand.update(mesh.snapshot(1.0))
    assert not one(demand).active


def test_loading_model_is_activity() -> None:
    mesh, demand = Mesh(), Demand(pools())
    demand.update(mesh.snapshot())
    mesh.worker("a", holding(state=models_pb2.MODEL_STATE_LOADING, speed=0.0))
    demand.update(mesh.snapshot(400.0))
    assert (one(demand).active, one(demand).desired) == (True, 1)
    mesh.worker("a", holding())
    demand.update(mesh.snapshot(1.0))
    assert not one(demand).active


def test_spot_notices_and_missed_heartbeats_are_compensated() -> None:
    mesh, demand = Mesh(), Demand(pools(min_workers=2))
    for name in "ab":
        mesh.worker(name)
    demand.update(mesh.snapshot())
    assert (one(demand).desired, one(demand).input.ready) == (2, 2)
    mesh.worker("a", preempted_in_seconds=25.0, draining=True)
    demand.update(mesh.snapshot(1.0))
    assert (one(demand).desired, one(demand).input.ready, one(demand).live) == (3, 1, 2)
    mesh.worker("b", silent_seconds=7.0)
    demand.update(mesh.snapshot(1.0))
    assert (one(demand).desired, one(demand).input.ready, one(demand).live) == (4, 0, 2)


def test_stopping_worker_does_not_count() -> None:
    mesh, demand = Mesh(), Demand(pools())
    mesh.worker("a", draining=True)
    demand.update(mesh.snapshot())
    assert (one(demand).live, one(demand).desired) == (0, 0)


def test_models_in_use_need_memory() -> None:
    mesh, demand = Mesh(), Demand(pools(memory_bytes=4 << 20))
    mesh.worker("a", *(holding(f"org/{name}", speed=1e6, size=1 << 20) for name in "abcdefghi"))
    demand.update(mesh.snapshot())
    for name in "abcdefghi":
        mesh.lane(0, enqueued=10, model=f"org/{name}")
    mesh.worker("b", holding("org/larger-than-these", size=5 << 20), pool="gpu")
    mesh.lane(1, model="org/larger-than-these")
    demand.update(mesh.snapshot(0.5))
    assert (one(demand).desired, one(demand).need.reason) == (3, "memory")


def test_callers_may_ask_for_their_own_answer() -> None:
    mesh, demand = Mesh(), Demand(pools())
    mesh.worker("a", holding(speed=100.0))
    demand.update(mesh.snapshot())
    mesh.lane(6_000, enqueued=0)
    demand.update(mesh.snapshot(0.5))

    def desired(**options: float) -> int:
        decision = demand.demand_for("cpu", DemandOptions(**options))  # type: ignore[arg-type]
        assert decision is not None
        return decision.desired

    assert (
        desired(),
        desired(min_warm=5),
        desired(drain_seconds=600.0),
        desired(drain_seconds=1.0),
    ) == (1, 5, 1, 1)
    mesh.lane(12_000, enqueued=0)
    demand.update(mesh.snapshot(0.5))
    assert (
        desired(),
        desired(min_warm=5),
        desired(drain_seconds=600.0),
        desired(drain_seconds=1.0),
    ) == (2, 5, 1, 20)
    assert demand.demand_for("gpu") is None


def test_fallback_pool_replaces_missing_spot_workers() -> None:
    spot = PoolSpec("spot", cold_start_seconds=60.0, spot=True, min_workers=3)
    demand = Demand(
        Pools(
            "spot", MappingProxyType({"spot": spot, "safe": PoolSpec("safe", fallback_for="spot")})
        )
    )
    mesh = Mesh()
    mesh.worker("a", pool="spot")
    demand.update(mesh.snapshot())
    demand.update(mesh.snapshot(119.0))
    assert (demand.demands["safe"].desired, demand.demands["safe"].active) == (0, False)
    demand.update(mesh.snapshot(2.0))
    assert (demand.demands["safe"].desired, demand.demands["safe"].active) == (2, True)
    mesh.worker("b", pool="spot")
    mesh.worker("c", pool="spot")
    demand.update(mesh.snapshot(1.0))
    demand.update(mesh.snapshot(301.0))
    assert (demand.demands["safe"].desired, demand.demands["safe"].active) == (0, False)


def both(first: Demand, second: Demand) -> tuple[tuple[int, bool], tuple[int, bool]]:
    return (one(first).desired, one(first).active), (one(second).desired, one(second).active)


def test_new_scheduler_reports_the_numbers_of_the_leader() -> None:
    mesh = Mesh()
    leader = started(mesh)
    idle_after_a_burst(leader, mesh)
    second = Demand(leader.specs)
    second.update(mesh.snapshot(1.0, leader=leader))
    leader.update(mesh.snapshot(leader=leader, leads=True))
    assert both(leader, second) == ((3, False), (3, False))
    assert one(second).input.cold_start_seconds == one(leader).input.cold_start_seconds == 2.5
    del mesh.workers["a"]
    for _ in range(301):
        leader.update(mesh.snapshot(1.0, leader=leader, leads=True))
        second.update(mesh.snapshot(leader=leader))
        assert len({*both(leader, second)}) == 1
    assert both(leader, second) == ((0, False), (0, False))
    mesh.lane(6_000)  # the current need is answered before the leader has published it
    second.update(mesh.snapshot(0.1, leader=leader))
    assert (one(second).desired, one(second).active) == (3, True)


def test_new_leader_continues_published_numbers() -> None:
    mesh = Mesh()
    leader = started(mesh)
    idle_after_a_burst(leader, mesh)
    second = Demand(leader.specs)
    second.update(mesh.snapshot(1.0, leader=leader))
    second.update(mesh.snapshot(1.0, leads=True))
    assert (one(second).desired, one(second).active) == (3, False)
    assert one(second).input.cold_start_seconds == 2.5


def test_schedulers_agree_after_redis_restarted_without_its_data() -> None:
    """One has looked before the request was enqueued again, to the same count, and the other has
    not.
    """
    mesh, first, second = Mesh(), Demand(pools()), Demand(pools())
    for demand in (first, second):
        demand.update(mesh.snapshot())
        mesh.at -= 1.0
    mesh.at += 400.0
    mesh.lane(0, enqueued=100, used_at=mesh.at)
    for demand in (first, second):
        demand.update(mesh.snapshot())
    mesh.gauges.clear()
    mesh.worker("a", holding())
    first.update(mesh.snapshot(300.0))
    mesh.lane(0, enqueued=100, used_at=mesh.at)
    for demand in (first, second):
        demand.update(mesh.snapshot(1.0))
        mesh.at -= 1.0
    assert both(first, second) == ((1, True), (1, True))
    mesh.at += 61.0
    for demand in (first, second):
        demand.update(mesh.snapshot())
    assert not one(first).active
    assert not one(second).active


def test_without_a_file_pools_are_those_that_are_seen() -> None:
    mesh, demand = Mesh(), Demand(Pools())
    assert demand.knows("any")
    mesh.worker("a", pool="gpu")
    demand.update(mesh.snapshot())
    assert [demand.knows(name) for name in ("cpu", "gpu", "any")] == [True, True, False]
    mesh.workers.clear()  # Redis may be emptied: nothing is forgotten at once
    demand.update(mesh.snapshot(1.0))
    assert (demand.demands["gpu"].desired, demand.demands["gpu"].active) == (1, True)
    demand.update(mesh.snapshot(3700.0))
    assert not demand.knows("gpu")
    assert not Demand(pools()).knows("gpu")


def test_same_look_twice_changes_nothing() -> None:
    mesh, demand = Mesh(), Demand(pools())
    mesh.lane(1000)
    snapshot = mesh.snapshot()
    first = dict(demand.update(snapshot))
    assert demand.update(snapshot) == first


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 200_000), st.integers(0, 25), st.floats(0.5, 40)),
        min_size=1,
        max_size=40,
    )
)
def test_over_time_answers_keep_within_bounds_and_fall_late(
    steps: list[tuple[int, int, float]],
) -> None:
    mesh, demand = Mesh(), Demand(pools(max_workers=20))
    needs: list[tuple[float, int]] = []
    for queued, workers, seconds in steps:
        mesh.lane(queued)
        mesh.workers.clear()
        for number in range(workers):
            mesh.worker(f"worker-{number}", holding(speed=100.0))
        demand.update(mesh.snapshot(seconds))
        decision = one(demand)
        needs.append((mesh.at, math.ceil(decision.need.workers - 1e-9)))
        if not decision.active:  # a missing worker is not kept
            needs = [(at, min(whole, workers)) for at, whole in needs]
        hold = max(300.0, 5 * decision.input.cold_start_seconds)
        assert 0 <= decision.desired <= 20
        assert decision.desired >= max(whole for at, whole in needs if at >= mesh.at - hold)
        assert decision.active or not queued
