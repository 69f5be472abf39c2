"""Tests of the rule by which heartbeats are stored again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from shoal.v1 import models_pb2

from libs.fleet import WorkerModelRecord, WorkerRecord
from libs.fleet.drift import MEASURE_MS, Change, change

MODEL = WorkerModelRecord(
    "org/model",
    models_pb2.MODEL_STATE_RESIDENT,
    100,
    1.0,
    1000.0,
    idle_seconds=5.0,
    pinned=False,
    resident_seconds=60.0,
    tokens_per_byte=0.25,
    measured_batch_tokens=2000,
)
WORKER = WorkerRecord(
    "w", "1", "cpu", "cpu", 1000, 100, 8192, False, 0, {"org/model": MODEL}, preempted_in_seconds=60
)


def later(seconds: float, worker: dict[str, Any], model: dict[str, Any]) -> WorkerRecord:
    """The next heartbeat, with these values instead of those expected."""
    aged = {"idle_seconds": 5.0 + seconds, "resident_seconds": 60.0 + seconds} | model
    values = {"preempted_in_seconds": 60 - seconds, "models": {"org/model": replace(MODEL, **aged)}}
    fields: dict[str, Any] = {"heartbeat_ms": round(seconds * 1000), **values, **worker}
    return replace(WORKER, **fields)


@pytest.mark.parametrize(
    ("worker", "model", "expected"),
    [
        ({}, {}, "none"),
        ({}, {"idle_seconds": 8.5}, "none"),
        ({}, {"tokens_per_second": 1090.0, "tokens_per_byte": 0.24}, "none"),
        ({}, {"measured_batch_tokens": 2150}, "none"),
        ({}, {"idle_seconds": 0.1}, "measured"),  # it was used
        ({}, {"idle_seconds": 0.0, "held_jobs": 2}, "measured"),
        ({}, {"tokens_per_second": 1200.0}, "measured"),
        ({}, {"measured_batch_tokens": 4000}, "measured"),
        ({}, {"tokens_per_second": 2000.0}, "changed"),
        ({}, {"tokens_per_second": 0.0}, "changed"),
        ({}, {"resident_seconds": 1.0}, "measured"),
        ({}, {"state": models_pb2.MODEL_STATE_WARM}, "changed"),
        ({}, {"pinned": True}, "changed"),
        ({}, {"adapters": ("a",)}, "changed"),
        ({"used_bytes": 101}, {}, "changed"),
        ({"draining": True}, {}, "changed"),
        ({"epoch": "2"}, {}, "changed"),
        ({"plan": 7}, {}, "changed"),
        ({"models": {}}, {}, "changed"),
        ({"preempted_in_seconds": None}, {}, "changed"),
        ({"preempted_in_seconds": 30.0}, {}, "changed"),
    ],
)
def test_change_of_the_next_heartbeat(
    worker: dict[str, Any], model: dict[str, Any], expected: Change
) -> None:
    assert change(WORKER, later(2.0, worker, model)) == expected
    longer = MEASURE_MS / 1000
    if expected != "none":  # others are stored later
        assert change(WORKER, later(longer, worker, model)) == "changed"
    assert change(WORKER, later(longer, {}, {})) == "none"


def test_model_in_use_says_nothing_new() -> None:
    busy = replace(WORKER, models={"org/model": replace(MODEL, held_jobs=3, idle_seconds=0.0)})
    after = later(3600.0, {"preempted_in_seconds": 0.0}, {"held_jobs": 1, "idle_seconds": 0.0})
    assert change(busy, after) == "none"
