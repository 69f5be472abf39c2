"""Expected cost of a caller's documents."""

from __future__ import annotations

import pytest

from services.worker.jobs.pulling.document_costs import (
    DEFAULT_PAGE_SECONDS,
    HALF_LIFE_SECONDS,
    MAX_PAGE_SECONDS,
    MAX_REMEMBERED_CALLERS,
    DocumentCosts,
)
from services.worker.scheduling.batcher import Caller

HEAVY: Caller = ("heavy", False)
LIGHT: Caller = ("light", False)


def test_pages_of_an_unknown_caller_cost_the_default() -> None:
    assert DocumentCosts().expected_seconds(HEAVY, 7, now=0.0) == pytest.approx(
        7 * DEFAULT_PAGE_SECONDS
    )


def test_expected_cost_approaches_the_last_documents_of_the_same_caller() -> None:
    costs = DocumentCosts()
    for _ in range(10):
        costs.record(HEAVY, pages=2, seconds=16.0, now=0.0)
    assert costs.expected_seconds(HEAVY, 3, now=0.0) == pytest.approx(24.0, rel=0.01)
    assert costs.expected_seconds(LIGHT, 3, now=0.0) == pytest.approx(3 * DEFAULT_PAGE_SECONDS)


def test_expected_cost_of_a_page_is_bounded() -> None:
    costs = DocumentCosts()
    for _ in range(20):
        costs.record(HEAVY, pages=1, seconds=1e6, now=0.0)
    assert costs.expected_seconds(HEAVY, 1, now=0.0) <= MAX_PAGE_SECONDS


def test_excess_halves_while_the_caller_sends_no_documents() -> None:
    costs = DocumentCosts()
    costs.record(HEAVY, pages=1, seconds=10.0, now=100.0)
    excess = costs.expected_seconds(HEAVY, 1, now=100.0) - DEFAULT_PAGE_SECONDS
    later = costs.expected_seconds(HEAVY, 1, now=100.0 + HALF_LIFE_SECONDS) - DEFAULT_PAGE_SECONDS
    assert later == pytest.approx(excess / 2)
    assert costs.expected_seconds(HEAVY, 1, now=100.0 + 40 * HALF_LIFE_SECONDS) == pytest.approx(
        DEFAULT_PAGE_SECONDS
    )


def test_only_the_most_recent_callers_are_remembered() -> None:
    costs = DocumentCosts()
    for number in range(MAX_REMEMBERED_CALLERS + 1):
        costs.record((f"tenant {number}", False), pages=1, seconds=10.0, now=0.0)
    assert costs.expected_seconds(("tenant 0", False), 1, now=0.0) == pytest.approx(
        DEFAULT_PAGE_SECONDS
    )
    assert costs.expected_seconds(("tenant 1", False), 1, now=0.0) > DEFAULT_PAGE_SECONDS
