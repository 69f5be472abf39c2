"""Decisions of admission: the lane, the price, the number of jobs, and refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, worker_pb2

from libs.errors import ModelBroken, ModelNotFound, NoCapacity, QueueFull
from libs.fleet import FleetSnapshot, WorkerModelRecord, WorkerRecord
from libs.queue import LaneKey, Priority
from libs.queue.queue_position import QueuePosition
from services.router.admission.pricing import price
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
from services.router.admission.splitting import (
    MAX_JOBS,
    RequestPart,
    job_id,
    job_target,
    request_digest,
    split,
)
from services.router.admission.validation.requests import check_extract
from services.router.admission.validation.sizes import Sizes
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


def test_price_follows_bytes_and_stops_at_the_models_longest_sequence() -> None:
    card = models_pb2.ModelCard(model=MODEL, tokens_per_byte=0.5, max_tokens=50)
    assert price(
        Sizes([10, 1000], per_sequence_bytes=10, per_job_bytes=20), card, pb.TRUNCATION_END
    ) == ([12, 50], 10)
    assert price(Sizes([1000]), card, pb.TRUNCATION_NONE) == ([502], 0)
    assert price(Sizes([10]), None, pb.TRUNCATION_END) == ([5], 0)


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


def test_labels_read_with_each_text_are_priced_for_each() -> None:
    """Models without fixed labels read the request's labels with each text; others never read
    them.
    """
    items = [pb.Item(text="abc"), pb.Item(text="abcdef")]
    entities = pb.ExtractRequest(
        model="t/m", items=items, entities=pb.EntitiesTask(labels=["ab", "cde"])
    )
    relations = pb.ExtractRequest(
        model="t/m", items=items, relations=pb.RelationsTask(labels=["in"], entity_labels=["city"])
    )
    zero_shot = models_pb2.ModelCard(
        model="t/m", tasks=[models_pb2.TASK_ENTITIES, models_pb2.TASK_RELATIONS]
    )
    fixed = models_pb2.ModelCard(
        model="t/m", tasks=[models_pb2.TASK_ENTITIES], labels=["ab", "cde"]
    )
    sizes = check_extract(entities, zero_shot)
    plain = check_extract(relations, None)
    relations.items[1].entities.add(start=0, end=3, label="a kind of entity")
    assert check_extract(relations, None) == plain
    relations.items[1].ClearField("entities")
    assert (sizes.per_sequence_bytes, sizes.per_job_bytes) == (5, 0)
    assert (
        check_extract(relations, zero_shot).per_sequence_bytes
        == check_extract(relations, None).per_sequence_bytes
        == 6
    )
    assert (
        check_extract(entities, fixed).per_sequence_bytes,
        check_extract(entities, fixed).per_job_bytes,
    ) == (0, 5)


def test_queue_position_is_read_for_more_than_a_batch_or_after_backlog() -> None:
    slow = Throughput(1.0, batch_tokens=2048)
    assert not may_be_late(60.0, slow, 2048), "its speed may have been measured in a bad moment"
    assert may_be_late(60.0, slow, 2049)
    assert may_be_late(60.0, replace(slow, drain=1.0), 2048)
    assert not may_be_late(60.0, replace(slow, rate=1e6), 2049)
    assert not may_be_late(60.0, Throughput(), 10**9), "nothing was measured"
