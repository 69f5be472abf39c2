"""The device that settings select."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from libs.errors import InvalidInput
from libs.kernels.linear import int8
from services.worker.machine.device import open_device, use_threads
from services.worker.settings import Settings


def test_unset_settings_have_cpu_defaults() -> None:
    device = open_device(Settings("w", device="cpu", dtype="float32"))
    assert (device.name, device.item_bytes, device.batch_tokens) == ("cpu", 4, 2048)
    assert device.memory_bytes > 2**20
    assert (device.host_bytes, device.shares_memory) == (0, True), (
        "a warm model would take the same memory"
    )
    device.recover()
    device.trim()


def test_settings_override_defaults() -> None:
    device = open_device(
        Settings("w", device="cpu", dtype="bfloat16", batch_tokens=100, memory_bytes=1000)
    )
    assert (device.item_bytes, device.batch_tokens, device.memory_bytes) == (2, 100, 1000)
    assert open_device(Settings("w", device="cpu", host_bytes=77)).host_bytes == 77


def test_int8_is_refused_on_unsupported_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_device(Settings("w", device="cpu", dtype="int8"))
    assert (device.item_bytes, device.has_int8) == (1, True)
    monkeypatch.setattr(int8, "_choice", lambda: "this CPU has nothing")
    assert not open_device(Settings("w", device="cpu")).has_int8
    with pytest.raises(InvalidInput, match="SHOAL_DTYPE is int8, but this CPU has nothing"):
        open_device(Settings("w", device="cpu", dtype="int8"))


def test_cudnn_computes_float32_without_tensorfloat32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30)
    )
    assert (
        open_device(Settings("w", device="cuda", dtype="bfloat16", cuda_graphs=0)).name == "a GPU"
    )
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without an accelerator")
def test_missing_accelerator_is_refused() -> None:
    with pytest.raises(InvalidInput, match="SHOAL_DEVICE"):
        open_device(Settings("w", device="cuda"))


def test_load_does_not_change_the_device_threads_thread_count() -> None:
    """A load limits torch to one thread, which must not apply to the device thread."""
    entered, loaded, found = threading.Event(), threading.Event(), list[int]()

    def device_thread() -> None:
        use_threads(2)
        entered.set()
        loaded.wait(120)
        torch.ones(64, 64) @ torch.ones(64, 64)
        found.append(torch.get_num_threads())

    def load() -> None:
        entered.wait(120)
        use_threads(1)
        loaded.set()

    before = torch.get_num_threads()
    threads = [threading.Thread(target=device_thread), threading.Thread(target=load)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        use_threads(before)
    assert found == [2]
