"""Notes on the leader's last orders and their outcomes."""

from __future__ import annotations

import pytest
from shoal.v1 import models_pb2, worker_pb2

from services.scheduler.planning.placement import Order
from services.scheduler.planning.recent_orders import NOTE_SECONDS, RecentOrders
from tests.scheduler.snapshots import MODEL, Mesh, holding

LOAD = Order("load", MODEL, "cpu", "w", "1")
EVICT = Order("evict", MODEL, "cpu", "w", "1")


def notes(mesh: Mesh, order: Order, *, after: float = 1.0) -> dict[str, str]:
    recent = RecentOrders()
    recent.ordered([order], {MODEL: "ordered"}, 0.0)
    return recent.notes(mesh.snapshot().fleet, after)


def test_order_in_progress_has_its_note() -> None:
    mesh = Mesh()
    mesh.worker("w", holding(state=models_pb2.MODEL_STATE_LOADING))
    assert notes(mesh, LOAD) == {MODEL: "ordered"}


@pytest.mark.parametrize(
    ("order", "state", "outcome"),
    [
        (LOAD, models_pb2.MODEL_STATE_RESIDENT, "done at"),
        (EVICT, models_pb2.MODEL_STATE_COLD, "done at"),
        (EVICT, models_pb2.MODEL_STATE_RESIDENT, ""),
    ],
)
def test_outcome_is_read_from_the_models_state(
    order: Order, state: models_pb2.ModelState, outcome: str
) -> None:
    mesh = Mesh()
    mesh.worker("w", holding(state=state))
    found = notes(mesh, order)[MODEL]
    assert found.startswith(f"ordered; {outcome}") if outcome else found == "ordered"


def test_failed_load_and_lost_worker_are_outcomes() -> None:
    mesh = Mesh()
    mesh.worker("w")
    mesh.failures[MODEL] = {"w": worker_pb2.Failure()}
    assert "failed at" in notes(mesh, LOAD)[MODEL]
    mesh.worker("w", epoch="2")
    assert "the worker was gone at" in notes(mesh, LOAD)[MODEL]
    mesh.workers.clear()
    assert "the worker was gone at" in notes(mesh, LOAD)[MODEL]


def test_outcome_stays_when_the_state_changes_again() -> None:
    mesh = Mesh()
    mesh.worker("w", holding())
    recent = RecentOrders()
    recent.ordered([LOAD], {MODEL: "ordered"}, 0.0)
    first = recent.notes(mesh.snapshot().fleet, 1.0)
    mesh.workers.clear()
    assert recent.notes(mesh.snapshot(60.0).fleet, 2.0) == first


def test_note_is_forgotten_and_orders_without_a_note_have_none() -> None:
    mesh = Mesh()
    mesh.worker("w")
    assert notes(mesh, LOAD, after=NOTE_SECONDS) == {}
    recent = RecentOrders()
    recent.ordered([LOAD], {}, 0.0)
    assert recent.notes(mesh.snapshot().fleet, 1.0) == {}
