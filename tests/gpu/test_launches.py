"""The launch budget of each family: a kernel more in its layer fails here, without a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu.launches import CONFIGS, PUBLISHED, build_encoder, count_kernels, launches
from tests.support.triton_launches import _TRITON_MODULES

# Kernels of a layer, and of the embeddings, angles and final norm around all layers.
BUDGETS = {
    "bert": (8, 4),
    "mpnet": (8, 4),
    "roberta-prelayernorm": (9, 5),
    "modernbert": (9, 3),
    "eurobert": (9, 3),
    "nomic_bert": (9, 4),
    "gte": (9, 4),
    "qwen2": (9, 3),
    "qwen3": (9, 3),
    "llama": (9, 3),
    "gemma2": (11, 4),
    "gemma3_text": (11, 4),
    "phi3": (9, 3),
    "t5": (8, 2),
    "albert": (7, 12),  # GELU by tanh is a part of its matrix product
    "deberta-v2": (10, 3),
}


@pytest.mark.parametrize("kind", BUDGETS)
def test_no_family_launches_more_than_its_budget(kind: str) -> None:
    total, a_layer = count_kernels(kind, 2)
    budget, rest = BUDGETS[kind]
    assert a_layer.total() <= budget, dict(a_layer)
    assert total - 2 * a_layer.total() <= rest, dict(
        launches(build_encoder(kind, 2, CONFIGS.get(kind)))
    )


@pytest.mark.parametrize(
    ("model", "budget"),
    [
        ("BERT-large", 196),
        ("ModernBERT-base", 201),
        ("Qwen3-0.6B", 255),
        ("EmbeddingGemma-300M", 268),
    ],
)
def test_published_models_have_the_documented_launches(model: str, budget: int) -> None:
    total, _ = count_kernels(*PUBLISHED[model])
    assert total == budget
    assert f"| {budget} |" in next(
        line
        for line in Path("docs/gpu.md").read_text().splitlines()
        if line.startswith(f"| {model} |")
    )


def test_one_row_a_sequence_needs_few_more() -> None:
    """The rows of the last layer's queries and residual are chosen."""
    encoder = build_encoder("qwen3", 2, CONFIGS["qwen3"])
    assert launches(encoder, "last").total() <= launches(encoder).total() + 3


def test_kernel_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter counts operators in place, copies of a residual, and Triton kernels."""
    encoder = build_encoder("modernbert", 2)
    linear = type(encoder.stack[0].attn.out)
    plain, add = launches(encoder), linear.add
    monkeypatch.setattr(
        linear, "add", lambda self, x, residual, *, overwrite: add(self, x, residual)
    )
    copied = launches(encoder)
    assert (plain["addmm_"], plain["addmm"], copied["addmm_"], copied["addmm"]) == (2, 0, 0, 4)
    assert copied.total() == plain.total() + 2
    assert plain["_norm_rotate"] == 2
    assert plain["_angles"] == 1


def test_every_module_with_kernels_is_recorded() -> None:
    found = {".".join(path.with_suffix("").parts) for path in Path("libs").rglob("*_triton.py")}
    assert set(_TRITON_MODULES) == found
    assert all(importlib.import_module(name) for name in found)


def test_half_precision_is_counted() -> None:
    assert build_encoder("bert", 1).dtype is torch.bfloat16
