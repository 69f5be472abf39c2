"""A router's view of lanes: which idle ones are forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from shoal.v1 import models_pb2, worker_pb2

from libs.fleet import Fleet, FleetSnapshot, WorkerModelRecord, WorkerRecord
from libs.queue import LaneGauges, LaneKey
from services.router.state.view import RouterView

MODEL = "a/b"


def worker(*adapters: str) -> WorkerRecord:
    record = WorkerModelRecord(
        model=MODEL, state=models_pb2.MODEL_STATE_RESIDENT, bytes=1, load_seconds=1.0,
        tokens_per_second=1.0, idle_seconds=0.0,
        pinned=False, adapters=adapters,
    )  # fmt: skip
    return WorkerRecord(
        worker_id="w", epoch="e", pool="cpu", device="d", memory_bytes=1, used_bytes=0,
        batch_tokens=4096, draining=False,
        heartbeat_ms=0, models={MODEL: record},
    )  # fmt: skip


def lane(model: str, adapter: str = "", *, queued: int = 0, leased: int = 0) -> LaneGauges:
    return LaneGauges(LaneKey("cpu", model, adapter), queued, queued, leased, *[0] * 5)


def test_lane_of_a_misspelt_model_is_shown_until_its_failure_expires() -> None:
    failures = {"typo/a": {"w": worker_pb2.Failure(reason="MODEL_UNREACHABLE")}, "typo/b": {}}
    snapshot = FleetSnapshot({"w": worker()}, {}, failures, 0)
    view = RouterView(cast(Fleet, SimpleNamespace(snapshot=snapshot)))
    view.update(
        [
            lane("typo/c", queued=1),
            lane("typo/b"),
            lane("typo/a"),
            lane(MODEL),
            lane(MODEL, "made/up"),
        ],
        now=0.0,
    )
    assert [gauges.lane.model for gauges in view.shown_lanes()] == [
        MODEL,
        MODEL,
        "typo/a",
        "typo/c",
    ]


def test_idle_lanes_of_invented_models_are_forgotten() -> None:
    snapshot = FleetSnapshot({"w": worker("a/loaded")}, {}, {}, 0)
    view = RouterView(cast(Fleet, SimpleNamespace(snapshot=snapshot)))
    view.update(
        [
            lane(MODEL),
            lane(MODEL, "a/loaded"),
            lane(MODEL, "made/up"),
            lane(MODEL, "made/up-2", queued=1),
            lane(MODEL, "made/up-3", leased=1),
            lane("made/up"),
            lane("made/up", "a/loaded"),
            lane("made/up-2", queued=1),
        ],
        now=0.0,
    )
    assert view.idle_unknown() == [
        LaneKey("cpu", MODEL, "made/up"),
        LaneKey("cpu", "made/up"),
        LaneKey("cpu", "made/up", "a/loaded"),
    ]
