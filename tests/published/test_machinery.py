"""Tests of the machinery for published models, with tiny ones of a hub on loopback.

They are fetched, served and compared, a changed weight is found, and a missing hub is reported.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import torch
from huggingface_hub import close_session, constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from libs.catalog import coverage
from libs.store import ModelStore
from libs.store.cache import Cache
from libs.store.hub import Hub
from tests.conftest import pytest_configure
from tests.generation.served import write_ending
from tests.parity.boundary_models import make_boundary
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.parity.gliner2_models import make_reference
from tests.published import encoders, generation
from tests.published.reach import need
from tests.published.serving import Published, published
from tests.published.table import MODELS, Comparison
from tests.readers import conversation_models, page_models
from tests.store.conftest import TRANSFER
from tests.store.fake_hub import FakeHub, serving

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

TINY: Final[dict[str, Comparison]] = {
    "tiny/trocr": partial(generation.page, max_tokens=16),
    "tiny/docling": partial(
        generation.conversation, instruction="Convert this page to docling.", max_tokens=16
    ),
    "tiny/qwen3": partial(generation.texts, instruction="shorten it:", max_tokens=16),
    "tiny/bert": encoders.dense,
    "tiny/gliner2": encoders.gliner2,
    "tiny/gliner25": encoders.gliner25,
}
UNTOKENIZED: Final = "tiny/untokenized"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    root = tmp_path_factory.mktemp("hub")
    made = {model: root / model for model in TINY}
    for directory in made.values():
        directory.mkdir(parents=True)
    page_models.write_trocr(made["tiny/trocr"])
    conversation_models.write("idefics3", made["tiny/docling"])
    write_ending("qwen3", made["tiny/qwen3"])
    write_checkpoint("bert", made["tiny/bert"], sentence=SentenceFiles())
    made["tiny/gliner2"] = make_reference(
        made["tiny/gliner2"], {"counting_layer": "count_lstm_v2"}
    ).directory
    made["tiny/gliner25"] = make_boundary(made["tiny/gliner25"], {}).directory
    made[UNTOKENIZED] = without_tokenizer(made["tiny/trocr"], root / UNTOKENIZED)
    for directory in made.values():
        (directory / "training_args.bin").write_bytes(b"a pickle")
    with serving(FakeHub(models=made)) as running:
        yield running
    close_session()


def without_tokenizer(directory: Path, target: Path) -> Path:
    """Copy a checkpoint as TrOCR is published: vocabulary files without tokenizer.json."""
    shutil.copytree(directory, target)
    Tokenizer.from_file(str(directory / "tokenizer.json")).model.save(str(target))
    (target / "tokenizer.json").unlink()
    (target / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "RobertaTokenizer"})
    )
    return target


@pytest.fixture(scope="module")
def running(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    root = tmp_path_factory.mktemp("published")
    store = ModelStore(
        [Hub(endpoint=hub.endpoint, cache=root / "hf")], Cache(root / "store"), 1 << 40, TRANSFER
    )
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(root / "hf"), "HF_HUB_OFFLINE": "0"}
    with published(root, store, environment) as made:
        yield made


def test_every_model_of_the_table_is_in_the_catalogue() -> None:
    served = {row.model for row in coverage.rows() if row.status in ("run", "card", "incomplete")}
    assert MODELS.keys() <= served


@pytest.mark.parametrize("model", TINY)
def test_tiny_model_answers_as_its_own_package(
    model: str, running: Published, hub: FakeHub
) -> None:
    running.check(model, TINY[model])
    directory = running.store.models / model
    assert (directory / "model.safetensors").read_bytes() == (
        hub.models[model] / "model.safetensors"
    ).read_bytes()
    assert not (directory / "training_args.bin").exists()


@pytest.mark.parametrize("model", TINY)
def test_changed_weight_is_found(model: str, running: Published, tmp_path: Path) -> None:
    """Change one number in a thousand of the largest tensor, in the package's copy."""
    copy = running.store.get(model, lambda progress: None)
    changed = shutil.copytree(copy.directory, tmp_path / "changed")
    copy.close()
    tensors = load_file(changed / "model.safetensors")
    name = max(tensors, key=lambda each: tensors[each].numel())
    tensors[name] = torch.where(
        torch.arange(tensors[name].numel()).view_as(tensors[name]) % 1000 == 0, 3.0, tensors[name]
    )
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AssertionError):
        TINY[model](running.client, model, changed)


def test_unpublished_tokenizer_is_converted(running: Published) -> None:
    running.check(UNTOKENIZED, TINY["tiny/trocr"])
    assert (running.store.models / UNTOKENIZED / "tokenizer.json").exists()


def test_unconvertible_file_fails_with_the_cards_remedy(
    running: Published, hub: FakeHub, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    hub.models["tiny/pickle"] = tmp_path
    with pytest.raises(
        pytest.fail.Exception,
        match=r"tiny/pickle cannot be had .*pytorch_model\.bin: is neither a zip.*about\.missing",
    ):
        running.check("tiny/pickle", encoders.dense)


def test_run_without_a_hub_ends_with_advice(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(request.config.option, "published", True)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("SHOAL_STORE_DIR", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        pytest.UsageError,
        match=r"cannot be reached(.|\n)*HTTPS_PROXY(.|\n)*HF_ENDPOINT(.|\n)*HF_HOME",
    ):
        pytest_configure(request.config)


def test_models_on_this_machine_need_no_hub(
    running: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_reach = Hub(endpoint="http://127.0.0.1:1", cache=tmp_path)
    running.store.get("tiny/qwen3", lambda progress: None).close()
    store_dir = running.store.models.parent
    need(["tiny/qwen3"], store_dir, out_of_reach)
    with pytest.raises(pytest.UsageError, match="for tiny/other"):
        need(["tiny/qwen3", "tiny/other"], store_dir, out_of_reach)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(pytest.UsageError, match="HF_HUB_OFFLINE forbids to ask the hub; it is set"):
        need(["tiny/other"], store_dir, out_of_reach)
