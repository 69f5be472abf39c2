"""The CUDA path of every kind of model, computed on a device that is simulated on the CPU.

The tests that compare models with their references run again with each model on the device:
encoders with all heads, adapters, image towers, detectors, generative models and readers. An
operator on tensors of two devices, or a kernel that receives host memory, fails there as on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from libs.kernels.attention import paged_triton
from libs.kernels.layout import Layout, upload
from libs.kernels.rows.norms import rms_norm
from libs.kernels.rows.segments import reduce
from libs.kinds.writer import model as writers
from libs.models import Unfinished
from libs.models.source import Source
from libs.models.work import TextWork
from tests.generation.served import write as write_served
from tests.support.fake_cuda import DEVICE, FakeCuda, FakeCudaTensor, fake_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def on_device(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device=DEVICE)


def test_tensors_of_two_devices_are_refused() -> None:
    with fake_cuda():
        x = on_device(3, 3)
        for mixed in (
            lambda: x + torch.ones(3),
            lambda: torch.cat((x, torch.ones(1, 3))),
            lambda: x @ torch.ones(3, 3),
            lambda: torch.ones(3, 3)[x.long()],
            lambda: x.index_select(0, torch.tensor([1])),
            lambda: torch.where(x > 0, x, torch.ones(3)),
        ):
            with pytest.raises(RuntimeError, match="one device"):
                mixed()
        assert (x + 1.0).device == (x * torch.tensor(2.0)).device == DEVICE
        assert x[torch.tensor([1, 1])].shape == (2, 3), "indices may be on the host"


def test_kernel_refuses_host_memory() -> None:
    with fake_cuda():
        x = on_device(4, 64)
        with pytest.raises(RuntimeError, match="_norm is launched with host memory"):
            rms_norm(x, torch.ones(64), 1e-5)
        ends = torch.tensor((0, 1, 4), dtype=torch.int32, device=DEVICE)
        assert torch.allclose(reduce(x, "mean", ends).cpu()[1], x[1:].mean(0).cpu(), atol=1e-6)


def test_views_and_in_place_operators_share_memory() -> None:
    with fake_cuda():
        x = torch.zeros(2, 4, device=DEVICE)
        x[0].add_(1)
        x[:, 1:3].copy_(torch.full((2, 2), 7.0))
        x.view(-1)[-1] = 5
        assert x.cpu().tolist() == [[1, 7, 7, 1], [0, 7, 7, 5]]
        assert x.add_(1) is x
        assert not isinstance(x.cpu(), FakeCudaTensor)
        host = torch.ones(2)
        device = host.to(DEVICE)
        host.zero_()
        assert device.tolist() == [1, 1], "a copy of its own"


def test_waits_for_the_device_are_counted() -> None:
    def waits(device: FakeCuda) -> int:
        found = device.waits.total()
        device.waits.clear()
        return found

    with fake_cuda() as device:
        x = on_device(3)
        assert waits(device) == 0
        assert float(x[0].item()) < 1
        assert waits(device) == 1
        x.cpu()
        assert waits(device) == 1
        x[x > 0.5]
        assert waits(device) == 1
        x.nonzero()
        assert waits(device) == 1
        torch.tensor([1.0, 2.0], device=DEVICE)
        assert waits(device) == 1, "from memory that is not page-locked"
        upload([np.arange(3, dtype=np.int32)], DEVICE)
        Layout.from_lengths((1, 2), (1, 2), DEVICE)
        assert (x * 2).sum().shape == ()
        assert waits(device) == 0


def test_kernels_of_decode_steps_are_compiled_by_the_load(tmp_path: Path) -> None:
    """Each number of splits is another variant, which a request would otherwise wait for."""
    write_served("qwen3", tmp_path)
    with fake_cuda(computes=False) as device:
        model = writers.load(Source(tmp_path, "random/writer", DEVICE, torch.float32))
        assert model.probe() > 0
        compiled = {named["SPLITS"] for name, named in device.launches if name == "_decode"}
        kv_heads = model._reader.writer.kv_heads
        assert compiled == {paged_triton.splits(count, kv_heads) for count in range(1, 65)}
        device.launches.clear()
        left = model.prepare(TextWork(["a b c", "d"])).sequences
        while left:
            outputs = model.forward("", left)
            left = [
                one
                for one, output in zip(left, outputs, strict=True)
                if isinstance(output, Unfinished)
            ]
        used = {named["SPLITS"] for name, named in device.launches if name == "_decode"}
        assert used
        assert used <= compiled


TESTS: Final = ("tests/parity/test_heads.py",)


@pytest.mark.parametrize("path", TESTS)
def test_models_equal_their_references_on_the_device(path: str) -> None:
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.support.fake_cuda",
        "-p", "no:cacheprovider", "-p", "no:randomly", path,
    ]  # fmt: skip
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
