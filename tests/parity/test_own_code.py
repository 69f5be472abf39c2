"""Embedding models defined by their checkpoint's code, against transformers' Mistral and Llama
without a mask, and reimplementations.

GritLM does not pool its instruction. NV-Embed has a latent attention layer (arXiv 2405.17428,
section 3.2); its projections are computed here as the checkpoint stores them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from libs.catalog.cards import read_catalog
from libs.errors import ModelBroken
from libs.models import EncodeResult, EncodeWork, PackedModel, Role, load_model
from tests.models.restoring import restore
from tests.parity.checkpoints import random_model, write_checkpoint
from tests.parity.test_heads import TEXTS, run

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

CODE = {
    name: f"modeling_gritlm7b.{kind}"
    for name, kind in (
        ("AutoModel", "MistralModel"),
        ("AutoModelForCausalLM", "MistralForCausalLM"),
    )
}
SHIPPED = (
    "<|user|>\nGiven a web search query, retrieve relevant passages that answer the "
    "query\n<|embed|>\n"
)


def vectors(
    model: PackedModel, texts: Sequence[str], role: Role = "", instruction: str = ""
) -> NDArray[np.float32]:
    """Return the vectors of a request."""
    result = run(model, EncodeWork(list(texts), role=role, instruction=instruction))[0]
    assert isinstance(result, EncodeResult)
    assert result.dense is not None
    return restore(result.dense)


def close(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def write_gritlm(directory: Path) -> Path:
    """Write a Mistral that is causal and has windows, apart from `auto_map`."""
    write_checkpoint("mistral", directory, head="causal_lm", positions=256)
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 9
    (directory / "config.json").write_text(json.dumps(config | {"auto_map": CODE}))
    return directory


@torch.inference_mode()
def gritlm(
    directory: Path, texts: Sequence[str], prompt: str, limit: int = 256
) -> NDArray[np.float32]:
    """Compute the package's `encode`: every token sees every other one, and the prompt's are not
    pooled."""
    model = transformers.MistralModel.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    before = len(tokenizer(prompt)["input_ids"])
    rows = []
    for text in texts:
        ids = tokenizer(prompt + text, return_tensors="pt", truncation=True, max_length=limit)[
            "input_ids"
        ]
        seen = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        rows.append(model(input_ids=ids, attention_mask=seen).last_hidden_state[0, before:].mean(0))
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1).numpy()


def test_gritlm_is_served_from_its_directory(tmp_path: Path) -> None:
    model = load_model(write_gritlm(tmp_path), "test/model", torch.device("cpu"), torch.float32)
    assert (model.card.family, model.card.kind, model.card.pooling, model.card.normalize) == (
        "mistral",
        "dense",
        ("mean",),
        True,
    )
    together = vectors(model, TEXTS)
    close(together, gritlm(tmp_path, TEXTS, "<|embed|>\n"))
    close(np.concatenate([vectors(model, [text]) for text in TEXTS]), together)
    reported = "<|user|>\nFind jokes\n<|embed|>\n"
    close(vectors(model, TEXTS, instruction=reported), gritlm(tmp_path, TEXTS, reported))


def test_gritlm_with_its_card(tmp_path: Path) -> None:
    """Queries have an instruction, documents only what ends it."""
    card = read_catalog().overrides("GritLM/GritLM-7B")
    model = load_model(
        write_gritlm(tmp_path), "GritLM/GritLM-7B", torch.device("cpu"), torch.float32, card
    )
    close(vectors(model, TEXTS, "query"), gritlm(tmp_path, TEXTS, SHIPPED))
    close(vectors(model, TEXTS, "document"), gritlm(tmp_path, TEXTS, "<|embed|>\n"))


LATENT = {
    "model_type": "latent_attention",
    "num_latents_value": 5,
    "num_cross_heads": 3,
    "cross_dim_head": 7,
    "hidden_dim": 64,
    "latent_dim": 64,
}
NV_QUERY = "Instruct: Given a question, retrieve passages that answer the question\nQuery: "


def write_nvembed(directory: Path) -> Path:
    """Write a small checkpoint with the names and shapes of the published one."""
    write_checkpoint("bidir_mistral", directory, positions=256)
    encoder = load_file(directory / "model.safetensors")
    wide, generator = 3 * 7, torch.Generator().manual_seed(1)
    attend, forward = "cross_attend_blocks.0.fn", "cross_attend_blocks.1.fn.net"
    shapes: dict[str, tuple[int, ...]] = {
        "latents": (5, 64),
        f"{attend}.to_q.weight": (wide, 64),
        f"{attend}.to_kv.weight": (2 * wide, 64),
        f"{attend}.to_out.weight": (64, wide),
        f"{forward}.0.weight": (512, 64),
        f"{forward}.0.bias": (512,),
        f"{forward}.2.weight": (64, 256),
        f"{forward}.2.bias": (64,),
    }
    for norm in ("0.norm", "0.norm_context", "1.norm"):
        shapes |= {f"cross_attend_blocks.{norm}.{end}": (64,) for end in ("weight", "bias")}
    layer = {
        f"latent_attention_model.{name}": torch.randn(*shape, generator=generator) * 0.2
        for name, shape in shapes.items()
    }
    save_file(
        {f"embedding_model.{name}": tensor for name, tensor in encoder.items()} | layer,
        directory / "model.safetensors",
    )
    texts = json.loads((directory / "config.json").read_text())
    config = {
        "model_type": "nvembed",
        "architectures": ["NVEmbedModel"],
        "add_eos": True,
        "is_mask_instruction": True,
    }
    (directory / "config.json").write_text(
        json.dumps(config | {"text_config": texts, "latent_attention_config": LATENT})
    )
    return directory


def latent(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """Compute the cross attention of states [tokens, hidden] to the latents, and the feed-forward
    with a GELU gate, each with its residual.
    """

    def part(name: str) -> Tensor:
        return state[f"latent_attention_model.{name}"]

    def norm(y: Tensor, name: str) -> Tensor:
        return F.layer_norm(
            y,
            (64,),
            part(f"cross_attend_blocks.{name}.weight"),
            part(f"cross_attend_blocks.{name}.bias"),
        )

    seen = norm(part("latents"), "0.norm_context")
    k, v = F.linear(seen, part("cross_attend_blocks.0.fn.to_kv.weight")).chunk(2, dim=-1)
    q = F.linear(norm(x, "0.norm"), part("cross_attend_blocks.0.fn.to_q.weight"))
    q, k, v = (y.view(len(y), 3, 7).transpose(0, 1) for y in (q, k, v))
    mixed = ((q @ k.transpose(1, 2) / 7**0.5).softmax(-1) @ v).transpose(0, 1).flatten(1)
    x = x + F.linear(mixed, part("cross_attend_blocks.0.fn.to_out.weight"))
    stem = "cross_attend_blocks.1.fn.net"
    up, gate = F.linear(norm(x, "1.norm"), part(f"{stem}.0.weight"), part(f"{stem}.0.bias")).chunk(
        2, dim=-1
    )
    return x + F.linear(up * F.gelu(gate), part(f"{stem}.2.weight"), part(f"{stem}.2.bias"))


@torch.inference_mode()
def nvembed(directory: Path, texts: Sequence[str], prompt: str = "") -> NDArray[np.float32]:
    """Compute the reference's `encode`: the first tokens, as many as the instruction has, including
    <s>, are not pooled.
    """
    model, state = (
        random_model("bidir_mistral", positions=256),
        load_file(directory / "model.safetensors"),
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    before = len(tokenizer.tokenize(prompt)) if prompt else 0
    rows = []
    for text in texts:
        ids = tokenizer(
            prompt + text + tokenizer.eos_token,
            return_tensors="pt",
            truncation=True,
            max_length=256,
        )["input_ids"]
        rows.append(latent(state, model(input_ids=ids).last_hidden_state[0])[before:].mean(0))
    return F.normalize(torch.stack(rows), dim=-1).numpy()


def test_nvembed_is_served_from_its_directory(tmp_path: Path) -> None:
    model = load_model(write_nvembed(tmp_path), "test/model", torch.device("cpu"), torch.float32)
    assert (model.card.family, model.card.kind, model.card.dimensions, model.max_tokens) == (
        "bidir_mistral",
        "dense",
        64,
        256,
    )
    together = vectors(model, TEXTS)
    close(together, nvembed(tmp_path, TEXTS))
    close(np.concatenate([vectors(model, [text]) for text in TEXTS]), together)


def test_nvembed_with_its_card(tmp_path: Path) -> None:
    card = read_catalog().overrides("nvidia/NV-Embed-v2")
    model = load_model(
        write_nvembed(tmp_path), "nvidia/NV-Embed-v2", torch.device("cpu"), torch.float32, card
    )
    close(vectors(model, TEXTS, "query"), nvembed(tmp_path, TEXTS, NV_QUERY))
    close(vectors(model, TEXTS, "document"), nvembed(tmp_path, TEXTS))


def test_nvembed_accounts_for_its_tensors(tmp_path: Path) -> None:
    write_nvembed(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"latent_attention_model.more": torch.zeros(1)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ModelBroken, match=r"tensor 'latent_attention_model\.more' does not belong"):
        load_model(tmp_path, "test/model", torch.device("cpu"), torch.float32)
    del tensors["latent_attention_model.latents"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelBroken, match=r"tensor `latent_attention_model\.latents`"):
        load_model(tmp_path, "test/model", torch.device("cpu"), torch.float32)
