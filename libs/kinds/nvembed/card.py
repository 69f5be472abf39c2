"""NV-Embed (arXiv 2405.17428): a bidirectional Mistral with a latent attention layer between its
states and their mean.

config.json holds the Mistral's configuration and that of the layer; the encoder's tensors have a
prefix. The checkpoint's code is never run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import (
    CheckpointConfig,
    need_config,
    need_tokenizer,
)
from libs.kinds.kind import CheckpointPlace, Kind

MODEL_TYPE: Final = "nvembed"
ENCODER_PREFIX: Final = "embedding_model."
_HIDDEN = 4096  # the reference's sizes, where config.json leaves them out
_POSITIONS = 32_768
_MAX_SIZE = 1 << 16


@dataclass(frozen=True, slots=True)
class Latent:
    """The latent attention layer: `latents` learnt keys, `heads` of `head_size`.

    Attributes:
        ends: Whether the eos token ends a text.
    """

    latents: int
    heads: int
    head_size: int
    ends: bool


def nvembed_card(place: CheckpointPlace) -> Card:
    directory = place.directory
    read_latent(directory)
    config = need_config(directory, "config.json")
    need_tokenizer(directory)
    texts = config.part("text_config")
    return Card(
        model=place.model,
        revision=place.revision(["config.json", "tokenizer_config.json"]),
        family=texts.text("model_type"),
        kind="dense",
        tasks=("encode", "score", "classify"),
        representations=("dense",),
        max_tokens=texts.number("max_position_embeddings") or _POSITIONS,
        dimensions=_hidden(config),
        encoder_keys=("text_config",),
        encoder_prefix=ENCODER_PREFIX,
        pooling=("mean",),
        pool_prompt=not config.flag("is_mask_instruction", True),
        normalize=config.part("latent_attention_config").flag("output_normalize", True),
        scoring="cosine",
    )


def read_latent(directory: Path) -> Latent:
    """Return the layer's settings. Raises ModelBroken for values that are not served."""
    config = need_config(directory, "config.json")
    if not config.part("text_config").text("model_type"):
        raise config.broken(
            "text_config", "is missing, or its model_type: it describes the encoder"
        )
    own, hidden = config.part("latent_attention_config"), _hidden(config)
    for key in ("hidden_dim", "latent_dim"):
        if own.number(key, _HIDDEN) != hidden:
            raise own.broken(
                key, f"is {own.number(key, _HIDDEN)}, but the encoder's hidden size is {hidden}"
            )
    sizes = {"num_latents_value": 512, "num_cross_heads": 8, "cross_dim_head": _HIDDEN}
    latents, heads, size = (own.number(key, default) for key, default in sizes.items())
    for key, found in zip(sizes, (latents, heads, size), strict=True):
        if not 1 <= found <= _MAX_SIZE:
            raise own.broken(key, f"is {found}: 1 to {_MAX_SIZE:,} is served")
    return Latent(latents, heads, size, config.flag("add_eos", True))


def _hidden(config: CheckpointConfig) -> int:
    return config.part("text_config").number("hidden_size", _HIDDEN)


KIND: Final = Kind("dense", "nvembed", lambda place: place.model_type == MODEL_TYPE, nvembed_card)
