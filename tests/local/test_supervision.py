"""Tests of the rules by which a child is restarted or given up."""

from __future__ import annotations

import signal

import pytest

from services.local.supervision.policy import (
    PAUSES_SECONDS,
    SETTLED_SECONDS,
    WINDOW_SECONDS,
    ChildHistory,
    Role,
    can_serve,
    ending,
    last_fault,
    next_step,
)

ROLES: dict[str, Role] = {
    "redis": "redis",
    "router": "router",
    "scheduler": "scheduler",
    "worker-0": "worker",
    "worker-1": "worker",
}


def test_child_is_restarted_with_backoff_and_given_up_at_its_fourth_end_within_a_minute() -> None:
    history, pauses = ChildHistory(), []
    for now in (0.0, 10.0, 20.0):
        history = history.ended(now)
        assert history.state == "restarting"
        pauses.append(history.pause_seconds)
        history = history.started(now)
        assert history.state == "running"
    assert tuple(pauses) == PAUSES_SECONDS
    assert history.restarts == 3
    assert history.ended(30.0).state == "given up"


def test_child_that_was_killed_after_a_settled_run_is_restarted_without_backoff() -> None:
    history = ChildHistory().ended(0.0).started(0.0).ended(SETTLED_SECONDS + 0.1)
    assert history.pause_seconds == 0.0
    assert next_step(history) == "it is restarted now (restart 2 of at most 3 within 60 s)"
    killed_at_once = history.started(SETTLED_SECONDS + 0.2).ended(SETTLED_SECONDS + 1.0)
    assert killed_at_once.pause_seconds == PAUSES_SECONDS[2]


def test_ends_are_forgotten_after_a_minute() -> None:
    history = ChildHistory()
    for number in range(50):
        history = history.ended(number * WINDOW_SECONDS / 3)
        assert not history.is_given_up
        history = history.started(number * WINDOW_SECONDS / 3)
    assert history.restarts == 50
    assert history.ended(50 * WINDOW_SECONDS).pause_seconds == PAUSES_SECONDS[0]


@pytest.mark.parametrize(
    ("given_up", "serves"),
    [
        ([], True),
        (["worker-0"], True),
        (["worker-0", "scheduler"], True),
        (["worker-0", "worker-1"], False),
        (["router"], False),
        (["redis"], False),
    ],
)
def test_mesh_serves_while_it_has_redis_a_router_and_one_worker(
    given_up: list[str], serves: bool
) -> None:
    assert can_serve(ROLES, given_up) == serves


def test_ended_processes_are_described() -> None:
    assert ending(-signal.SIGKILL) == "was ended by SIGKILL"
    assert ending(-63) == "was ended by signal 63"
    assert ending(3) == "ended with status 3"
    assert ending(None) == "could not be started"
    history = ChildHistory().ended(0.0)
    assert next_step(history) == "it is restarted now (restart 1 of at most 3 within 60 s)"
    assert "in 1 s" in next_step(history.started(0.0).ended(1.0))
    for now in (2.0, 3.0, 4.0):
        history = history.started(now).ended(now)
    assert next_step(history) == "it is given up, because it ended 4 times within 60 s"


def test_last_words_are_the_last_fault_not_the_settings() -> None:
    settings = '{"level": "INFO", "message": "settings", "pool": "cpu"}'
    failed = (
        '{"level": "ERROR", "message": "call failed", "exception": "Traceback:\\n  File '
        'x\\nOSError: disk is full"}'
    )
    warned = '{"level": "WARNING", "message": "cannot listen", "reason": "NO_CAPACITY"}'
    assert last_fault([]) == last_fault([settings]) == last_fault(["", settings, "  "]) == ""
    assert last_fault([warned, failed, settings]) == "call failed: OSError: disk is full"
    assert last_fault([failed, warned, settings, ""]) == "cannot listen: NO_CAPACITY"
    trace = ["Traceback (most recent call last):", '  File "a.py", line 1', "MemoryError: no room"]
    assert last_fault([settings, *trace]) == "MemoryError: no room"
    assert last_fault(["17", '"text"', "[1]"]) == "[1]"
