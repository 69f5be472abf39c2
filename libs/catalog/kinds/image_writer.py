"""Models that read images and write text: how they are recognised, and their Card. Their `model_type` alone says so."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from libs.catalog.card import Card, Task
from libs.catalog.checkpoint.files import digest, need_config, read_config, tensor_files
from libs.errors import ModelBroken

FLORENCE: Final = "florence2"
ENCODER_DECODER: Final = "vision-encoder-decoder"
MODEL_TYPES: Final = (FLORENCE, ENCODER_DECODER)

_FILES: Final = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json",
    "tokenizer.json",
)  # fmt: skip
_TASKS: Final[dict[str, tuple[Task, ...]]] = {FLORENCE: ("text", "regions"), ENCODER_DECODER: ("text",)}


def is_image_writer(directory: Path) -> bool:
    """Whether a checkpoint is a model that reads images and writes text."""
    config = read_config(directory, "config.json")
    return config is not None and config.values.get("model_type") in MODEL_TYPES


def image_writer_card(directory: Path, model: str) -> Card:
    """Raises ModelBroken naming the file and the key at fault."""
    config = need_config(directory, "config.json")
    if not (directory / "tokenizer.json").exists():
        raise ModelBroken(f"tokenizer.json: missing from {directory}. transformers' AutoTokenizer writes it with save_pretrained")
    family = config.text("model_type")
    texts = config.part("text_config" if family == FLORENCE else "decoder")
    return Card(
        model=model,
        revision=model.partition("@")[2]
        or directory.name.partition("@")[2]
        or digest(directory, list(_FILES), tensor_files(directory, "")),
        family=family,
        kind="writer",
        tasks=_TASKS[family],
        representations=(),
        max_tokens=texts.number("max_position_embeddings", 1024),
        inputs=("image",),
    )
