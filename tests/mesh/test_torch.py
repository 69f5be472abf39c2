"""Torch checkpoints through the mesh: in shards, of modules, of local directories, and hostile
ones.

test_published_layouts.py has models laid out as on the hub.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import shoal
import torch
from safetensors.torch import load_file
from shoal import errors

from tests.conversion.hostile import MARKER, calling
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.store.fake_hub import FakeHub, serving
from tests.support.cluster import Cluster

# transformers and gliner emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

SHARDED, HOSTILE, LOCAL = "org/sharded", "org/hostile", "local/pickled"
TEXTS = ["A model as it is published", "becomes safetensors once."]
FIRST_CALL_SECONDS = 600.0
"""Maximum time of a first call: each of the model's files is converted by a new process, which
takes up to 40 s on two cores at load 40.
"""


def as_torch(directory: Path) -> None:
    """Replace the directory's safetensors by torch checkpoints with the hub's names."""
    for path in sorted(directory.glob("**/*.safetensors")):
        name = (
            "pytorch_model.bin"
            if path.stem == "model"
            else f"{path.stem.replace('model-', 'pytorch_model-')}.bin"
        )
        torch.save(load_file(path), path.with_name(name))
        path.unlink()
    index = directory / "model.safetensors.index.json"
    if index.exists():
        value = json.loads(
            index.read_text().replace(".safetensors", ".bin").replace("model-", "pytorch_model-")
        )
        index.unlink()
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(value))


def write(root: Path) -> None:
    """Write the repositories, with safetensors."""
    write_checkpoint(
        "bert", root / SHARDED, sentence=SentenceFiles(dense=16), max_shard_size="100KB"
    )
    write_checkpoint("bert", root / LOCAL, sentence=SentenceFiles(), seed=4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make `plain/` with safetensors under other names, and `hub/` and `local/` with the same as
    torch checkpoints.
    """
    root = tmp_path_factory.mktemp("torch")
    for form in ("hub", "plain"):
        write(root / form)
    for model in (SHARDED, LOCAL):
        as_torch(root / "hub" / model)
    assert len(list((root / "hub" / SHARDED).glob("pytorch_model-0000*-of-0000*.bin"))) > 1
    assert (root / "hub" / SHARDED / "2_Dense" / "pytorch_model.bin").exists()
    (root / "local" / LOCAL).parent.mkdir(parents=True)
    (root / "hub" / LOCAL).rename(root / "local" / LOCAL)
    write_checkpoint("bert", root / "hub" / HOSTILE)
    (root / "hub" / HOSTILE / "model.safetensors").unlink()
    (root / "hub" / HOSTILE / "pytorch_model.bin").write_bytes(
        calling(os.system, f"touch {root / MARKER}")
    )
    return root


@pytest.fixture(scope="module")
def hub(root: Path) -> Iterator[FakeHub]:
    models = {model: root / "hub" / model for model in (SHARDED, HOSTILE)}
    with serving(FakeHub(models=models)) as running:
        yield running


@pytest.fixture(scope="module")
def mesh(hub: FakeHub, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run a worker with the hub, a folder of torch checkpoints, and the same models as safetensors
    under `plain-…`.
    """
    directory = tmp_path_factory.mktemp("mesh")
    plain = [
        f"plain/{model.replace('/', '-')}={root / 'plain' / model}" for model in (SHARDED, LOCAL)
    ]
    environment = {
        "SHOAL_STORES": "hf",
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(directory / "hf"),
        "HF_HUB_OFFLINE": "0",
    }
    with Cluster(
        directory, models=":".join([str(root / "local"), *plain]), environment=environment
    ) as cluster:
        yield cluster


def plain(model: str) -> str:
    return f"plain/{model.replace('/', '-')}"


@pytest.mark.parametrize("model", [SHARDED, LOCAL])
def test_torch_checkpoints_answer_like_safetensors(model: str, mesh: Cluster) -> None:
    with shoal.Client(mesh.address) as client:
        found, wanted = (
            client.encode(model, TEXTS, timeout=FIRST_CALL_SECONDS).dense,
            client.encode(plain(model), TEXTS, timeout=FIRST_CALL_SECONDS).dense,
        )
    assert found is not None
    assert wanted is not None
    # A CPU's sums depend on the addresses of weights and on the batches of a request, which
    # depend on the worker's speed.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_hostile_checkpoint_is_refused_by_name_and_the_worker_continues(
    mesh: Cluster, root: Path
) -> None:
    with shoal.Client(mesh.address) as client:
        with pytest.raises(
            errors.ModelBroken, match=r"pytorch_model\.bin: asks for 'posix\.system'"
        ):
            client.encode(HOSTILE, TEXTS, timeout=FIRST_CALL_SECONDS)
        assert client.encode(plain(LOCAL), TEXTS, timeout=FIRST_CALL_SECONDS).dense is not None
    assert not (root / MARKER).exists()
    assert mesh.processes["worker-0"].poll() is None
