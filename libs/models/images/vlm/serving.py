"""Load a checkpoint directory of a vision-language model as a served model: its backbone with a
processor.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from libs.catalog.card import Card, ImageSize
from libs.catalog.detect import read_card
from libs.catalog.overrides import Overrides
from libs.models.images.vlm.families.lighton import LongestSide
from libs.models.images.vlm.heads import Use
from libs.models.images.vlm.image_converter import OneSize
from libs.models.images.vlm.loading import VisionLanguageModel, load_vision_language
from libs.models.images.vlm.parts import PartsInput
from libs.models.images.vlm.processor import PartsProcessor
from libs.models.images.vlm.smart import SmartResize
from libs.models.images.vlm.tiles import Tiles
from libs.models.loaded.tiers import copying
from libs.models.output_cache import OutputCache
from libs.models.packed_model import PackedModel
from libs.models.text.heads.linear import HeadLinear
from libs.models.text.heads.tokens import TokenHead
from libs.models.text.loading import TokenizerGuard, without_int8
from libs.models.text.tokens import TokenProcessor


def load_vision_language_model(
    directory: Path,
    model_id: str,
    device: torch.device,
    dtype: torch.dtype,
    overrides: Overrides | None = None,
    base: Path | None = None,
) -> PackedModel:
    """Load the model. int8 is not supported for images: the model is loaded in the device's default
    type, and a warning is logged.
    """
    card = read_card(directory, model_id, overrides, base)
    card, dtype = without_int8(card, device, dtype)
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
        wide = None if overrides is None else replace(overrides, dtype="float32")
        model.fp32_loader = partial(
            load_vision_language_model,
            directory,
            model_id,
            torch.device("cpu"),
            torch.float32,
            wide,
            base,
        )
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


def image_size(given: PartsInput, most: int) -> ImageSize:
    """Return the rule for an image's tokens, including the prompt around it. `most`: tokens of an
    item.

    The estimate is an upper bound, except for images so thin that they are enlarged. Tiles are
    priced for a square image, which are at most `longest / side` times those of a thin one. For
    images that keep their size, the model's minimum is added.
    """
    frame, image_converter = given.frame_tokens(), given.image_converter
    if isinstance(image_converter, OneSize):
        return _square(math.isqrt(image_converter.rows), frame, most)
    if isinstance(image_converter, Tiles):
        tile = image_converter.rows + _TILE_MARKERS
        if (
            image_converter.splits and image_converter.longest is None
        ):  # the original image is split
            return ImageSize(
                0, 0, 0, max(1, image_converter.side // math.isqrt(tile)), frame + tile, most
            )
        across = (
            math.ceil(image_converter.longest / image_converter.side)
            if image_converter.splits and image_converter.longest
            else 1
        )
        return _square(1, (across**2 + 1 if across > 1 else 1) * tile + frame, most)
    if isinstance(image_converter, SmartResize):
        area, around = image_converter.square**2, frame + _IMAGE_MARKERS
        return ImageSize(
            0,
            0,
            0,
            image_converter.square,
            around + image_converter.least // area,
            min(most, image_converter.most // area + around),
        )
    if isinstance(image_converter, LongestSide):
        rows = math.ceil(image_converter.longest / image_converter.square) ** 2
        return ImageSize(0, 0, 0, image_converter.square, frame + 1, min(most, rows + frame))
    return ImageSize(0, 0, 0, 1, 0, most)


def max_tower_tokens(given: PartsInput) -> int:
    """Return the most tower tokens of one of its inputs."""
    image_converter = given.image_converter
    if isinstance(image_converter, OneSize):
        return image_converter.patches.most
    if isinstance(image_converter, Tiles):
        return image_converter.patches
    if isinstance(image_converter, LongestSide):
        return (
            math.ceil(image_converter.longest / image_converter.square)
            * image_converter.square
            // image_converter.patches.patch
        ) ** 2
    return (
        image_converter.most // image_converter.patches.patch**2
        if isinstance(image_converter, SmartResize)
        else 0
    )


_IMAGE_MARKERS = 2
"""Tokens around an image's rows: begin and end of the image."""

_TILE_MARKERS = 3
"""Tokens before a tile's rows: begin of the image, row and column, end of a line."""


def _square(side: int, extra: int, most: int) -> ImageSize:
    """Return `side * side` tokens for every image, plus `extra`."""
    return ImageSize(side, side, 0, 1, extra, min(most, side * side + extra))
