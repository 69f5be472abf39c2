"""Each recovery step alone and in order, with a model that records its calls, and random sets of
sequences that never fit.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import InternalError, OutOfMemory
from libs.models import InputSequence, Output
from services.worker.jobs.execution.oom_recovery import (
    CAPPED_BATCHES,
    MAX_HALVINGS,
    MAX_RELIEFS_PER_BATCH,
    Caps,
    OomRecovery,
    RecoveryResult,
)
from services.worker.machine.shortage import is_out_of_memory

MODEL = "org/m"
Broken = Callable[[list[int]], Exception | None]
"""Returns the error that a forward pass over sequences of these lengths raises, if any."""


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def sequence(tokens: int) -> InputSequence:
    return InputSequence(np.full(tokens, tokens, dtype=np.int32))


@dataclass
class FakeDevice:
    """Runs sequences, or fails as `broken` returns. Has `idle` models that can be evicted. `calls`
    records its calls in order.
    """

    broken: Broken
    idle: int = 0
    lost: bool = False
    calls: list[str] = field(default_factory=list)

    def forward(self, sequences: list[InputSequence]) -> list[Output]:
        self.calls.append(f"forward {len(sequences)}")
        error = self.broken([one.tokens for one in sequences])
        if error is not None:
            raise error
        return [one.ids[:1].astype(np.float32) for one in sequences]

    def recover(self) -> None:
        self.calls.append("recover")
        if self.lost:
            raise RuntimeError("device lost")

    def trim(self) -> None:
        self.calls.append("trim")

    def relieve(self, keep: str) -> bool:
        assert keep == MODEL
        self.calls.append("relieve")
        self.idle -= 1
        return self.idle >= 0

    def run(self, *tokens: int) -> RecoveryResult:
        return OomRecovery(self.recover, self.trim, self.relieve).run(
            MODEL, self.forward, [sequence(count) for count in tokens]
        )

    @property
    def tries(self) -> list[int]:
        """The number of sequences of each attempted forward pass."""
        return [int(call.split()[1]) for call in self.calls if call.startswith("forward")]


def answered(recovery: RecoveryResult, *tokens: int) -> bool:
    """Return whether each sequence has its output."""
    return [outcome[0] for outcome in recovery.outcomes if isinstance(outcome, np.ndarray)] == list(
        tokens
    )


def failing_first(count: int, make: Callable[[], Exception] = out_of_memory) -> Broken:
    """Raise in the first `count` passes."""
    left = [make() for _ in range(count)]
    return lambda lengths: left.pop() if left else None


def above(tokens: int) -> Broken:
    """Run out of memory with more tokens in a batch."""
    return lambda lengths: out_of_memory() if sum(lengths) > tokens else None


def fitted(device: FakeDevice, count: int) -> Broken:
    """Run out of memory until `count` models were evicted."""
    return lambda lengths: out_of_memory() if device.calls.count("relieve") < count else None


def test_successful_batch_has_no_side_effects() -> None:
    device = FakeDevice(failing_first(0))
    recovery = device.run(3, 5)
    assert answered(recovery, 3, 5)
    assert recovery.is_clean
    assert device.calls == ["forward 2"]


def test_caches_are_freed_first() -> None:
    device = FakeDevice(failing_first(1), idle=3)
    recovery = device.run(3, 5)
    assert answered(recovery, 3, 5)
    assert (recovery.is_clean, recovery.fitted_tokens) == (False, 0)
    assert device.calls == ["forward 2", "recover", "trim", "forward 2"]


def test_idle_models_are_then_evicted_one_by_one() -> None:
    device = FakeDevice(failing_first(0), idle=3)
    device.broken = fitted(device, 2)
    recovery = device.run(3, 5)
    assert answered(recovery, 3, 5)
    assert recovery.fitted_tokens == 0
    assert device.calls == [
        "forward 2", "recover", "trim", "forward 2", "recover", "relieve",
        "forward 2", "recover", "relieve", "forward 2",
    ]  # fmt: skip


def test_batch_is_then_halved_and_the_fitting_size_reported() -> None:
    device = FakeDevice(above(20))
    recovery = device.run(*[10] * 8)
    assert answered(recovery, *[10] * 8)
    assert recovery.fitted_tokens == 20
    # Caches are free and no model is idle: neither step is retried below.
    assert device.tries == [8, 8, 4, 2, 2, 4, 2, 2]
    assert device.calls.count("relieve") == 1
    assert device.calls.count("trim") == 1
    assert device.calls.count("recover") == 4


def test_evictions_are_limited_for_a_batch_but_not_for_one_sequence() -> None:
    device = FakeDevice(above(20), idle=99)
    assert answered(device.run(10, 10, 10), 10, 10, 10)
    assert device.calls.count("relieve") == MAX_RELIEFS_PER_BATCH
    single = FakeDevice(failing_first(0), idle=99)
    single.broken = fitted(single, 2 * MAX_RELIEFS_PER_BATCH)
    assert answered(single.run(10), 10)


def test_only_sequences_that_do_not_fit_alone_fail() -> None:
    device = FakeDevice(above(100))
    recovery = device.run(7, 1234, 9)
    assert answered(recovery, 7, 9)
    error = recovery.outcomes[1]
    assert isinstance(error, OutOfMemory)
    assert "1,234 tokens" in error.message
    assert error.retry_after is None


def test_halving_is_limited_and_followed_by_single_sequences() -> None:
    device = FakeDevice(lambda lengths: out_of_memory() if len(lengths) > 1 else None)
    recovery = device.run(*[1] * 64)
    assert answered(recovery, *[1] * 64)
    parts = 2**MAX_HALVINGS
    assert [device.tries.count(size) for size in (64, 32, 16, 8, 4)] == [2, 2, 4, 8, parts]
    assert device.tries.count(1) == 64
    assert 2 not in device.tries


def test_other_errors_are_bisected_without_evictions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def poisoned(lengths: list[int]) -> Exception | None:
        return ValueError("poison") if 13 in lengths else None

    device = FakeDevice(poisoned, idle=5)
    with caplog.at_level(logging.ERROR):
        recovery = device.run(*range(1, 101))
    assert answered(recovery, *(count for count in range(1, 101) if count != 13))
    assert isinstance(recovery.outcomes[12], InternalError)
    assert recovery.fitted_tokens == 0
    assert not {"relieve", "trim"} & set(device.calls)
    assert len(device.tries) <= 2 * 7 + 1


def test_poison_detected_after_freeing_memory_fails_alone() -> None:
    def poisoned(lengths: list[int]) -> Exception | None:
        return (
            out_of_memory()
            if sum(lengths) > 50
            else ValueError("poison")
            if 13 in lengths
            else None
        )

    device = FakeDevice(poisoned)
    recovery = device.run(20, 13, 20, 77)
    assert answered(recovery, 20, 20)
    assert isinstance(recovery.outcomes[1], InternalError)
    assert isinstance(recovery.outcomes[3], OutOfMemory)


@pytest.mark.parametrize("make", [out_of_memory, lambda: ValueError("poison")])
def test_lost_device_ends_the_recovery(make: Callable[[], Exception]) -> None:
    device = FakeDevice(failing_first(9, make), lost=True)
    with pytest.raises(RuntimeError, match="device lost"):
        device.run(3, 5)
    assert device.calls == ["forward 2", "recover"]


def test_failed_pass_holds_no_memory_when_caches_are_freed() -> None:
    """An exception keeps the frames of its pass, and so their activations: it must be gone by
    then.
    """
    alive: list[weakref.ref[torch.Tensor]] = []
    seen: list[bool] = []

    def forward(sequences: list[InputSequence]) -> list[Output]:
        activations = torch.ones(1000)
        alive.append(weakref.ref(activations))
        if len(alive) == 1:
            raise out_of_memory()
        return [np.zeros(1, np.float32)]

    gc.disable()
    try:
        oom_recovery = OomRecovery(
            lambda: seen.append(alive[0]() is None), lambda: None, lambda keep: False
        )
        oom_recovery.run(MODEL, forward, [sequence(3)])
    finally:
        gc.enable()
    assert seen == [True]


@given(st.lists(st.booleans(), min_size=1, max_size=70), st.integers(1, 70), st.integers(0, 3))
def test_only_sequences_that_never_fit_fail(fits: list[bool], most: int, idle: int) -> None:
    """Some sequences never fit, and others only a limited number at a time."""

    def broken(lengths: list[int]) -> Exception | None:
        return (
            out_of_memory()
            if len(lengths) > most or any(not fits[length - 1] for length in lengths)
            else None
        )

    device = FakeDevice(broken, idle=idle)
    recovery = device.run(*range(1, len(fits) + 1))
    for place, (outcome, good) in enumerate(zip(recovery.outcomes, fits, strict=True)):
        if good:
            assert isinstance(outcome, np.ndarray)
            assert outcome[0] == place + 1
        else:
            assert isinstance(outcome, OutOfMemory)
    # The recovery is bounded: the halvings, each sequence once, and a try for each evicted model.
    assert len(device.tries) <= 2 ** (MAX_HALVINGS + 1) + len(fits) + idle + 1


def huge_tensor() -> object:
    return torch.empty(2**50)


def huge_array() -> object:
    return np.empty(2**50)


@pytest.mark.parametrize("allocate", [huge_tensor, huge_array])
def test_errors_of_real_allocators_are_recognised(allocate: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert is_out_of_memory(caught.value)


def test_out_of_memory_errors_are_distinguished() -> None:
    assert is_out_of_memory(out_of_memory())
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    )
    assert is_out_of_memory(
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.")
    )
    assert not is_out_of_memory(
        RuntimeError("CUDA error: an illegal memory access was encountered")
    )
    assert not is_out_of_memory(ValueError("out of memory"))


def test_cap_applies_to_its_group_then_doubles_and_ends() -> None:
    caps = Caps(100)
    assert caps.token_budget("a") == 100
    caps.ran("a", 30)
    assert (caps.token_budget("a"), caps.token_budget("b")) == (30, 100)
    for _ in range(CAPPED_BATCHES):
        assert caps.token_budget("a") == 30
        caps.ran("a")
    assert caps.token_budget("a") == 60
    caps.ran("a", 25)
    assert caps.token_budget("a") == 25
    for _ in range(2 * CAPPED_BATCHES):
        caps.ran("a")
    assert caps.token_budget("a") == 100
