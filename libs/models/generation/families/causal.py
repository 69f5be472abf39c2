"""Causal language models: a packed text encoder of a causal family, and a language head, which may
be its token table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from libs.errors import ModelBroken
from libs.models.generation.decoding.language_model import LanguageHead, LanguageModel
from libs.models.generation.decoding.settings import DecodeSettings
from libs.models.layers.spec import Config
from libs.models.text.families.decoders.gemma2 import final_softcap
from libs.models.text.registry import build_encoder
from libs.models.weights import HeadRule, Maybe, TensorFile

MODEL_TYPES: Final = (
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
_TIED: Final = ("gemma", "gemma2", "gemma3_text", "lfm2")  # if config.json does not specify it
_HEAD: Final[Mapping[str, HeadRule]] = {"lm_head": Maybe("head")}


def load(
    config: Config,
    tensors: TensorFile,
    settings: DecodeSettings,
    dtype: torch.dtype,
    device: torch.device,
) -> LanguageModel:
    """Load a causal model. Raises ModelBroken with the key of config.json, or the file and tensor,
    that is not supported.
    """
    decoder, state = build_encoder(
        config.values, tensors, dtype=dtype, device=device, head_tables=_HEAD
    )
    if not decoder.causal:
        raise ModelBroken("config.json: the model is not causal, so it cannot generate text")
    family = config.text("model_type")
    tied = config.flag("tie_word_embeddings", family in _TIED)
    if family == "lfm2":  # its own key precedes the usual one
        tied = config.flag("tie_embedding", tied)
    if tied or "head.weight" not in state:
        if not tied:
            raise ModelBroken(f"{tensors.source}: tensor 'lm_head.weight' is missing")
        weight = decoder.token_weight
    else:
        weight = state["head.weight"].to(dtype)
    return LanguageModel(
        decoder, LanguageHead(weight, softcap=final_softcap(config)).eval(), settings
    )
