"""Models that read images and generate text: how they are recognised, and their Card.

Florence-2 and the vision-encoder-decoders are recognised by their `model_type`. A vision-language
model may as well retrieve: it generates if it has a language head, a chat template and a
generation_config.json, no modules.json, and no card with another kind.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from libs.catalog.card import Card, Task
from libs.catalog.checkpoint.chat import read_template
from libs.catalog.checkpoint.files import (
    CheckpointConfig,
    need_config,
    need_tokenizer,
    read_config,
)
from libs.kinds.kind import CheckpointPlace, Kind

FLORENCE: Final = "florence2"
ENCODER_DECODER: Final = "vision-encoder-decoder"
CONVERSATIONS: Final = (
    "idefics3",
    "glm_ocr",
    "lighton_ocr",
    "paddleocr_vl",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_vl",
    "smolvlm",
)
MODEL_TYPES: Final = (FLORENCE, ENCODER_DECODER, *CONVERSATIONS)
GENERATION: Final = "generation_config.json"

_FILES: Final = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "tokenizer_config.json",
    "tokenizer.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_TASKS: Final[dict[str, tuple[Task, ...]]] = {
    FLORENCE: ("text", "regions"),
    ENCODER_DECODER: ("text",),
}


def is_image_generative(place: CheckpointPlace) -> bool:
    """Return True if a checkpoint is a model that reads images and generates text."""
    config, kind = read_config(place.directory, "config.json"), place.named
    if config is None or kind not in (None, "generative"):
        return False
    if config.values.get("model_type") in CONVERSATIONS:
        return kind == "generative" or _converses(place.directory, config)
    return config.values.get("model_type") in (FLORENCE, ENCODER_DECODER)


def _converses(directory: Path, config: CheckpointConfig) -> bool:
    names = config.texts("architectures")
    if (
        not any(name.endswith("ForConditionalGeneration") for name in names)
        or (directory / "modules.json").exists()
    ):
        return False
    return (directory / GENERATION).is_file() and bool(read_template(directory))


def image_generative_card(place: CheckpointPlace) -> Card:
    """Raise ModelBroken naming the file and the key at fault."""
    config = need_config(place.directory, "config.json")
    need_tokenizer(place.directory)
    family = config.text("model_type")
    if family in CONVERSATIONS:
        return _conversation(place, config)
    texts = config.part("text_config" if family == FLORENCE else "decoder")
    return Card(
        model=place.model,
        revision=place.revision(list(_FILES)),
        family=family,
        kind="generative",
        tasks=_TASKS[family],
        representations=(),
        max_tokens=texts.number("max_position_embeddings", 1024),
        inputs=("image",),
    )


def _conversation(place: CheckpointPlace, config: CheckpointConfig) -> Card:
    texts = config.part("text_config") if "text_config" in config.values else config
    card = Card(
        model=place.model,
        revision=place.revision(list(_FILES)),
        family=config.text("model_type"),
        kind="generative",
        tasks=("text",),
        representations=(),
        max_tokens=texts.number("max_position_embeddings", 8192),
        inputs=("text", "image"),
    )
    return replace(card, template=read_template(place.directory), message_parts=True)


KIND: Final = Kind("generative", "image_generative", is_image_generative, image_generative_card)
