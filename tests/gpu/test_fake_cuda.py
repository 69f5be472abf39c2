"""The CUDA path of models, computed on a device that is simulated on the CPU.

An operator on tensors of two devices, or a kernel that receives host memory, fails there as on a
GPU. `pytest -p tests.support.fake_cuda` runs any test with its models on the device.
"""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

pytest.importorskip("triton")

from libs.kernels.attention import paged_triton
from libs.kernels.layout import BatchLayout, upload
from libs.kernels.rows.norms import rms_norm
from libs.kernels.rows.segments import reduce
from libs.kinds.generative import model as generative_models
from libs.models import (
    ClassifyWork,
    EncodeWork,
    EntitiesWork,
    PackedModel,
    Unfinished,
    Work,
    load_model,
)
from libs.models.images.loading import load_images
from libs.models.interface.source import LoadArguments
from libs.models.interface.work import TextWork
from tests.generation.served import write as write_served
from tests.models.test_pending import arrays
from tests.parity import image_models
from tests.parity.adapters import write_random_adapter
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.parity.gliner_models import make_reference
from tests.parity.test_image_models import prepare_images, vectors
from tests.support.fake_cuda import DEVICE, FakeCuda, FakeCudaQueue, FakeCudaTensor, fake_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


CPU: Final = torch.device("cpu")
TEXTS: Final = ["a text of some words", "another one", "x"]


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
        BatchLayout.from_lengths((1, 2), (1, 2), DEVICE)
        assert (x * 2).sum().shape == ()
        assert waits(device) == 0


def test_kernels_of_decode_steps_are_compiled_by_the_load(tmp_path: Path) -> None:
    """Each number of splits is another variant, which a request would otherwise wait for."""
    write_served("qwen3", tmp_path)
    with fake_cuda(computes=False) as device:
        model = generative_models.load(
            LoadArguments(tmp_path, "random/generative", DEVICE, torch.float32)
        )
        assert model.probe() > 0
        compiled = {named["SPLITS"] for name, named in device.launches if name == "_decode"}
        kv_heads = model._reader.language_model.kv_heads
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


def written(kind: str, directory: Path) -> tuple[Path, list[Work]]:
    """Write a checkpoint, and return jobs for it."""
    if kind == "entities":
        found = make_reference(directory, {}).directory
        return found, [EntitiesWork(TEXTS, labels=("person", "city"))]
    if kind == "labels":
        found = write_checkpoint("bert", directory, head="token_classification", labels=("O", "B"))
        return found, [EntitiesWork(TEXTS)]
    if kind == "classes":
        labels = ("good", "bad")
        found = write_checkpoint(
            "deberta-v2", directory, head="sequence_classification", labels=labels
        )
        return found, [ClassifyWork(TEXTS)]
    return write_checkpoint(kind, directory, sentence=SentenceFiles()), [EncodeWork(TEXTS)]


def outputs(model: PackedModel, works: list[Work]) -> list[NDArray[np.generic]]:
    return arrays([one for work in works for one in model.forward_all(model.prepare(work))])


def assert_close(found: list[NDArray[np.generic]], wanted: list[NDArray[np.generic]]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("kind", ["bert", "qwen3", "classes", "labels", "entities"])
def test_models_give_the_same_as_on_a_cpu(kind: str, tmp_path: Path) -> None:
    """Outputs are equal from the load on, and the host waits only where it reads them."""
    directory, works = written(kind, tmp_path)
    wanted = outputs(load_model(directory, "org/m", CPU, torch.float32), works)
    with fake_cuda():
        model = load_model(directory, "org/m", DEVICE, torch.float32)
        assert isinstance(model.queue, FakeCudaQueue)
        found = outputs(model, works)
        assert model.queue.waits.total() == 0
    assert_close(found, wanted)


def test_batch_with_adapters_gives_the_same_as_on_a_cpu(tmp_path: Path) -> None:
    """Three adapters in a batch are two products with masks, which a CPU does not take."""
    directory = write_checkpoint("bert", tmp_path / "base", sentence=SentenceFiles())
    names = ["", "a", "b", "c"]
    for seed, name in enumerate(names[1:]):
        write_random_adapter("bert", tmp_path / name, seed=seed, r=2, target_modules=["query"])

    def adapted(device: torch.device) -> list[NDArray[np.generic]]:
        model = load_model(directory, "org/m", device, torch.float32)
        for name in names[1:]:
            model.add_adapter(name, tmp_path / name)
        plain = model.prepare(EncodeWork(["one two", "three", "four five", "six"])).sequences
        own = [replace(one, adapter=name) for one, name in zip(plain, names, strict=True)]
        return arrays(model.forward("dense", own))

    wanted = adapted(CPU)
    with fake_cuda():
        found = adapted(DEVICE)
    assert_close(found, wanted)


@pytest.mark.parametrize("kind", ["clip", "dinov2", "siglip"])
def test_images_give_the_same_as_on_a_cpu(kind: str, tmp_path: Path) -> None:
    image_models.write_checkpoint(kind, tmp_path)
    # DINOv2 makes 855 patches of an image of 1 x 30, which takes Triton's interpreter a minute.
    files = [file for file in image_models.pictures() if Image.open(BytesIO(file)).height > 1]
    model = load_images(tmp_path, dtype=torch.float32, device=CPU)
    wanted = vectors(model, "image", prepare_images(model, files))
    with fake_cuda():
        model = load_images(tmp_path, dtype=torch.float32, device=DEVICE)
        found = vectors(model, "image", prepare_images(model, files)).cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
