"""Who may load a model, and when a model is given up: pure decisions."""

from __future__ import annotations

import pytest
from shoal.v1 import models_pb2, worker_pb2

from libs.fleet import FleetSnapshot, WorkerModelRecord, WorkerRecord, may_claim
from libs.fleet.claims import load_seconds, wait_seconds
from libs.queue import LaneGauges, LaneKey

DOWNLOADING, COLD, LOADING, WARM, RESIDENT, FAILED = (
    models_pb2.MODEL_STATE_DOWNLOADING,
    models_pb2.MODEL_STATE_COLD,
    models_pb2.MODEL_STATE_LOADING,
    models_pb2.MODEL_STATE_WARM,
    models_pb2.MODEL_STATE_RESIDENT,
    models_pb2.MODEL_STATE_FAILED,
)
BROKEN = worker_pb2.Failure(reason="MODEL_LOAD_FAILED")
NOT_FOUND = worker_pb2.Failure(reason="MODEL_NOT_FOUND")
UNREACHABLE = worker_pb2.Failure(reason="MODEL_UNREACHABLE")
MODEL = "org/model"


def worker(
    worker_id: str,
    state: models_pb2.ModelState | None = None,
    *,
    pool: str = "cpu",
    draining: bool = False,
    seconds: float = 0,
    speed: float = 0,
) -> WorkerRecord:
    held = (
        {}
        if state is None
        else {MODEL: WorkerModelRecord(MODEL, state, 0, seconds, speed, 0, False)}
    )
    return WorkerRecord(worker_id, "1", pool, "cpu", 0, 0, 8192, draining, 0, held)


def fleet(
    *workers: WorkerRecord, failures: dict[str, worker_pb2.Failure] | None = None, size: int = 0
) -> FleetSnapshot:
    cards = {MODEL: models_pb2.ModelCard(model=MODEL, bytes=size)} if size else {}
    return FleetSnapshot(
        {one.worker_id: one for one in workers}, cards, {MODEL: failures} if failures else {}, 0
    )


def lane(queued: int, leased: int = 0) -> LaneGauges:
    return LaneGauges(LaneKey("cpu", MODEL), 1, queued, leased, 1, 0, 0, 0, 0)


@pytest.mark.parametrize("state", [None, COLD, WARM])
def test_work_for_a_model_that_no_one_serves_is_claimed(
    state: models_pb2.ModelState | None,
) -> None:
    assert may_claim(lane(1), fleet(worker("w", state), worker("v", pool="gpu")), "w")


@pytest.mark.parametrize(
    ("gauges", "snapshot"),
    [
        pytest.param(lane(0, 5), fleet(worker("w")), id="no work waits"),
        pytest.param(lane(1), fleet(worker("v")), id="unknown worker"),
        pytest.param(lane(1), fleet(worker("w", draining=True)), id="draining"),
        pytest.param(lane(1), fleet(worker("w", pool="gpu")), id="other pool"),
        pytest.param(lane(1), fleet(worker("w", LOADING)), id="already loading"),
        pytest.param(lane(10**9), fleet(worker("w", RESIDENT, speed=1)), id="already resident"),
        pytest.param(lane(1), fleet(worker("w"), failures={"w": BROKEN}), id="it failed before"),
        pytest.param(lane(1), fleet(worker("w"), worker("v", LOADING)), id="loading elsewhere"),
        pytest.param(
            lane(1), fleet(worker("w"), worker("v", DOWNLOADING)), id="downloading elsewhere"
        ),
        pytest.param(lane(1), fleet(worker("w", DOWNLOADING)), id="already downloading"),
        pytest.param(
            lane(1000),
            fleet(worker("w"), worker("v", RESIDENT, speed=1000, seconds=2)),
            id="served soon enough",
        ),
        pytest.param(
            lane(10**9), fleet(worker("w"), worker("v", RESIDENT)), id="served at unknown speed"
        ),
    ],
)
def test_ineligible_workers_do_not_claim(gauges: LaneGauges, snapshot: FleetSnapshot) -> None:
    assert not may_claim(gauges, snapshot, "w")


