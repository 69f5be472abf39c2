"""Out of memory through the whole mesh: every step of the recovery, and loads that fail, hang, or
can never fit.

One worker with injected faults (`tests/support/faulty_worker.py`) and one checkpoint under many
names, so that all answers must be equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import shoal
import shoal.errors
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from libs.kernels import native
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.faulty_worker import HUGE_BYTES, VARIABLE, Faults
from tests.support.texts import texts
from tests.support.waiting import wait_until

CLEAN = "org/clean"
MEMORY_BYTES = 64 << 20
LIMIT_TOKENS = 60
LOAD_SECONDS = 20
"""Time limit of a load. One test waits for it; all others must load within it on a busy machine."""
FAULTS = {
    "org/once": Faults(times=1),
    "org/crowded": Faults(above_models=1),
    "org/small": Faults(above_tokens=LIMIT_TOKENS),
    "org/fails": Faults(load="fail"),
    "org/hangs": Faults(load="hang"),
    "org/huge": Faults(load="huge"),
}
SHORT = texts(60, shortest=1, longest=6, seed=4)
LONG = " ".join(["word"] * 60)
"""64 tokens, the model's maximum, and more than LIMIT_TOKENS."""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that the hanging load waits for."""
    return tmp_path_factory.mktemp("release") / "now"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, release: Path) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("mesh")
    sound = write_checkpoint("bert", directory / "sound", sentence=SentenceFiles())
    loud = write_checkpoint("bert", directory / "loud", sentence=SentenceFiles())
    overflow(loud)
    catalog = directory / "catalog"
    catalog.mkdir()
    (catalog / "vast.yaml").write_text(f"model: org/vast\nmemory_bytes: {2 * MEMORY_BYTES}\n")
    (catalog / "loud.yaml").write_text("model: org/loud-half\ndtype: float16\n")
    models = dict.fromkeys((CLEAN, "org/vast", *FAULTS), sound) | {
        "org/loud": loud,
        "org/loud-half": loud,
    }
    environment = {
        VARIABLE: json.dumps(
            {name: asdict(faults) | {"release": str(release)} for name, faults in FAULTS.items()}
        ),
        "SHOAL_MEMORY_BYTES": str(MEMORY_BYTES),
        "SHOAL_LOAD_SECONDS": str(LOAD_SECONDS),
        "SHOAL_HEARTBEAT_SECONDS": "0.2",
        "SHOAL_CATALOG": str(catalog),
    }
    shelves = ":".join(f"{name}={place}" for name, place in models.items())
    with Cluster(
        directory,
        models=shelves,
        environment=environment,
        worker_module="tests.support.faulty_worker",
    ) as started:
        yield started


def overflow(directory: Path) -> None:
    """Make feed-forward layers overflow float16 (65,504) but not float32; LayerNorm makes their
    sums small again.
    """
    state = load_file(directory / "model.safetensors")
    for name, tensor in state.items():
        if name.endswith(("intermediate.dense.weight", "layer.0.output.dense.weight")):
            state[name] = tensor * 300
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def client(cluster: Cluster) -> Iterator[shoal.Client]:
    """Yield a client, and check afterwards that the worker is alive, answers, and uses only the
    memory of its models.
    """
    with shoal.Client(cluster.address, timeout=180) as connected:
        yield connected
        assert cluster.processes["worker-0"].poll() is None
        if connected.models.get(CLEAN).state != "resident":
            connected.models.load(
                CLEAN
            )  # an order need not wait for the expiry of its last load's claim
        assert vectors(connected, CLEAN, SHORT[:3]).shape == (3, 64)
        wait_until(lambda: memory_adds_up(connected), 60, "the memory of what has gone to be free")


def close(answer: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(answer, expected, atol=1e-5)


def memory_adds_up(client: shoal.Client) -> bool:
    mesh = client.mesh()
    (worker,) = mesh.workers
    sizes = {
        model.model: model.card.bytes
        for model in mesh.models
        if model.state == "resident" and model.card
    }
    return set(worker.resident) == sizes.keys() and worker.used_bytes == sum(sizes.values())


def vectors(client: shoal.Client, model: str, items: list[str]) -> NDArray[np.float32]:
    dense = client.encode(model, items).dense
    assert dense is not None
    return np.asarray(dense)


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> NDArray[np.float32]:
    """Return the vectors of SHORT from each model without a fault."""
    with shoal.Client(cluster.address, timeout=180) as client:
        return vectors(client, CLEAN, SHORT)


def test_worker_reports_its_kernels(client: shoal.Client) -> None:
    assert [worker.kernels for worker in client.mesh().workers] == [native.name()]


def test_batch_succeeds_after_freeing_caches(
    client: shoal.Client, expected: NDArray[np.float32]
) -> None:
    close(vectors(client, "org/once", SHORT), expected)


def test_idle_models_are_evicted(client: shoal.Client, expected: NDArray[np.float32]) -> None:
    vectors(client, "org/once", SHORT[:1])
    close(vectors(client, "org/crowded", SHORT[:1]), expected[:1])
    wait_until(
        lambda: client.mesh().workers[0].resident == ("org/crowded",), 60, "all others to have gone"
    )


def test_batch_is_halved(client: shoal.Client, expected: NDArray[np.float32]) -> None:
    close(vectors(client, "org/small", SHORT), expected)


def test_item_that_does_not_fit_fails_only_its_request(
    client: shoal.Client, expected: NDArray[np.float32]
) -> None:
    with ThreadPoolExecutor(10) as pool:
        good = [
            pool.submit(vectors, client, "org/small", SHORT[place : place + 6])
            for place in range(0, 60, 6)
        ]
        with pytest.raises(shoal.errors.OutOfMemory) as caught:
            client.encode("org/small", [*SHORT[:5], LONG])
        answers = [future.result() for future in good]
    assert (caught.value.code, caught.value.reason) == ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY")
    assert caught.value.retry_after is None
    assert caught.value.field == "items[5].text"
    assert "64 tokens" in str(caught.value)
    close(np.concatenate(answers), expected)
    close(vectors(client, "org/small", SHORT[:5]), expected[:5])


def test_outputs_that_are_not_finite_are_recomputed_in_float32(client: shoal.Client) -> None:
    close(vectors(client, "org/loud-half", SHORT), vectors(client, "org/loud", SHORT))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("org/fails", "a fault of our making"),
        ("org/huge", f"{HUGE_BYTES:,}"),
        ("org/vast", f"{2 * MEMORY_BYTES:,} bytes"),
    ],
)
def test_failed_or_impossible_load_is_refused_with_its_reason(
    client: shoal.Client, model: str, said: str
) -> None:
    with pytest.raises(shoal.errors.ModelBroken, match=said):
        client.encode(model, SHORT[:1])


def test_hanging_load_is_abandoned_and_its_memory_freed_at_its_end(
    client: shoal.Client, release: Path, expected: NDArray[np.float32]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(client.encode, "org/hangs", SHORT[:1])
        client.models.load(CLEAN)
        close(vectors(client, CLEAN, SHORT), expected)
        with pytest.raises(
            shoal.errors.ModelBroken, match=f"failed to load within {LOAD_SECONDS} seconds"
        ):
            hanging.result()
    assert not memory_adds_up(client), "memory that a thread still holds must count"
    release.touch()
