"""Load a checkpoint directory of a vision-language model as a served model: its backbone with a
processor.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from libs.catalog.card import Card
from libs.models.images.vlm.heads import Use
from libs.models.images.vlm.loading import VisionLanguageModel, load_vision_language
from libs.models.images.vlm.prices import image_size, max_tower_tokens
from libs.models.images.vlm.processor import PartsProcessor
from libs.models.interface.output_cache import OutputCache
from libs.models.interface.source import LoadArguments
from libs.models.runtime.loaded.tiers import copying
from libs.models.runtime.packed_model import PackedModel
from libs.models.text.heads.linear import HeadLinear
from libs.models.text.heads.tokens import TokenHead
from libs.models.text.loading import TokenizerGuard, without_int8
from libs.models.text.tokens import TokenProcessor


def load(source: LoadArguments) -> PackedModel:
    """Load the model. int8 is not supported for images: the model is loaded in the device's default
    type, and a warning is logged.
    """
    directory, device, base = source.directory, source.device, source.base
    card, dtype = without_int8(source.card(), device, source.dtype)
    use: Use = (
        "score"
        if card.scoring == "yes_no"
        else "dense"
        if "dense" in card.representations
        else "multi_vector"
    )
    with copying(device):
        loaded = load_vision_language(directory, dtype=dtype, device=device, use=use, base=base)
        card = _measured(card, loaded)
        loaded.input.text.limit = card.max_tokens
        output_cache = OutputCache(card.model, card.revision, dtype, loaded.input.image_converter)
        processor = PartsProcessor(card, loaded.input, output_cache, loaded.weights)
        model = PackedModel(card, loaded.backbones, TokenizerGuard(processor), loaded.names, device)
        model.output_cache = output_cache
        model.default_role = loaded.input.prompts.default
        model.tokens = TokenProcessor(card, loaded.input.text.tokenizer)
        model.max_tower_tokens = max_tower_tokens(loaded.input)
        if device.type != "cpu":
            model.gather()
    if dtype is not torch.float32:
        model.fp32_loader = partial(load, source.in_float32())
    return model


def _measured(card: Card, loaded: VisionLanguageModel) -> Card:
    """Complete the card with facts of the loaded model: limits, vector width and image tokens."""
    (backbone,) = loaded.backbones
    most = min(card.max_tokens, backbone.encoder.max_positions)
    card = replace(card, max_tokens=most, images=image_size(loaded.input, most))
    head = backbone.heads.get("multi_vector")
    layer = head.layers[-1] if isinstance(head, TokenHead) and len(head.layers) else None
    return (
        replace(card, multi_vector_dimensions=len(layer.weight))
        if isinstance(layer, HeadLinear)
        else card
    )
