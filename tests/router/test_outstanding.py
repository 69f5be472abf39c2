"""Sums of unanswered tokens by lane and tenant."""

from __future__ import annotations

from libs.queue import LaneKey
from services.router.state.outstanding import Outstanding

LANE, OTHER = LaneKey("cpu", "a/b"), LaneKey("cpu", "a/c")


def test_tokens_are_summed_by_lane_and_tenant() -> None:
    outstanding = Outstanding()
    outstanding.add(LANE, "red", 100)
    outstanding.add(LANE, "red", 20)
    outstanding.add(LANE, "blue", 3)
    outstanding.add(OTHER, "red", 5)
    assert outstanding.lanes == {LANE: {"red": 120, "blue": 3}, OTHER: {"red": 5}}
    assert [outstanding.tenant_tokens(tenant) for tenant in ("red", "blue", "green")] == [125, 3, 0]


def test_answered_jobs_leave_no_entries() -> None:
    outstanding = Outstanding()
    outstanding.open(LANE, is_unknown=True)
    outstanding.add(LANE, "red", 100)
    outstanding.add(LANE, "blue", 3)
    outstanding.add(LANE, "red", -100)
    assert outstanding.lanes == {LANE: {"blue": 3}}
    outstanding.add(LANE, "blue", -3)
    assert (outstanding.lanes, outstanding.unknown()) == ({}, {})


def test_lane_is_unknown_only_if_no_worker_knew_its_model_when_it_was_opened() -> None:
    outstanding = Outstanding()
    outstanding.open(LANE, is_unknown=True)
    outstanding.add(LANE, "red", 1)
    outstanding.open(OTHER, is_unknown=False)
    outstanding.add(OTHER, "red", 1)
    outstanding.open(OTHER, is_unknown=True)
    assert outstanding.unknown() == {LANE: {"red": 1}}
