"""Random checkpoints of published models' shapes in bfloat16, the texts sent to them, and the FLOPs
of a forward pass.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
import transformers

from benchmarks.gpu.context import StepContext
from benchmarks.models.families import POSITIONS, PUBLISHED, FamilyShape
from libs.models import PackedModel, load_model
from tests.parity.checkpoints import random_model, write_tokenizer

TINY_CONFIG: Final[Mapping[str, object]] = {"intermediate_size": 64}
FLOPS_SAY: Final = (
    "FLOPs: 2 for each weight of the encoder's linear layers and token, and 4 x heads x head "
    "size for each query and key "
    "that it sees (causal: half; a window: at most its keys); no pooler, no embeddings"
)


def shapes(context: StepContext, names: Sequence[str] = ()) -> list[FamilyShape]:
    """Return the shapes with these names, or all, in PUBLISHED's order; small ones of the same
    families for a rehearsal.
    """
    chosen = [shape for shape in PUBLISHED if not names or shape.name in names]
    return [tiny(shape) for shape in chosen] if context.is_tiny else chosen


def tiny(shape: FamilyShape) -> FamilyShape:
    """Return a small model of the same family, for a rehearsal."""
    kept = {
        name: value
        for name, value in shape.config.items()
        if name in ("local_attention", "sliding_window")
    }
    return replace(
        shape, hidden=32, layers=2, heads=2, vocabulary=400, config={**kept, **TINY_CONFIG}
    )


def checkpoint(shape: FamilyShape) -> tuple[Path, transformers.PreTrainedModel]:
    """Return the shape's directory, written by the first step that asks for it, and transformers'
    model in bfloat16 on the CPU.
    """
    asked = hashlib.sha256(repr(shape).encode()).hexdigest()[:12]
    directory = Path(tempfile.gettempdir()) / "shoal-gpu-checkpoints" / f"{shape.name}-{asked}"
    if directory.exists():
        return directory, transformers.AutoModel.from_pretrained(
            directory, dtype=torch.bfloat16
        ).eval()
    directory.parent.mkdir(exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=directory.parent))
    model = write(shape, partial)
    partial.rename(directory)
    return directory, model


def write(shape: FamilyShape, directory: Path) -> transformers.PreTrainedModel:
    """Write the checkpoint, and return transformers' model of it, in bfloat16 on the CPU."""
    model = random_model(
        shape.kind, hidden=shape.hidden, layers=shape.layers, heads=shape.heads,
        positions=POSITIONS, vocabulary=shape.vocabulary,
        config=shape.config,
    ).to(torch.bfloat16)  # fmt: skip
    model.save_pretrained(directory)
    write_tokenizer(shape.kind, directory, shape.vocabulary, POSITIONS)
    return model


def loaded(shape: FamilyShape, context: StepContext) -> PackedModel:
    """Return the shape's model on the device."""
    directory, _ = checkpoint(shape)
    model = load_model(directory, f"random/{shape.name}", context.device, torch.bfloat16)
    assert isinstance(model, PackedModel)
    return model


def flops(model: transformers.PreTrainedModel, shape: FamilyShape, lengths: Sequence[int]) -> float:
    """Return the FLOPs of one forward pass over sequences of these lengths, counted as FLOPS_SAY
    says.
    """
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    weights = sum(
        module.weight.numel() for name, module in linear.items() if not name.startswith("pooler")
    )
    size = (
        shape.config.get("head_dim")
        or getattr(model.config, "head_dim", None)
        or shape.hidden // shape.heads
    )
    assert isinstance(size, int)
    keys = sum(
        _pairs(length, causal, window)
        for causal, window in _sight(model.config, shape)
        for length in lengths
    )
    return 2.0 * weights * sum(lengths) + 4.0 * shape.heads * size * keys


def _sight(
    config: transformers.PretrainedConfig, shape: FamilyShape
) -> list[tuple[bool, int | None]]:
    """Return for each layer if it is causal, and how many keys its window has."""
    causal = shape.kind in ("qwen2", "qwen3", "llama", "mistral")
    window = getattr(config, "local_attention", None) or getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * shape.layers
    return [(causal, window if kind == "sliding_attention" else None) for kind in kinds]


def _pairs(length: int, causal: bool, window: int | None) -> float:
    """Return how many pairs of queries and keys of a sequence are multiplied."""
    seen = length if window is None else min(length, window)
    whole = float(length * seen)
    return whole - seen * (seen - 1) / 2 if causal else whole
