"""The device that settings ask for."""

from __future__ import annotations

import pytest
import torch

from libs.errors import InvalidInput
from libs.kernels import int8
from services.worker.machine.device import open_device
from services.worker.settings import Settings


def test_a_cpu_has_defaults_for_what_is_not_set() -> None:
    device = open_device(Settings("w", device="cpu", dtype="float32"))
    assert (device.name, device.item_bytes, device.batch_tokens) == ("cpu", 4, 2048)
    assert device.memory_bytes > 2**20
    assert (device.host_bytes, device.shares_memory) == (0, True), "a warm model would take the same memory"
    device.recover()
    device.trim()


def test_what_is_set_counts() -> None:
    device = open_device(Settings("w", device="cpu", dtype="bfloat16", batch_tokens=100, memory_bytes=1000))
    assert (device.item_bytes, device.batch_tokens, device.memory_bytes) == (2, 100, 1000)
    assert open_device(Settings("w", device="cpu", host_bytes=77)).host_bytes == 77


def test_int8_is_refused_where_it_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_device(Settings("w", device="cpu", dtype="int8"))
    assert (device.item_bytes, device.has_int8) == (1, True)
    monkeypatch.setattr(int8, "_choice", lambda: "this CPU has nothing")
    assert not open_device(Settings("w", device="cpu")).has_int8
    with pytest.raises(InvalidInput, match="SHOAL_DTYPE is int8, but this CPU has nothing"):
        open_device(Settings("w", device="cpu", dtype="int8"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without an accelerator")
def test_an_accelerator_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInput, match="SHOAL_DEVICE"):
        open_device(Settings("w", device="cuda"))
