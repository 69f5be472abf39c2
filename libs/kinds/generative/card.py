"""Generative models: recognition of their directories, and their Card.

Encoder-decoder models are recognised by their architecture. A causal language model is one only if
it has a chat template and a generation_config.json; nothing else distinguishes it from one that was
trained to embed or to rank, which a card names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from libs.catalog.card import Card
from libs.catalog.checkpoint.chat import takes_messages, with_template
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.kinds.kind import in_layout

SEQUENCE_TO_SEQUENCE: Final = ("bart", "marian", "mbart", "t5", "mt5")
CAUSAL: Final = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "lfm2",
    "llama",
    "ministral3",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5_text",
)
_SEQUENCE_TO_SEQUENCE_CLASSES: Final = ("ForConditionalGeneration", "MTModel")
FILE: Final = "generation_config.json"


def is_generative(files: Checkpoint) -> bool:
    """Return True if a directory without modules.json is a generative model. Raises ModelBroken for
    a generative model of a type that is not supported.
    """
    if files.modules.listed:
        return False
    family = files.config.text("model_type")
    if family in SEQUENCE_TO_SEQUENCE and files.architecture.endswith(
        _SEQUENCE_TO_SEQUENCE_CLASSES
    ):
        return True
    is_causal = family in CAUSAL and files.architecture.endswith("ForCausalLM")
    if is_causal and (files.directory / FILE).is_file() and takes_messages(files):
        return True
    _refuse_others(files)
    return False


def _refuse_others(files: Checkpoint) -> None:
    translates = files.architecture.endswith(_SEQUENCE_TO_SEQUENCE_CLASSES)
    chats = (
        files.architecture.endswith("ForCausalLM")
        and (files.directory / FILE).is_file()
        and takes_messages(files)
    )
    if translates or chats:
        served = ", ".join(SEQUENCE_TO_SEQUENCE if translates else CAUSAL)
        raise files.config.broken(
            "model_type",
            f"is {files.config.text('model_type')!r} and the model generates texts "
            f"({files.architecture}); "
            f"the supported types of generative models are {served}. "
            "A card of the catalog can give another use, by `detect: {kind: …}`",
        )


def generative_card(files: Checkpoint, card: Card) -> Card:
    """Return the card of a generative model."""
    card = replace(card, tasks=("text",))
    return with_template(files, card) if card.family in CAUSAL else card


KIND: Final = in_layout("generative", is_generative, generative_card, has_template=True)
