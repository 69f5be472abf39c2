"""Load a checkpoint directory of images as a served model: the backbones of `loading.py` with a
processor.

The interface between image models and a worker is an `ImageModel` (backbones and image input), a
Card of kind "images", and a `Processor` that builds sequences from items' parts and results from
outputs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from libs.catalog.card import Card, ImageSize
from libs.models.images.detection.detector import Detector
from libs.models.images.detection.dino_loading import LimitedProcessing
from libs.models.images.detection.loading import load_detector
from libs.models.images.detection.processor import RegionsProcessor
from libs.models.images.loading import ImageModel, load_images
from libs.models.images.patches import ImageInput
from libs.models.images.processing import PatchBudget
from libs.models.images.processor import IMAGE_HEAD, TEXT_HEAD, ImageProcessor, LabelScale
from libs.models.images.texts import ImageModelTexts, read_texts
from libs.models.interface.output_cache import OutputCache
from libs.models.interface.processor import Processor
from libs.models.interface.source import LoadArguments
from libs.models.runtime.backbone import Backbone
from libs.models.runtime.loaded.peft import TensorNames
from libs.models.runtime.loaded.tiers import copying
from libs.models.runtime.packed_model import PackedModel
from libs.models.text.loading import TokenizerGuard, without_int8
from libs.models.text.tokens import TokenProcessor

log = logging.getLogger(__name__)


def load(source: LoadArguments) -> PackedModel:
    """Load an image model. LoRA adapters are refused when they are loaded. int8 is not supported:
    the model is loaded in the device's default type, and a warning is logged.
    """
    directory, device = source.directory, source.device
    card, dtype = without_int8(source.card(), device, source.dtype)
    with copying(device):
        card, backbones, processor, output_cache, texts = _load_parts(
            directory, card, dtype, device
        )
        model = PackedModel(
            card, backbones, TokenizerGuard(processor), TensorNames({}, (), {}), device
        )
        model.output_cache = output_cache
        model.tokens = None if texts is None else TokenProcessor(card, texts.tokenizer)
        if device.type != "cpu":
            model.gather()
    if dtype is not torch.float32:
        model.fp32_loader = partial(load, source.in_float32())
    return model


def _load_parts(
    directory: Path, card: Card, dtype: torch.dtype, device: torch.device
) -> tuple[Card, Sequence[Backbone], Processor, OutputCache | None, ImageModelTexts | None]:
    """Load the checkpoint of a detector or an image encoder.

    Returns its card with the measured sizes, backbones, processor, output cache and text encoder. A
    detector has neither of the last two.
    """
    if "regions" in card.tasks:
        detector = load_detector(directory, dtype=dtype, device=device)
        images = detector_size(detector)
        card = replace(card, max_tokens=images.max_tokens, images=images)
        return card, (detector.backbone,), RegionsProcessor(card, detector), None, None
    loaded = load_images(directory, dtype=dtype, device=device)
    texts = _texts(directory, card, loaded)
    card = _measured(card, loaded, texts)
    output_cache = OutputCache(card.model, card.revision, dtype, loaded.input)
    return (
        card,
        loaded.backbones,
        _processor(card, loaded, texts, output_cache),
        output_cache,
        texts,
    )


def detector_size(detector: Detector) -> ImageSize:
    """Return the rule that gives a detector's image tokens."""
    size = detector.processing.size
    if isinstance(detector.processing, LimitedProcessing) and isinstance(size, int):
        return ImageSize(
            height=0,
            width=0,
            short_side=size,
            patch=detector.smallest,
            extra_tokens=0,
            max_tokens=detector.count(size, detector.processing.longest),
            long_side=detector.processing.longest,
            maps=detector.maps,
        )
    height, width = size if isinstance(size, tuple) else (1, 1)
    most = (
        detector.count(height, width)
        if isinstance(size, tuple)
        else detector.backbone.encoder.max_positions
    )
    return ImageSize(
        height=height,
        width=width,
        short_side=0,
        patch=max(height, width),
        extra_tokens=most - 1,
        max_tokens=most,
    )


def _measured(card: Card, loaded: ImageModel, read: ImageModelTexts | None) -> Card:
    """Complete the card with facts of the loaded model: limits and image sizes."""
    images = replace(image_size(loaded.input), text_tokens=0 if read is None else read.filled)
    texts = next((backbone for backbone in loaded.backbones if TEXT_HEAD in backbone.heads), None)
    most = images.max_tokens if texts is None else min(card.max_tokens, texts.encoder.max_positions)
    return replace(card, max_tokens=most, images=images)


def image_size(given: ImageInput) -> ImageSize:
    """Return the rule that gives an input's image tokens. All images scaled to a patch budget have
    about the budget's tokens.
    """
    processing, patches = given.processing, given.patches
    if isinstance(processing.size, PatchBudget):
        most = processing.size.most
        return ImageSize(
            height=1, width=1, short_side=0, patch=1, extra_tokens=most - 1, max_tokens=most
        )
    fixed = processing.crop or (processing.size if isinstance(processing.size, tuple) else None)
    height, width = fixed or (0, 0)
    return ImageSize(
        height=height,
        width=width,
        short_side=processing.size if fixed is None and isinstance(processing.size, int) else 0,
        patch=patches.patch,
        extra_tokens=patches.before,
        max_tokens=patches.count_tokens(height, width) if fixed else patches.most,
    )


def _texts(directory: Path, card: Card, loaded: ImageModel) -> ImageModelTexts | None:
    """Return the text input of a model that reads texts and images; None for other models."""
    heads = {name for backbone in loaded.backbones for name in backbone.heads}
    if TEXT_HEAD not in heads or IMAGE_HEAD not in heads:
        return None
    root = directory / card.encoder_folder
    (backbone,) = (backbone for backbone in loaded.backbones if TEXT_HEAD in backbone.heads)
    return read_texts(root, min(card.max_tokens, backbone.encoder.max_positions))


def _processor(
    card: Card, loaded: ImageModel, texts: ImageModelTexts | None, output_cache: OutputCache
) -> ImageProcessor:
    if texts is None:
        return ImageProcessor(card, loaded.input, None, None, output_cache)
    return ImageProcessor(card, loaded.input, texts, _labels(loaded), output_cache)


def _labels(loaded: ImageModel) -> LabelScale:
    """Read the family's REST tensors: the logarithm of the scale and, for independently scored
    labels, a bias.
    """
    bias = loaded.state.get("logit_bias")
    scale = math.exp(min(float(loaded.state["logit_scale"]), _MAX_SCALE))
    return LabelScale(scale, 0.0 if bias is None else float(bias), each_alone=bias is not None)


_MAX_SCALE = 80.0  # its exponential still fits float32
