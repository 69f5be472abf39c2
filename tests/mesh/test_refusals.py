"""Checkpoints that cannot be served: FAILED_PRECONDITION with the file and its error, and the
worker keeps serving.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import shoal
import shoal.errors
import torch
from safetensors.torch import load_file, save_file

from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster

Break = Callable[[Path], None]
WEIGHT = "encoder.layer.1.intermediate.dense.weight"


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    def apply(directory: Path) -> None:
        held = {
            name: tensor.clone()
            for name, tensor in load_file(directory / "model.safetensors").items()
        }
        change(held)
        save_file(held, directory / "model.safetensors")

    return apply


def config(name: str = "config.json", **values: object) -> Break:
    def apply(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return apply


def cut_short(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pickled(directory: Path) -> None:
    """Write a pickle that would create a file if it were ever loaded."""
    (directory / "model.safetensors").unlink()

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (directory / "was-run",))

    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))


def own_code(directory: Path) -> None:
    """Write an architecture with custom code that would create a file if it were ever run."""
    (directory / "modeling_own.py").write_text(
        f"open({str(directory / 'was-run')!r}, 'w').close()\n"
    )
    config(model_type="own", auto_map={"AutoModel": "modeling_own.OwnModel"})(directory)


def own_module(directory: Path) -> None:
    (directory / "own_module.py").write_text(f"open({str(directory / 'was-run')!r}, 'w').close()\n")
    path = directory / "modules.json"
    modules = json.loads(path.read_text())
    modules[1]["type"] = "own_module.Pooling"
    path.write_text(json.dumps(modules))


BROKEN: dict[str, tuple[Break, tuple[str, ...]]] = {
    "unknown-tensor": (
        tensors(lambda held: held.update(surprise=torch.zeros(2))),
        ("model.safetensors", "surprise"),
    ),
    "missing-tensor": (tensors(lambda held: held.pop(WEIGHT)), ("model.safetensors", WEIGHT)),
    "misshapen-tensor": (
        tensors(lambda held: held.update({WEIGHT: torch.zeros(3, 64)})),
        ("model.safetensors", WEIGHT, "[3, 64]", "[128, 64]"),
    ),
    "truncated": (cut_short, ("model.safetensors", "truncated")),
    "pickle": (pickled, ("pytorch_model.bin", "plain pickle")),
    "own-code": (own_code, ("config.json", "auto_map", "never run")),
    "own-module": (own_module, ("modules.json", "own_module.Pooling")),
    "unknown-architecture": (config(model_type="mamba9"), ("config.json", "model_type", "mamba9")),
    "unsupported-key": (
        config(position_embedding_type="relative_key"),
        ("config.json", "position_embedding_type"),
    ),
    "no-tokenizer": (
        lambda directory: (directory / "tokenizer.json").unlink(),
        ("tokenizer.json",),
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("broken")
    for name, (damage, _) in BROKEN.items():
        damage(write_checkpoint("bert", root / "broken" / name, sentence=SentenceFiles()))
        write_checkpoint(
            "bert", root / "sound" / f"after-{name}", sentence=SentenceFiles(), seed=len(name)
        )
    return root


@pytest.fixture(scope="module")
def cluster(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("mesh"), models=str(root)) as started:
        yield started


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoint_is_refused_and_the_next_model_loads(
    name: str, root: Path, cluster: Cluster
) -> None:
    _, named = BROKEN[name]
    with shoal.Client(cluster.address) as client:
        with pytest.raises(shoal.errors.ModelBroken) as caught:
            client.encode(f"broken/{name}", ["a text"])
        assert caught.value.code == "FAILED_PRECONDITION"
        assert caught.value.reason == "MODEL_LOAD_FAILED"
        for part in named:
            assert part in caught.value.message
        vectors = client.encode(f"sound/after-{name}", ["a text"]).dense
    assert vectors is not None
    assert vectors.shape == (1, 64)
    assert not (root / "broken" / name / "was-run").exists()
    assert cluster.processes["worker-0"].poll() is None
