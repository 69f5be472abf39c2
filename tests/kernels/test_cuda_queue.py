"""Two batches on a GPU: launches that do not wait, answers as of one batch at a time, and the times
by the device's events.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from libs.models import EncodeWork, PackedModel, load_model
from libs.models.runtime.loaded.cuda_queue import CudaQueue, cuda_queue
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.device import no_synchronization

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

TEXTS = [f"text number {number} of this batch" for number in range(64)]


@pytest.fixture
def model(tmp_path: Path) -> PackedModel:
    found = write_checkpoint(
        "bert", tmp_path, sentence=SentenceFiles(), hidden=256, heads=4, layers=4
    )
    return load_model(found, "org/m", torch.device("cuda"), torch.float16)


def busy(milliseconds: float) -> None:
    """Keep the current stream busy for about this long."""
    torch.cuda._sleep(int(milliseconds * 1e6))


def test_batch_is_launched_while_another_is_on_the_device(model: PackedModel) -> None:
    jobs = [model.prepare(EncodeWork(TEXTS[start : start + 32])) for start in (0, 32)]
    wanted = [model.forward(job.head, job.sequences) for job in jobs]
    torch.cuda.synchronize()
    busy(50)
    with no_synchronization():
        first = model.launch(jobs[0].head, jobs[0].sequences)
        second = model.launch(jobs[1].head, jobs[1].sequences)
    assert not first.is_done()
    assert not second.is_done()
    for batch, one in zip((first, second), wanted, strict=True):
        np.testing.assert_array_equal(np.stack(batch.collect()), np.stack(one))  # type: ignore[arg-type]
    assert first.seconds > 0
    assert 0 < second.seconds < 1
    assert 0 <= second.idle_seconds < 0.001, (
        "the second batch was launched long before the first one ended"
    )


def test_waiting_releases_the_interpreters_lock(model: PackedModel) -> None:
    job = model.prepare(EncodeWork(TEXTS))
    model.forward(job.head, job.sequences)
    counted, is_over = [0], threading.Event()

    def count() -> None:
        while not is_over.is_set():
            counted[0] += 1

    busy(200)
    batch = model.launch(job.head, job.sequences)
    thread = threading.Thread(target=count)
    thread.start()
    before = counted[0]
    batch.wait()
    assert counted[0] > before + 1000
    is_over.set()
    thread.join()
    batch.collect()


def test_model_is_parked_when_the_device_has_computed(model: PackedModel) -> None:
    model.gather()
    job = model.prepare(EncodeWork(TEXTS))
    wanted = model.forward(job.head, job.sequences)
    busy(50)
    batch = model.launch(job.head, job.sequences)
    parked = model.park()
    assert batch.is_done()
    # Memory that was the weights' is written by others.
    torch.full((64 << 20,), 0xFF, dtype=torch.uint8, device="cuda")
    np.testing.assert_array_equal(np.stack(batch.collect()), np.stack(wanted))  # type: ignore[arg-type]
    parked.resume()
    np.testing.assert_array_equal(
        np.stack(model.forward(job.head, job.sequences)),  # type: ignore[arg-type]
        np.stack(wanted),  # type: ignore[arg-type]
    )


def test_results_are_read_ahead_of_a_batch_that_was_launched_since() -> None:
    queue = CudaQueue(torch.device("cuda"))
    queue.begin()
    values = torch.arange(1000, device="cuda").float()
    values.nonzero()  # its kernels are loaded at their first use, which waits for the device
    first = queue.submit([])
    first.wait()
    queue.begin()
    busy(100)
    second = queue.submit([])
    (found,) = queue.read(lambda: (values.nonzero(),))
    assert not second.is_done()
    assert found.shape == (999, 1)
    second.wait()
    assert second.seconds > 0.01


def test_all_models_of_a_device_share_a_queue() -> None:
    assert cuda_queue(torch.device("cuda")) is cuda_queue(torch.device("cuda"))
