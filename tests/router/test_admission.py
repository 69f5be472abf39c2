"""What admission decides: where to, at what price, in how many jobs, and whether at all."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, worker_pb2

from libs.errors import ModelBroken, ModelNotFound, QueueFull
from libs.fleet import FleetSnapshot, WorkerModelRecord, WorkerRecord
from libs.queue import LaneGauges, LaneKey
from services.router.admission import (
    MAX_JOBS,
    Load,
    Part,
    job_id,
    job_target,
    lane_rate,
    price,
    refuse_broken,
    refuse_late,
    request_digest,
    split,
    why_broken,
    why_late,
)
from services.router.validation import Sizes, check_extract

MODEL = "a/b"
LANE = LaneKey("cpu", MODEL)
EMPTY = LaneGauges(LANE, *[0] * 8)


RESIDENT = models_pb2.MODEL_STATE_RESIDENT


def worker(worker_id: str, pool: str = "cpu", state: models_pb2.ModelState = RESIDENT, rate: float = 0.0) -> WorkerRecord:
    record = WorkerModelRecord(
        model=MODEL, state=state, bytes=1, load_seconds=1.0, tokens_per_second=rate, idle_seconds=0.0, pinned=False
    )
    return WorkerRecord(
        worker_id=worker_id, epoch="e", pool=pool, device="d", memory_bytes=1, used_bytes=0, batch_tokens=4096,
        draining=False, heartbeat_ms=0, models={MODEL: record},
    )  # fmt: skip


def fleet(*workers: WorkerRecord, failures: dict[str, dict[str, worker_pb2.Failure]] | None = None) -> FleetSnapshot:
    return FleetSnapshot({one.worker_id: one for one in workers}, {}, failures or {}, 0)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=400), st.integers(1, 5000), st.integers(0, 300))
def test_parts_cover_all_items_once_in_order_within_the_target(costs: list[int], target: int, repeated: int) -> None:
    parts = split(costs, target, repeated)
    assert [index for part in parts for index in range(part.first, part.first + part.count)] == list(range(len(costs)))
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


def test_a_middling_request_is_spread_over_the_workers_that_hold_the_model() -> None:
    costs = [100] * 120
    one, four = fleet(worker("w1")), fleet(*(worker(f"w{number}") for number in range(4)))
    assert len(split(costs, job_target(12_000, LANE, four))) == 8
    assert len(split(costs, job_target(12_000, LANE, one))) == 3
    assert len(split([100] * 5, job_target(500, LANE, four))) == 1


def test_a_price_follows_bytes_and_stops_at_the_models_longest_sequence() -> None:
    card = models_pb2.ModelCard(model=MODEL, tokens_per_byte=0.5, max_tokens=50)
    assert price(Sizes([10, 1000], each=10, once=20), card, pb.TRUNCATION_END) == ([12, 50], 10)
    assert price(Sizes([1000]), card, pb.TRUNCATION_NONE) == ([502], 0)
    assert price(Sizes([10]), None, pb.TRUNCATION_END) == ([5], 0)


@pytest.mark.parametrize(("reason", "error"), [("MODEL_NOT_FOUND", ModelNotFound), ("MODEL_LOAD_FAILED", ModelBroken)])
def test_a_standing_verdict_refuses(reason: str, error: type[Exception]) -> None:
    failed = {MODEL: {"w1": worker_pb2.Failure(reason=reason, message="why")}}
    with pytest.raises(error, match="why"):
        refuse_broken(LANE, fleet(worker("w1", state=models_pb2.MODEL_STATE_FAILED), failures=failed))
    refuse_broken(LANE, fleet(worker("w1")))


ADAPTER = "o/adapter"
TUNED = LaneKey("cpu", MODEL, ADAPTER)


def tuned(worker_id: str, *adapters: str, reason: str = "", rate: float = 0.0) -> WorkerRecord:
    """A worker with these adapters, which could not load ADAPTER for that reason."""
    plain = worker(worker_id, rate=rate)
    failures = {ADAPTER: worker_pb2.Failure(reason=reason, message="why")} if reason else {}
    return replace(plain, models={MODEL: replace(plain.models[MODEL], adapters=adapters, failed_adapters=failures)})


def test_the_first_worker_that_cannot_load_an_adapter_decides() -> None:
    failed = fleet(tuned("w1"), tuned("w2", reason="MODEL_NOT_FOUND"))
    with pytest.raises(ModelNotFound, match="why"):
        refuse_broken(TUNED, failed)
    assert why_broken(LANE, failed) is None
    assert why_broken(LaneKey("l4", MODEL, ADAPTER), failed) is None
    assert why_broken(TUNED, fleet(tuned("w1", ADAPTER), tuned("w2", reason="MODEL_NOT_FOUND"))) is None
    assert why_broken(TUNED, fleet(tuned("w1", reason="NO_CAPACITY"))) is None


def test_an_adapters_lane_is_as_fast_as_the_workers_that_have_it() -> None:
    assert lane_rate(TUNED, fleet(tuned("w1", ADAPTER, rate=100), tuned("w2", "o/other", rate=50))) == 100
    assert lane_rate(TUNED, fleet(tuned("w1", rate=100), tuned("w2", "o/other", rate=50))) == 150


def test_the_rate_is_known_once_every_copy_is_measured() -> None:
    assert lane_rate(LANE, fleet(worker("w1", rate=100), worker("w2", rate=50), worker("w3", "l4", rate=9))) == 150
    assert lane_rate(LANE, fleet(worker("w1", rate=100), worker("w2"))) == 0


def test_a_request_that_would_be_late_is_refused_with_the_time_to_wait() -> None:
    busy = replace(EMPTY, queued_tokens=10_000)
    with pytest.raises(QueueFull) as refusal:
        refuse_late(60.0, 100.0, busy, Load(10_000, 1.0), 1.0)
    assert refusal.value.retry_after == pytest.approx(40.0)
    refuse_late(120.0, 100.0, busy, Load(10_000, 1.0), 1.0)
    refuse_late(1.0, 0.0, busy, Load(10_000, 1.0), 1.0)
    refuse_late(1.0, 100.0, EMPTY, Load(0, 1.0), 1.0)


def test_a_light_tenant_is_not_refused_for_a_heavy_ones_backlog() -> None:
    refuse_late(60.0, 100.0, replace(EMPTY, queued_tokens=10_000_000), Load(0, 2.0), 1.0)
    with pytest.raises(QueueFull):
        refuse_late(60.0, 100.0, replace(EMPTY, queued_tokens=10_000_000), Load(9_000_000, 2.0), 1.0)


def test_job_ids_tell_requests_apart_and_retries_together() -> None:
    same = request_digest("t", "r", "/Encode", b"body")
    assert same == request_digest("t", "r", "/Encode", b"body")
    others = [
        ("u", "r", "/Encode", b"body"),
        ("t", "s", "/Encode", b"body"),
        ("t", "r", "/Score", b"body"),
        ("t", "r", "/Encode", b"b"),
    ]
    assert same not in {request_digest(*other) for other in others}
    assert request_digest("ab", "c", "m", b"") != request_digest("a", "bc", "m", b"")
    assert job_id(same, Part(0, 5, 1)) != job_id(same, Part(0, 6, 1))


def test_a_missed_deadline_is_explained() -> None:
    assert "no worker" in why_late(LANE, fleet())
    assert "being loaded" in why_late(LANE, fleet(worker("w1", state=models_pb2.MODEL_STATE_LOADING)))
    assert "downloaded" in why_late(LANE, fleet(worker("w1", state=models_pb2.MODEL_STATE_DOWNLOADING)))
    assert "could load" in why_late(LANE, fleet(worker("w1", state=models_pb2.MODEL_STATE_COLD)))
    assert "answered" in why_late(LANE, fleet(worker("w1")))
    assert f"loaded {ADAPTER} into {MODEL}" in why_late(TUNED, fleet(tuned("w1", "o/other")))
    assert "answered" in why_late(TUNED, fleet(tuned("w1", ADAPTER)))


def test_labels_are_priced_with_every_text_where_they_stand_before_it() -> None:
    """Models without labels of their own read the request's with each text; others never read them."""
    items = [pb.Item(text="abc"), pb.Item(text="abcdef")]
    entities = pb.ExtractRequest(model="t/m", items=items, entities=pb.EntitiesTask(labels=["ab", "cde"]))
    relations = pb.ExtractRequest(model="t/m", items=items, relations=pb.RelationsTask(labels=["in"], entity_labels=["city"]))
    zero_shot = models_pb2.ModelCard(model="t/m", tasks=[models_pb2.TASK_ENTITIES, models_pb2.TASK_RELATIONS])
    fixed = models_pb2.ModelCard(model="t/m", tasks=[models_pb2.TASK_ENTITIES], labels=["ab", "cde"])
    sizes = check_extract(entities, zero_shot)
    plain = check_extract(relations, None)
    relations.items[1].entities.add(start=0, end=3, label="a kind of entity")
    assert check_extract(relations, None) == plain
    relations.items[1].ClearField("entities")
    assert (sizes.each, sizes.once) == (5, 0)
    assert check_extract(relations, zero_shot).each == check_extract(relations, None).each == 6
    assert (check_extract(entities, fixed).each, check_extract(entities, fixed).once) == (0, 5)
