"""Mechanisms that report faults in the GPU's tests and steps: the check for synchronising calls,
and the log of an out-of-memory recovery.
"""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from benchmarks.gpu.steps.memory import _Rungs
from libs.models import InputSequence, Output
from services.worker.jobs.execution import oom_recovery
from tests.support.device import no_synchronization
from tests.worker.test_oom_recovery import out_of_memory, sequence

OFF, ERROR = 0, 2


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The modes that were set. As torch does, the first call of a process sets the mode and then
    warns.
    """
    found: list[int] = []

    def set_mode(mode: int) -> None:
        found.append(mode)
        if len(found) == 1:
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_set_sync_debug_mode", set_mode, raising=False)
    return found


def test_warning_of_the_prototype_raises_nothing(modes: list[int]) -> None:
    with no_synchronization():
        assert modes == [ERROR]
    assert modes == [ERROR, OFF]


def test_mode_is_reset_after_a_synchronising_call(modes: list[int]) -> None:
    with pytest.raises(RuntimeError, match="synchronizing"), no_synchronization():
        raise RuntimeError("called a synchronizing CUDA operation")
    assert modes == [ERROR, OFF]


def test_steps_of_a_recovery_are_recorded() -> None:
    rungs = _Rungs()
    oom_recovery.log.addHandler(rungs)

    def forward(some: list[InputSequence]) -> list[Output]:
        raise out_of_memory()

    recovery = oom_recovery.OomRecovery(
        recover=lambda: None, trim=lambda: None, relieve=lambda _: False
    )
    try:
        recovery.run("org/m", forward, [sequence(3), sequence(5)])
    finally:
        oom_recovery.log.removeHandler(rungs)
    assert rungs.rungs == [
        "free the caches",
        "halve the batch",
        "fail a sequence that does not fit alone",
        "fail a sequence that does not fit alone",
    ]
    assert rungs.level == logging.WARNING
