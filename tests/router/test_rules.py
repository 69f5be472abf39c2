"""The rules of admission: broken models and lanes, deadlines, quotas and new lanes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.v1 import models_pb2, worker_pb2

from libs.errors import ModelBroken, ModelNotFound, NoCapacity, QueueFull
from libs.fleet import FleetSnapshot, WorkerModelRecord, WorkerRecord
from libs.queue import LaneKey, Priority
from libs.queue.queue_position import QueuePosition
from services.router.admission.routing.routes import why_broken
from services.router.admission.rules import (
    MAX_UNKNOWN,
    MAX_UNKNOWN_OF_TENANT,
    PLANNED_TIME_SHARE,
    deadline_message,
    may_be_late,
    refuse_broken,
    refuse_late,
    refuse_over_quota,
    refuse_unknown,
)
from services.router.state.throughput import Neighbour, Throughput

MODEL = "a/b"
LANE = LaneKey("cpu", MODEL)
RESIDENT = models_pb2.MODEL_STATE_RESIDENT


def worker(
    worker_id: str, pool: str = "cpu", state: models_pb2.ModelState = RESIDENT, rate: float = 0.0
) -> WorkerRecord:
    record = WorkerModelRecord(
        model=MODEL,
        state=state,
        bytes=1,
        load_seconds=1.0,
        tokens_per_second=rate,
        idle_seconds=0.0,
        pinned=False,
    )
    return WorkerRecord(
        worker_id=worker_id, epoch="e", pool=pool, device="d", memory_bytes=1, used_bytes=0,
        batch_tokens=4096,
        draining=False, heartbeat_ms=0, models={MODEL: record},
    )  # fmt: skip


def fleet(
    *workers: WorkerRecord, failures: dict[str, dict[str, worker_pb2.Failure]] | None = None
) -> FleetSnapshot:
    return FleetSnapshot({one.worker_id: one for one in workers}, {}, failures or {}, 0)


@pytest.mark.parametrize(
    ("reason", "error"), [("MODEL_NOT_FOUND", ModelNotFound), ("MODEL_LOAD_FAILED", ModelBroken)]
)
def test_current_verdict_refuses_request(reason: str, error: type[Exception]) -> None:
    failed = {MODEL: {"w1": worker_pb2.Failure(reason=reason, message="why")}}
    with pytest.raises(error, match="why"):
        refuse_broken(
            LANE, fleet(worker("w1", state=models_pb2.MODEL_STATE_FAILED), failures=failed)
        )
    refuse_broken(LANE, fleet(worker("w1")))


ADAPTER = "o/adapter"
TUNED = LaneKey("cpu", MODEL, ADAPTER)


def tuned(worker_id: str, *adapters: str, reason: str = "", rate: float = 0.0) -> WorkerRecord:
    """A worker with these adapters, which could not load ADAPTER for that reason."""
    plain = worker(worker_id, rate=rate)
    failures = {ADAPTER: worker_pb2.Failure(reason=reason, message="why")} if reason else {}
    return replace(
        plain,
        models={MODEL: replace(plain.models[MODEL], adapters=adapters, failed_adapters=failures)},
    )


def test_one_failed_adapter_load_breaks_lane() -> None:
    failed = fleet(tuned("w1"), tuned("w2", reason="MODEL_NOT_FOUND"))
    with pytest.raises(ModelNotFound, match="why"):
        refuse_broken(TUNED, failed)
    assert why_broken(LANE, failed) is None
    assert why_broken(LaneKey("l4", MODEL, ADAPTER), failed) is None
    assert (
        why_broken(TUNED, fleet(tuned("w1", ADAPTER), tuned("w2", reason="MODEL_NOT_FOUND")))
        is None
    )
    out_of_reach = tuned("w1", reason="NO_CAPACITY")
    assert why_broken(TUNED, fleet(out_of_reach, worker("w2"))) is None  # which has not tried yet
    with pytest.raises(NoCapacity):
        refuse_broken(TUNED, fleet(out_of_reach, tuned("w2", reason="NO_CAPACITY")))


def late(
    seconds: float,
    throughput: Throughput,
    standing: QueuePosition,
    priority: Priority = "interactive",
    *,
    own: int = 1,
    since: int = 0,
    most: float = 1e9,
) -> QueueFull | None:
    """The refusal, or None: the request is let in."""
    try:
        refuse_late(seconds, most, throughput, standing, priority, own_tokens=own, since=since)
    except QueueFull as refusal:
        return refusal
    return None


def ahead(tokens: int) -> QueuePosition:
    return QueuePosition(interactive=tokens, interactive_ahead=tokens)


def test_late_request_is_refused_with_retry_time_of_half_full_lane() -> None:
    refusal = late(60.0, Throughput(100.0), ahead(10_000))
    assert refusal is not None
    assert refusal.retry_after == pytest.approx(60.0)  # 100 - 48 / 2, and never more than a minute
    refusal = late(2.0, Throughput(100.0), ahead(200))
    assert refusal is not None
    assert refusal.retry_after == pytest.approx(2.0 - 2.0 * PLANNED_TIME_SHARE / 2)
    assert late(126.0, Throughput(100.0), ahead(10_000)) is None


def test_unknown_speed_or_empty_lane_admits() -> None:
    assert late(1.0, Throughput(), ahead(10_000)) is None
    assert late(1.0, Throughput(100.0, batch_seconds=1e6), QueuePosition(), own=10**9) is None


def test_batch_time_counts_against_deadline() -> None:
    slow = Throughput(100.0, batch_seconds=1.5)
    assert late(2.0, Throughput(100.0), ahead(100)) is None
    assert late(2.0, slow, ahead(100)) is not None
    assert late(2.0, slow, ahead(10)) is None, "its batch is as large as the queued work"


def test_own_work_counts_in_full_in_backlogged_lane() -> None:
    assert late(10.0, Throughput(100.0, batch_seconds=1.0), ahead(100), own=5000) is None
    assert (
        late(10.0, Throughput(100.0, drain=100.0, batch_seconds=1.0), ahead(100), own=5000)
        is not None
    )
    assert (
        late(100.0, Throughput(100.0, drain=100.0, batch_seconds=1.0), ahead(100), own=5000) is None
    )


def test_tokens_admitted_since_position_was_read_count() -> None:
    assert late(2.0, Throughput(100.0), ahead(100), since=0) is None
    assert late(2.0, Throughput(100.0), ahead(100), since=100) is not None


def test_maximum_wait_applies_and_bulk_may_wait_ten_times_longer() -> None:
    refusal = late(1e6, Throughput(100.0), ahead(7000), most=60.0)
    assert refusal is not None
    assert "at most 60 s are allowed" in refusal.message
    bulk = QueuePosition(bulk=7000, bulk_ahead=7000)
    assert late(1e6, Throughput(100.0), bulk, "bulk", most=60.0) is None
    assert (
        late(1e6, Throughput(100.0), replace(bulk, bulk_ahead=70_000), "bulk", most=60.0)
        is not None
    )


@given(
    st.floats(0.01, 1e5),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.sampled_from(["interactive", "bulk"]),
)
def test_more_time_or_less_work_never_refuses_admitted_request(
    seconds: float, tokens: int, more: int, priority: Priority
) -> None:
    throughput = Throughput(1000.0, batch_seconds=0.5)
    fewer, longer = ahead(tokens), ahead(tokens + more)
    if late(seconds, throughput, longer, priority) is None:
        assert late(seconds, throughput, fewer, priority) is None
    if late(seconds, throughput, fewer, priority) is None:
        assert late(seconds * 1.5, throughput, fewer, priority) is None


@given(st.floats(0.01, 1e5), st.integers(0, 10**9), st.integers(0, 10**9))
def test_refusal_has_retry_time(seconds: float, leased: int, waiting: int) -> None:
    refusal = late(
        seconds,
        Throughput(1000.0, 700.0, 0.5, (Neighbour(3.0, 0.5),)),
        replace(ahead(waiting), leased=leased),
    )
    assert refusal is None or 0.1 <= (refusal.retry_after or 0.0) <= 60.0


def test_tenant_keeps_to_its_quota_at_a_router() -> None:
    refuse_over_quota(50, 40, 100, Throughput(10.0))
    refuse_over_quota(500, 0, 100, Throughput(10.0))
    refuse_over_quota(500, 400, 0, Throughput(10.0))
    with pytest.raises(QueueFull, match="quota is 100") as refusal:
        refuse_over_quota(50, 80, 100, Throughput(10.0))
    assert refusal.value.retry_after == pytest.approx(3.0)


def test_unknown_models_open_bounded_number_of_lanes() -> None:
    def lanes(count: int, tenant: str) -> dict[LaneKey, list[str]]:
        return {LaneKey("cpu", f"made/up-{tenant}-{number}"): [tenant] for number in range(count)}

    refuse_unknown(LANE, "a", lanes(MAX_UNKNOWN_OF_TENANT - 1, "a"))
    refuse_unknown(LANE, "b", lanes(MAX_UNKNOWN_OF_TENANT, "a"))
    refuse_unknown(LANE, "a", lanes(MAX_UNKNOWN_OF_TENANT, "a") | {LANE: ["b"]})
    with pytest.raises(QueueFull, match="of this tenant") as refusal:
        refuse_unknown(LANE, "a", lanes(MAX_UNKNOWN_OF_TENANT, "a"))
    assert (refusal.value.retry_after or 0.0) > 0
    many = {
        lane: names
        for number in range(8)
        for lane, names in lanes(MAX_UNKNOWN // 8, str(number)).items()
    }
    with pytest.raises(QueueFull, match=str(MAX_UNKNOWN)):
        refuse_unknown(LANE, "a", many)


def test_missed_deadline_is_explained() -> None:
    assert "no worker" in deadline_message(LANE, fleet())
    assert "being loaded" in deadline_message(
        LANE, fleet(worker("w1", state=models_pb2.MODEL_STATE_LOADING))
    )
    assert "downloaded" in deadline_message(
        LANE, fleet(worker("w1", state=models_pb2.MODEL_STATE_DOWNLOADING))
    )
    assert "could load" in deadline_message(
        LANE, fleet(worker("w1", state=models_pb2.MODEL_STATE_COLD))
    )
    assert "answered" in deadline_message(LANE, fleet(worker("w1")))
    assert f"loaded {ADAPTER} into {MODEL}" in deadline_message(
        TUNED, fleet(tuned("w1", "o/other"))
    )
    assert "answered" in deadline_message(TUNED, fleet(tuned("w1", ADAPTER)))


def test_queue_position_is_read_for_more_than_a_batch_or_after_backlog() -> None:
    slow = Throughput(1.0, batch_tokens=2048)
    assert not may_be_late(60.0, slow, 2048), "its speed may have been measured in a bad moment"
    assert may_be_late(60.0, slow, 2049)
    assert may_be_late(60.0, replace(slow, drain=1.0), 2048)
    assert not may_be_late(60.0, replace(slow, rate=1e6), 2049)
    assert not may_be_late(60.0, Throughput(), 10**9), "nothing was measured"
