"""Embedders that their own code turns into such: GritLM, against transformers' Mistral without its mask."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from libs.catalog.cards import read_catalog
from libs.models import EncodeResult, EncodeWork, PackedModel, Role, load_model
from tests.models.restoring import restore
from tests.parity.checkpoints import write_checkpoint
from tests.parity.test_heads import TEXTS, run

# transformers and its dependencies warn of their own future.
pytestmark = pytest.mark.filterwarnings("ignore")

CODE = {
    name: f"modeling_gritlm7b.{kind}"
    for name, kind in (("AutoModel", "MistralModel"), ("AutoModelForCausalLM", "MistralForCausalLM"))
}
SHIPPED = "<|user|>\nGiven a web search query, retrieve relevant passages that answer the query\n<|embed|>\n"


def vectors(model: PackedModel, texts: Sequence[str], role: Role = "", instruction: str = "") -> NDArray[np.float32]:
    """As a request gets them."""
    result = run(model, EncodeWork(list(texts), role=role, instruction=instruction))[0]
    assert isinstance(result, EncodeResult)
    assert result.dense is not None
    return restore(result.dense)


def close(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def write_gritlm(directory: Path) -> Path:
    """A causal Mistral with windows, but for `auto_map`."""
    write_checkpoint("mistral", directory, head="causal_lm", positions=256)
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 9
    (directory / "config.json").write_text(json.dumps(config | {"auto_map": CODE}))
    return directory


@torch.inference_mode()
def gritlm(directory: Path, texts: Sequence[str], prompt: str, limit: int = 256) -> NDArray[np.float32]:
    """The package's `encode`: every token sees every other one, and those of the prompt are not pooled."""
    model = transformers.MistralModel.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    before = len(tokenizer(prompt)["input_ids"])
    rows = []
    for text in texts:
        ids = tokenizer(prompt + text, return_tensors="pt", truncation=True, max_length=limit)["input_ids"]
        seen = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        rows.append(model(input_ids=ids, attention_mask=seen).last_hidden_state[0, before:].mean(0))
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1).numpy()


def test_gritlm_from_its_directory_alone(tmp_path: Path) -> None:
    model = load_model(write_gritlm(tmp_path), "test/model", torch.device("cpu"), torch.float32)
    assert (model.card.family, model.card.kind, model.card.pooling, model.card.normalize) == ("mistral", "dense", ("mean",), True)
    together = vectors(model, TEXTS)
    close(together, gritlm(tmp_path, TEXTS, "<|embed|>\n"))
    close(np.concatenate([vectors(model, [text]) for text in TEXTS]), together)
    told = "<|user|>\nFind jokes\n<|embed|>\n"
    close(vectors(model, TEXTS, instruction=told), gritlm(tmp_path, TEXTS, told))


def test_gritlm_with_its_card(tmp_path: Path) -> None:
    """Queries have an instruction, documents only what ends it."""
    card = read_catalog().of("GritLM/GritLM-7B")
    model = load_model(write_gritlm(tmp_path), "GritLM/GritLM-7B", torch.device("cpu"), torch.float32, card)
    close(vectors(model, TEXTS, "query"), gritlm(tmp_path, TEXTS, SHIPPED))
    close(vectors(model, TEXTS, "document"), gritlm(tmp_path, TEXTS, "<|embed|>\n"))
