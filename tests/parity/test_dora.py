"""DoRA adapters (arXiv 2402.09353) scale each row of W + s B A to a trained length; compared with
PEFT's formula.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from libs.catalog.checkpoint import adapter as lora
from libs.errors import ModelBroken
from libs.models import load_model
from libs.models.runtime.loaded.adapter_config import read_adapter
from libs.models.runtime.loaded.peft import read_updates
from libs.models.weights import TensorFile
from tests.parity.adapters import STRENGTH, quietly, with_adapter, write_random_adapter
from tests.parity.checkpoints import Kind, random_model, write_checkpoint
from tests.parity.test_lora import CPU, Adapted, worst

QWEN = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
SETTINGS: tuple[tuple[Kind, dict[str, Any]], ...] = (
    ("bert", {"r": 4, "target_modules": ["query", "value", "dense"], "lora_alpha": 8}),
    ("bert", {"r": 3, "target_modules": ["key"], "use_rslora": True}),
    ("qwen3", {"r": 4, "target_modules": QWEN, "rank_pattern": {"q_proj": 2}}),
    ("modernbert", {"r": 4, "target_modules": "all-linear"}),
    ("jina_embeddings_v3", {"r": 4, "target_modules": "all-linear"}),
)


def write_dora(
    kind: Kind, directory: Path, *, seed: int = 0, **settings: Any
) -> transformers.PreTrainedModel:
    """Write a random DoRA adapter of the random model of a kind, and return that model with the
    formula's weights.
    """
    adapted = with_adapter(random_model(kind), use_dora=True, **settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            elif "lora_" in name:
                parameter.normal_(0.0, STRENGTH, generator=generator)
    adapted.save_pretrained(str(directory))
    return formula(random_model(kind), directory)


@torch.no_grad()
def formula(model: transformers.PreTrainedModel, directory: Path) -> transformers.PreTrainedModel:
    """Return the model with each adapted weight W as m (W + s B A) / |W + s B A|, with the length
    of each row.
    """
    tensors, read = load_file(directory / lora.WEIGHTS), read_adapter(directory)
    modules = dict(model.named_modules())
    for name, magnitude in tensors.items():
        if not name.endswith(".lora_magnitude_vector"):
            continue
        stem = name.removesuffix(".lora_magnitude_vector")
        module = stem.removeprefix("base_model.model.")
        weight = modules[module].weight
        assert isinstance(weight, torch.Tensor)
        summed = (
            weight
            + read.module_scale(module)
            * tensors[f"{stem}.lora_B.weight"]
            @ tensors[f"{stem}.lora_A.weight"]
        )
        weight.copy_(magnitude[:, None] * summed / summed.norm(dim=1, keepdim=True))
    return model.eval()


def adapted(
    root: Path, kind: Kind, settings: Sequence[dict[str, Any]], dtype: torch.dtype = torch.float32
) -> Adapted:
    """A model with DoRA adapters and one plain LoRA adapter."""
    write_checkpoint(kind, root / "base")
    model = load_model(root / "base", "org/base", CPU, dtype)
    merged = {"": random_model(kind)}
    for number, each in enumerate(settings):
        merged[f"org/dora-{number}"] = write_dora(
            kind, root / f"org/dora-{number}", seed=number, **each
        )
    merged["org/lora"] = write_random_adapter(
        kind, root / "org/lora", seed=9, r=2, target_modules="all-linear"
    )
    for name in filter(None, merged):
        model.add_adapter(name, root / name)
    return Adapted(model, merged)


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_batch_with_dora_lora_and_neither_equals_the_formula(
    kind: Kind, settings: dict[str, Any], tmp_path: Path
) -> None:
    a = adapted(tmp_path, kind, (settings, settings | {"r": 2}))
    batch = a.batch()
    got, wanted = a.forward(batch), a.wanted(batch)
    assert worst(got, wanted) <= 1e-5
    assert worst(got, [a.forward([one])[0] for one in batch]) <= 2e-6
    plain = [vector for one, vector in zip(batch, wanted, strict=True) if not one.adapter]
    dora = [
        vector for one, vector in zip(batch, wanted, strict=True) if one.adapter == "org/dora-0"
    ]
    assert (
        worst(
            sorted(plain, key=lambda vector: vector[0]), sorted(dora, key=lambda vector: vector[0])
        )
        > 0.01
    )


def test_formula_equals_pefts(tmp_path: Path) -> None:
    """PEFT's merging gives the same as the reference above."""
    own = write_dora("bert", tmp_path, r=4, target_modules=["query", "dense"], lora_alpha=8)
    with quietly():
        theirs = PeftModel.from_pretrained(random_model("bert"), str(tmp_path)).merge_and_unload()
    for (name, parameter), (_, merged) in zip(
        own.named_parameters(), theirs.named_parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, merged, rtol=1e-5, atol=1e-6, msg=name)


