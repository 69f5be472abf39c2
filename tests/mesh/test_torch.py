"""Models whose weights the hub has as torch checkpoints alone, laid out as they are published: asked for by name through the
mesh."""

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
from shoal.cli import main
from typer.testing import CliRunner

from tests.conversion.hostile import MARKER, calling
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.parity.gliner_models import make_reference
from tests.parity.test_hybrid import write_m3
from tests.store.fake_hub import FakeHub, serving
from tests.support.cluster import Cluster

# transformers and gliner warn of their own future.
pytestmark = pytest.mark.filterwarnings("ignore")

M3, SHARDED, GLINER, HOSTILE, LOCAL = (
    "BAAI/bge-m3",
    "org/sharded",
    "knowledgator/gliner-pii-small-v1.0",
    "org/hostile",
    "local/pickled",
)
TEXTS = ["A model as it is published", "becomes safetensors once."]
TEXT = "The licensee conveys; the source code of the work must be conveyed too."
LABELS = ["person", "licence name", "city"]


def as_torch(directory: Path) -> None:
    """The directory's safetensors as torch checkpoints under the names of the hub, and nothing else of the weights."""
    for path in sorted(directory.glob("**/*.safetensors")):
        names = {"model": "pytorch_model.bin", "sparse_linear": "sparse_linear.pt", "colbert_linear": "colbert_linear.pt"}
        name = names.get(path.stem) or f"{path.stem.replace('model-', 'pytorch_model-')}.bin"
        torch.save(load_file(path), path.with_name(name))
        path.unlink()
    index = directory / "model.safetensors.index.json"
    if index.exists():
        value = json.loads(index.read_text().replace(".safetensors", ".bin").replace("model-", "pytorch_model-"))
        index.unlink()
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(value))


def write(root: Path) -> None:
    """The repositories, with safetensors."""
    write_m3(root / M3)
    (root / M3 / "sentencepiece.bpe.model").write_bytes(b"\x0a\x00")
    write_checkpoint("bert", root / SHARDED, sentence=SentenceFiles(dense=16), max_shard_size="100KB")
    write_checkpoint("bert", root / LOCAL, sentence=SentenceFiles(), seed=4)
    made = make_reference(root / "made", {"span_mode": "markerV0"})
    made.directory.rename(root / "gliner")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`plain/`: with safetensors, under other names. `hub/`, `local/`: the same as torch checkpoints."""
    root = tmp_path_factory.mktemp("torch")
    for form in ("hub", "plain"):
        write(root / form)
        (root / form / GLINER).parent.mkdir()
        (root / form / "gliner").rename(root / form / GLINER)
    for model in (M3, SHARDED, GLINER, LOCAL):
        as_torch(root / "hub" / model)
    assert len(list((root / "hub" / SHARDED).glob("pytorch_model-0000*-of-0000*.bin"))) > 1
    assert (root / "hub" / SHARDED / "2_Dense" / "pytorch_model.bin").exists()
    (root / "local" / LOCAL).parent.mkdir(parents=True)
    (root / "hub" / LOCAL).rename(root / "local" / LOCAL)
    write_checkpoint("bert", root / "hub" / HOSTILE)
    (root / "hub" / HOSTILE / "model.safetensors").unlink()
    (root / "hub" / HOSTILE / "pytorch_model.bin").write_bytes(calling(os.system, f"touch {root / MARKER}"))
    return root


@pytest.fixture(scope="module")
def hub(root: Path) -> Iterator[FakeHub]:
    models = {model: root / "hub" / model for model in (M3, SHARDED, GLINER, HOSTILE)}
    with serving(FakeHub(models=models)) as running:
        yield running


@pytest.fixture(scope="module")
def mesh(hub: FakeHub, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A worker with the hub, a folder of torch checkpoints, and the same models as safetensors under `plain-…`."""
    directory = tmp_path_factory.mktemp("mesh")
    plain = [f"plain/{model.replace('/', '-')}={root / 'plain' / model}" for model in (M3, SHARDED, GLINER, LOCAL)]
    environment = {
        "SHOAL_STORES": "hf",
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(directory / "hf"),
        "HF_HUB_OFFLINE": "0",
    }
    with Cluster(directory, models=":".join([str(root / "local"), *plain]), environment=environment) as cluster:
        yield cluster


def plain(model: str) -> str:
    return f"plain/{model.replace('/', '-')}"


def test_bge_m3_is_encoded_by_name_on_the_command_line_with_no_other_step(mesh: Cluster, hub: FakeHub) -> None:
    """The first request: download, conversion, load and answer."""
    arguments = ["--address", mesh.address, "--timeout", "120", "--json"]
    ran = CliRunner().invoke(main.build(), ["encode", M3, *TEXTS, *arguments])
    assert ran.exit_code == 0, ran.output
    with shoal.Client(mesh.address) as client:
        wanted = client.encode(plain(M3), TEXTS, representations=["dense", "sparse", "multi_vector"])
        found = client.encode(M3, TEXTS, representations=["dense", "sparse", "multi_vector"])
        assert found.dense is not None
        assert wanted.dense is not None
        np.testing.assert_array_equal(found.dense, wanted.dense)
        np.testing.assert_allclose([row["dense"] for row in json.loads(ran.stdout)["items"]], wanted.dense, rtol=0, atol=1e-6)
        assert found.sparse is not None
        assert wanted.sparse is not None
        for ours, theirs in zip(found.sparse, wanted.sparse, strict=True):
            for numbers, same in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(numbers, same)
        assert found.multi_vector is not None
        assert wanted.multi_vector is not None
        for rows, same in zip(found.multi_vector, wanted.multi_vector, strict=True):
            np.testing.assert_array_equal(rows, same)
    stored = mesh.directory / "store" / "models" / M3
    assert not list(stored.glob("*.bin")) + list(stored.glob("*.pt"))
    assert hub.sent["pytorch_model.bin"]


@pytest.mark.parametrize("model", [SHARDED, LOCAL])
def test_shards_modules_and_local_directories_answer_as_their_safetensors(model: str, mesh: Cluster) -> None:
    with shoal.Client(mesh.address) as client:
        found, wanted = client.encode(model, TEXTS, timeout=120).dense, client.encode(plain(model), TEXTS).dense
    assert found is not None
    assert wanted is not None
    np.testing.assert_array_equal(found, wanted)


def test_a_gliner_with_its_tokenizer_finds_what_its_safetensors_find(mesh: Cluster) -> None:
    with shoal.Client(mesh.address) as client:
        found, wanted = (
            client.extract(model, [TEXT], task=shoal.Entities(labels=LABELS, threshold=0.3), timeout=120)
            for model in (GLINER, plain(GLINER))
        )
    assert wanted[0].entities
    assert found[0].entities == wanted[0].entities


def test_a_hostile_checkpoint_is_refused_by_name_and_the_worker_serves_on(mesh: Cluster, root: Path) -> None:
    with shoal.Client(mesh.address) as client:
        with pytest.raises(errors.ModelBroken, match=r"pytorch_model\.bin: asks for 'posix\.system'"):
            client.encode(HOSTILE, TEXTS, timeout=60)
        assert client.encode(plain(LOCAL), TEXTS).dense is not None
    assert not (root / MARKER).exists()
    assert mesh.processes["worker-0"].poll() is None