def test_another_copy_is_claimed_once_the_wait_exceeds_a_load() -> None:
    served = worker("v", RESIDENT, speed=1000, seconds=2)
    assert not may_claim(lane(1000, 1000), fleet(worker("w"), served), "w")
    assert may_claim(lane(1001, 1000), fleet(worker("w"), served), "w")
    # A copy on its way counts as one that is as fast as those that are there.
    assert not may_claim(lane(3000), fleet(worker("w"), served, worker("u", LOADING)), "w")
    assert may_claim(lane(4001), fleet(worker("w"), served, worker("u", LOADING)), "w")
    # A copy that will take no more work does not count.
    assert may_claim(
        lane(1), fleet(worker("w"), worker("v", RESIDENT, draining=True, speed=1000)), "w"
    )


def test_estimates() -> None:
    assert wait_seconds(lane(10), fleet(worker("w"))) is None
    assert (
        wait_seconds(
            lane(300, 100), fleet(worker("v", RESIDENT, speed=50), worker("u", RESIDENT, speed=150))
        )
        == 2
    )
    assert load_seconds(MODEL, fleet(worker("w"))) == 5
    assert load_seconds(MODEL, fleet(worker("w"), size=3 * 10**9)) == 4
    assert (
        load_seconds(
            MODEL, fleet(worker("w", COLD, seconds=7), worker("v", RESIDENT, seconds=9), size=1)
        )
        == 9
    )


def test_model_is_given_up_after_three_workers_or_all() -> None:
    workers = [worker(name) for name in "abcd"]
    assert fleet(*workers).verdict(MODEL, "cpu") is None
    assert fleet(*workers, failures={"a": BROKEN, "b": BROKEN}).verdict(MODEL, "cpu") is None
    assert (
        fleet(*workers, failures={"a": BROKEN, "b": NOT_FOUND, "c": NOT_FOUND}).verdict(
            MODEL, "cpu"
        )
        == BROKEN
    )
    assert fleet(workers[0], failures={"a": NOT_FOUND}).verdict(MODEL, "cpu") == NOT_FOUND
    assert (
        fleet(*workers, failures={"a": NOT_FOUND, "b": UNREACHABLE, "c": NOT_FOUND}).verdict(
            MODEL, "cpu"
        )
        == UNREACHABLE
    )
    assert fleet(*workers[:2], failures={"a": BROKEN, "b": BROKEN}).verdict(MODEL, "cpu") == BROKEN


def test_failures_of_other_pools_and_of_the_dead_do_not_count() -> None:
    assert (
        fleet(worker("a"), worker("b", pool="gpu"), failures={"b": BROKEN, "gone": BROKEN}).verdict(
            MODEL, "cpu"
        )
        is None
    )
    assert fleet(worker("b", pool="gpu"), failures={"b": BROKEN}).verdict(MODEL, "cpu") is None


@pytest.mark.parametrize("state", [DOWNLOADING, LOADING, WARM, RESIDENT])
def test_held_model_is_not_given_up(state: models_pb2.ModelState) -> None:
    failures = {"a": BROKEN, "b": BROKEN, "c": BROKEN}
    assert (
        fleet(
            *(worker(name, FAILED) for name in "abc"), worker("d", state), failures=failures
        ).verdict(MODEL, "cpu")
        is None
    )


def test_model_on_disk_is_not_given_up_as_not_found() -> None:
    workers = [*(worker(name) for name in "abc"), worker("d", COLD)]
    assert fleet(*workers, failures=dict.fromkeys("abc", NOT_FOUND)).verdict(MODEL, "cpu") is None
    assert fleet(*workers, failures=dict.fromkeys("abc", BROKEN)).verdict(MODEL, "cpu") == BROKEN
    assert (
        fleet(*workers, failures=dict.fromkeys("abcd", NOT_FOUND)).verdict(MODEL, "cpu")
        == NOT_FOUND
    )