def test_bfloat16_is_as_good_as_the_merged_model_in_bfloat16(tmp_path: Path) -> None:
    a = adapted(tmp_path, "bert", (SETTINGS[0][1],), torch.bfloat16)
    batch = a.batch()
    exact = a.wanted(batch)
    own = Adapted(
        a.model, {name: model.to(torch.bfloat16) for name, model in a.merged.items()}
    ).wanted(batch)
    assert worst(a.forward(batch), exact) < 3 * worst(own, exact)


def test_int8_model_is_scaled(tmp_path: Path) -> None:
    """The adapted rows are as near to the formula as the plain rows are to their float32
    weights."""
    a = adapted(tmp_path, "bert", (SETTINGS[0][1],), torch.int8)
    assert a.model.load_fp32_fallback() is not None
    batch = a.batch()
    far = [
        (one.adapter, worst([got], [wanted]))
        for one, got, wanted in zip(batch, a.forward(batch), a.wanted(batch), strict=True)
    ]
    dora, plain = (
        max(error for name, error in far if name == adapter) for adapter in ("org/dora-0", "")
    )
    assert dora < 3 * plain


def test_fp32_fallback_has_the_adapter(tmp_path: Path) -> None:
    a = adapted(tmp_path, "bert", (SETTINGS[0][1],), torch.bfloat16)
    wide = a.model.load_fp32_fallback()
    assert wide is not None
    batch = a.batch()
    assert worst(Adapted(wide, a.merged).forward(batch), a.wanted(batch)) <= 1e-5


def test_merged_adapter_is_scaled(tmp_path: Path) -> None:
    """Adapters of vision-language models are merged when they are loaded."""
    base = write_checkpoint("bert", tmp_path / "base")
    merged = write_dora("bert", tmp_path / "dora", r=4, target_modules=["query", "dense"])
    updates = {
        f"{module}.weight": update for module, update in read_updates(tmp_path / "dora").items()
    }
    tensors = TensorFile.open(base).merged(updates)
    for name, parameter in merged.named_parameters():
        if name in updates:
            torch.testing.assert_close(tensors.read(name), parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_dora", [True, False])
def test_magnitude_and_the_configuration_must_agree(is_dora: bool, tmp_path: Path) -> None:
    model = load_model(write_checkpoint("bert", tmp_path / "base"), "org/base", CPU, torch.float32)
    write_dora("bert", tmp_path / "dora", r=4, target_modules=["query"])
    weights, config = tmp_path / "dora" / lora.WEIGHTS, tmp_path / "dora" / lora.FILE
    if is_dora:
        save_file(
            {
                name: tensor
                for name, tensor in load_file(weights).items()
                if "magnitude" not in name
            },
            weights,
        )
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": False}))
    with pytest.raises(ModelBroken, match=rf"query.*magnitude.*`use_dora` in .* is {is_dora}"):
        model.add_adapter("a", tmp_path / "dora")


def test_magnitude_of_another_size_is_refused(tmp_path: Path) -> None:
    model = load_model(write_checkpoint("bert", tmp_path / "base"), "org/base", CPU, torch.float32)
    write_dora("bert", tmp_path / "dora", r=4, target_modules=["query"])
    weights = tmp_path / "dora" / lora.WEIGHTS
    save_file(
        {
            name: tensor[:5] if "magnitude" in name else tensor
            for name, tensor in load_file(weights).items()
        },
        weights,
    )
    with pytest.raises(ModelBroken, match=r"lora_magnitude_vector' has shape \[5\].*need \[64\]"):
        model.add_adapter("a", tmp_path / "dora")


def test_family_with_precomputed_layers_refuses_dora(tmp_path: Path) -> None:
    """DeBERTa multiplies its distances by two of its layers once."""
    model = load_model(
        write_checkpoint("deberta-v2", tmp_path / "base"), "org/base", CPU, torch.float32
    )
    write_dora("deberta-v2", tmp_path / "dora", r=4, target_modules=["query_proj"])
    with pytest.raises(ModelBroken, match=r"`use_dora`.*merge_and_unload"):
        model.add_adapter("a", tmp_path / "dora")
