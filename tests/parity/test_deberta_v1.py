"""DeBERTa v1 against transformers in the forms of its config.json, and unsupported settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers

from libs.errors import ModelBroken
from libs.models.interface.packed import Packed
from libs.models.text.families.bert import deberta
from tests.parity.checkpoints import random_model, write_checkpoint
from tests.parity.test_families import load, packed, random_ids, reference, worst

Settings = Mapping[str, object]

VARIANTS: dict[str, Settings] = {
    "content of the query only": {"pos_att_type": ["c2p"]},
    "content of the key only": {"pos_att_type": ["p2c"]},
    "far distances share a vector": {"max_relative_positions": 20},
    "absolute positions and segments": {"position_biased_input": True, "type_vocab_size": 2},
    "narrow embeddings": {"embedding_size": 24},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_form_equals_transformers(settings: Settings, tmp_path: Path) -> None:
    encoder = load(write_checkpoint("deberta", tmp_path, config=settings))
    ids = random_ids((1, 2, 9, 9, 33, 100))
    wanted = reference(random_model("deberta", config=settings), ids)
    assert worst(packed(encoder, ids), wanted) <= 1e-5


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled, for the accelerator alone"
)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_accelerator_kernel_equals_computation_by_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    encoder = load(write_checkpoint("deberta", tmp_path))
    batch = Packed.from_sequences(random_ids((1, 9, 45)))
    plain = [encoder(batch), encoder(batch, rows="last")]
    monkeypatch.setattr(deberta, "has_triton", lambda x: True)
    assert worst([encoder(batch), encoder(batch, rows="last")], plain) <= 1e-5


@pytest.mark.parametrize("legacy", [True, False])
def test_masked_language_models_are_encoders_too(legacy: bool, tmp_path: Path) -> None:
    settings = {"legacy": legacy}
    encoder = load(write_checkpoint("deberta", tmp_path, head="masked_lm", config=settings))
    model = random_model("deberta", head="masked_lm", config=settings)
    assert isinstance(model, transformers.DebertaForMaskedLM)
    ids = random_ids((7, 7, 20))
    assert worst(packed(encoder, ids), reference(model.deberta, ids)) <= 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"relative_attention": False},
        {"talking_head": True},
        {"pos_att_type": "c2p|p2p"},
        {"attention_head_size": 12},
    ],
)
def test_unsupported_settings_are_refused_by_key(settings: Settings, tmp_path: Path) -> None:
    path = write_checkpoint("deberta", tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ModelBroken, match=f"config.json: {list(settings)[-1]} is "):
        load(tmp_path)
