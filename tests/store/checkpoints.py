"""Directories as the hub holds them: small, but with everything that a real one may have."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

MODEL = "org/model"
WEIGHT_BYTES = 1_000_000


def write_model(directory: Path, *, numbers: int = WEIGHT_BYTES // 4, seed: int = 0) -> Path:
    """A sentence-transformers model with a Dense module, its weights also as pickle, and files that
    are of no use for serving.
    """
    values = np.random.default_rng(seed).standard_normal(numbers, dtype=np.float32)
    (directory / "2_Dense").mkdir(parents=True)
    (directory / "1_Pooling").mkdir()
    (directory / "onnx").mkdir()
    save_file({"w": values}, directory / "model.safetensors")
    save_file({"linear": values[:100]}, directory / "2_Dense" / "model.safetensors")
    modules = [
        {"idx": number, "path": path} for number, path in enumerate(("", "1_Pooling", "2_Dense"))
    ]
    texts = {
        "config.json": {"model_type": "bert"},
        "modules.json": modules,
        "tokenizer.json": {"words": list(range(1000))},
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
        "2_Dense/config.json": {"in_features": 10},
        "onnx/config.json": {},
    }
    for name, value in texts.items():
        (directory / name).write_text(json.dumps(value))
    (directory / "spiece.model").write_bytes(b"\x0a\x00")
    (directory / "empty.txt").write_bytes(b"")
    for name in (
        "README.md",
        "pytorch_model.bin",
        "onnx/model.onnx",
        "training_args.bin",
        ".gitattributes",
        "run.py",
    ):
        (directory / name).write_bytes(b"of no use" * 100)
    return directory


WANTED = {
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "config.json",
    "empty.txt",
    "model.safetensors",
    "modules.json",
    "spiece.model",
    "tokenizer.json",
}
"""Files of the model that are fetched."""


def same(found: Path, directory: Path) -> bool:
    """Return True if `found` has the wanted files of `directory` and no other visible file."""
    names = {
        str(path.relative_to(found))
        for path in found.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }
    return names == WANTED and all(
        (found / name).read_bytes() == (directory / name).read_bytes() for name in names
    )
