"""Scores of workers for a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shoal.v1 import models_pb2

from libs.fleet.affinity import HORIZON_SECONDS, affinity, busy_seconds, busy_shares, score
from libs.queue import LaneGauges, LaneKey
from tests.scheduler.snapshots import MODEL, Mesh, holding

LANE = LaneKey("cpu", MODEL)


def gauges(queued_tokens: int) -> list[LaneGauges]:
    return [LaneGauges(LANE, 1, queued_tokens, 0, 0, 0, 0, 0, 0, 0, 0)]


def test_nearer_models_score_higher() -> None:
    mesh = Mesh()
    order = {
        "resident": models_pb2.MODEL_STATE_RESIDENT,
        "loading": models_pb2.MODEL_STATE_LOADING,
        "warm": models_pb2.MODEL_STATE_WARM,
        "cold": models_pb2.MODEL_STATE_COLD,
    }
    for name, state in order.items():
        mesh.worker(name, holding(state=state))
    mesh.worker("absent")
    scores = [affinity(mesh.workers[name], MODEL) for name in (*order, "absent")]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(scores)
    assert (scores[0], scores[-1]) == (1.0, 0.0)


def test_missing_adapter_lowers_the_score_of_a_resident_model_alone() -> None:
    mesh = Mesh()
    mesh.worker("bare", holding())
    mesh.worker("adapted", replace(holding(), adapters=("org/a",)))
    mesh.worker("cold", holding(state=models_pb2.MODEL_STATE_COLD))
    bare, adapted, cold = (affinity(worker, MODEL, "org/a") for worker in mesh.workers.values())
    assert adapted == 1.0
    assert bare == pytest.approx(0.9)
    assert cold == affinity(mesh.workers["cold"], MODEL)


def test_backlog_is_divided_among_copies_of_the_lanes_pool() -> None:
    mesh = Mesh()
    for name in ("a", "b"):
        mesh.worker(name, holding(speed=100.0))
    mesh.worker("other", holding(speed=100.0), pool="gpu")
    fleet = mesh.snapshot().fleet
    assert busy_seconds(fleet, gauges(1000)) == {"a": 5.0, "b": 5.0, "other": 0.0}
    expected = busy_seconds(fleet, gauges(1000), {LANE: 100.0})
    assert expected["a"] == pytest.approx(5.0 + HORIZON_SECONDS / 2)


def test_model_without_a_measured_speed_makes_no_worker_busy() -> None:
    mesh = Mesh()
    mesh.worker("a", holding(speed=0.0))
    assert busy_seconds(mesh.snapshot().fleet, gauges(1000)) == {"a": 0.0}


def test_share_is_at_most_the_whole_horizon() -> None:
    mesh = Mesh()
    mesh.worker("a", holding(speed=1.0))
    fleet = mesh.snapshot().fleet
    assert busy_shares(fleet, gauges(10**6)) == {"a": 1.0}
    assert score(fleet.workers["a"], MODEL, 1.0) == 0.0
