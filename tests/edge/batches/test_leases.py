"""Leases of batches: one holder, taken over when it dies."""

from __future__ import annotations

from pathlib import Path

import pytest
from shoal.bulk.places import OutputPlace, place

from services.edge.batches.leases import BatchLease, LeaseLost, Observed, latest_generations


@pytest.fixture(params=["folder", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> OutputPlace:
    """A folder and an object store with conditional puts."""
    return place(str(tmp_path) if request.param == "folder" else f"memory:/{tmp_path}")


def test_one_edge_acquires_a_lease(folder: OutputPlace) -> None:
    assert BatchLease.acquire(folder, "batch", 0) is not None
    assert BatchLease.acquire(folder, "batch", 0) is None
    assert latest_generations(folder.names()) == {"batch": 1}


def test_lease_without_renewals_is_taken_over(folder: OutputPlace) -> None:
    first = BatchLease.acquire(folder, "batch", 0)
    assert first is not None
    observed = Observed(lease_seconds=10.0)
    assert not observed.is_free(folder, "batch", 1, 0.0)
    first.renew()
    assert not observed.is_free(folder, "batch", 1, 9.0)
    assert not observed.is_free(folder, "batch", 1, 18.0)
    assert observed.is_free(folder, "batch", 1, 19.5)
    second = BatchLease.acquire(folder, "batch", 1)
    assert second is not None
    with pytest.raises(LeaseLost):
        first.renew()
    with pytest.raises(LeaseLost):
        first.release_if_held()
    second.renew()
    assert latest_generations(folder.names()) == {"batch": 2}


def test_released_lease_is_free_at_once(folder: OutputPlace) -> None:
    lease = BatchLease.acquire(folder, "batch", 0)
    assert lease is not None
    lease.release_if_held()
    assert Observed().is_free(folder, "batch", 1, 0.0)


def test_lease_of_an_ended_batch_is_lost(folder: OutputPlace) -> None:
    lease = BatchLease.acquire(folder, "batch", 0)
    assert lease is not None
    lease.delete()
    with pytest.raises(LeaseLost):
        lease.renew()
    assert Observed().is_free(folder, "batch", 0, 0.0)


def test_leases_of_other_batches_are_forgotten(folder: OutputPlace) -> None:
    assert BatchLease.acquire(folder, "batch", 0) is not None
    observed = Observed(lease_seconds=1.0)
    assert not observed.is_free(folder, "batch", 1, 0.0)
    observed.forget_others(["other"])
    assert not observed.is_free(folder, "batch", 1, 5.0)
