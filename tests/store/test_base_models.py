"""GLiNER as it is published: a torch checkpoint and training settings, and all else in the
repository of its base model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from libs.errors import ModelBroken
from libs.models import EntitiesWork
from libs.store import DownloadProgress
from libs.store.cache import RECORD
from tests.parity.gliner_models import LABELS, TEXTS, Reference, make_reference
from tests.parity.test_gliner import assert_same, found, load
from tests.store.conftest import MakeStore
from tests.store.fake_hub import FakeHub

pytestmark = pytest.mark.filterwarnings("ignore")

NAME, BASE = "urchade/gliner_small-v2.1", "microsoft/deberta-v3-small"
MARKERS = ("[FLERT]", "<<ENT>>", "<<SEP>>")
SAVED_BY_PACKAGE = ("encoder_config", "class_token_index", "vocab_size", "rel_token_index")


def ignore(progress: DownloadProgress) -> None:
    return


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("gliner"), {}, encoder="deberta-v2")


@pytest.fixture
def published(hub: FakeHub, reference: Reference, tmp_path: Path) -> Path:
    """The reference's model laid out as urchade's repositories are, and its base model as
    microsoft's.
    """
    own = tmp_path / "own"
    own.mkdir()
    torch.save(load_file(reference.directory / "model.safetensors"), own / "pytorch_model.bin")
    config = json.loads((reference.directory / "gliner_config.json").read_text())
    for key in SAVED_BY_PACKAGE:
        config.pop(key, None)
    (own / "gliner_config.json").write_text(json.dumps({**config, "model_name": BASE}))
    base = shutil.copytree(reference.directory.parent / "base", tmp_path / "base")
    hub.models |= {NAME: own, BASE: base}
    return own


def test_gliner_is_served_as_it_is_published(
    published: Path, reference: Reference, make_store: MakeStore, hub: FakeHub
) -> None:
    copy = make_store().get(NAME, ignore)
    ours = found(load(copy.directory), EntitiesWork(TEXTS, labels=tuple(LABELS), threshold=0.3))[0]
    assert sum(map(len, ours)) > 3
    assert_same(ours, reference.entities(TEXTS, LABELS, 0.3, flat=True))
    tokenizer = json.loads((copy.directory / "tokenizer.json").read_text())
    assert [entry["content"] for entry in tokenizer["added_tokens"]][-3:] == list(MARKERS)
    assert "model.safetensors" not in hub.sent, "the base model's weights are not fetched"
    sizes = {
        file["path"]: file["size"]
        for file in json.loads((copy.directory / RECORD).read_text())["files"]
    }
    assert sizes["gliner_config.json"] == (copy.directory / "gliner_config.json").stat().st_size


def test_base_model_that_does_not_fit_is_refused(
    published: Path, make_store: MakeStore, hub: FakeHub
) -> None:
    tokenizer = json.loads((hub.models[BASE] / "tokenizer.json").read_text())
    first = max(entry["id"] for entry in tokenizer["added_tokens"]) + 1_000
    extra = {**tokenizer["added_tokens"][0], "id": first, "content": "<more>"}
    (hub.models[BASE] / "tokenizer.json").write_text(
        json.dumps({**tokenizer, "added_tokens": [*tokenizer["added_tokens"], extra]})
    )
    with pytest.raises(ModelBroken, match="rows of the weights' embedding"):
        make_store().get(NAME, ignore)


def test_base_model_that_no_source_has_is_named(
    published: Path, make_store: MakeStore, hub: FakeHub
) -> None:
    del hub.models[BASE]
    with pytest.raises(ModelBroken, match=f"`model_name` is {BASE}"):
        make_store().get(NAME, ignore)


@pytest.mark.parametrize("name", [None, "../../etc", "/home/somewhere/deberta", 7])
def test_base_model_is_named_by_an_id(name: object, published: Path, make_store: MakeStore) -> None:
    config = json.loads((published / "gliner_config.json").read_text())
    (published / "gliner_config.json").write_text(json.dumps({**config, "model_name": name}))
    with pytest.raises(ModelBroken, match="must name the base model"):
        make_store().get(NAME, ignore)
