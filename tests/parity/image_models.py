"""Small checkpoints of image models with random weights, as transformers writes them, and images of awkward sizes."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

_SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT_LENGTH = 16


def _clip() -> transformers.PreTrainedModel:
    texts = {
        **_SIZE,
        "vocab_size": 200,
        "max_position_embeddings": TEXT_LENGTH,
        "eos_token_id": 199,
        "bos_token_id": 198,
        "pad_token_id": 199,
    }
    images = {**_SIZE, "hidden_size": 40, "image_size": 36, "patch_size": 8}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=texts, vision_config=images, projection_dim=24))


def _siglip() -> transformers.PreTrainedModel:
    texts = {
        **_SIZE,
        "vocab_size": 200,
        "max_position_embeddings": TEXT_LENGTH,
        "projection_size": 40,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    images = {**_SIZE, "hidden_size": 40, "image_size": 36, "patch_size": 8}
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=texts, vision_config=images))


def _vit() -> transformers.PreTrainedModel:
    return transformers.ViTModel(transformers.ViTConfig(**_SIZE, image_size=32, patch_size=8))


def _classifier() -> transformers.PreTrainedModel:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**_SIZE, image_size=32, patch_size=8, qkv_bias=False))


def _dinov2() -> transformers.PreTrainedModel:
    return transformers.Dinov2Model(transformers.Dinov2Config(**{**_SIZE, "mlp_ratio": 3}, image_size=56, patch_size=7))


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "clip": _clip,
    "dinov2": _dinov2,
    "siglip": _siglip,
    "vit": _vit,
    "vit-classifier": _classifier,
}

_FIXED = {"height": 36, "width": 36}
_PROCESSORS: dict[str, transformers.BaseImageProcessor] = {
    "clip": transformers.CLIPImageProcessorPil(size={"shortest_edge": 38}, crop_size=_FIXED),
    "dinov2": transformers.BitImageProcessorPil(
        size={"shortest_edge": 40}, do_center_crop=False, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]
    ),
    "siglip": transformers.SiglipImageProcessorPil(size=_FIXED),
    "vit": transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}),
}


def processor(kind: str) -> transformers.BaseImageProcessor:
    return _PROCESSORS[kind.split("-")[0]]


def random_model(kind: str) -> transformers.PreTrainedModel:
    """In evaluation mode, float32, every parameter drawn wide, since transformers' own initialisation hardly tests attention."""
    model = MODELS[kind]().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if parameter.dim() == 1 and "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)
    return model


def write_checkpoint(kind: str, directory: Path) -> transformers.PreTrainedModel:
    model = random_model(kind)
    model.save_pretrained(directory)
    processor(kind).save_pretrained(directory)
    return model


def pictures() -> list[bytes]:
    """Files: noise over gradients, of odd sizes and several modes."""
    numbers = np.random.default_rng(2)
    found = []
    for number, (height, width) in enumerate(((36, 36), (120, 60), (60, 121), (9, 7), (300, 200), (1, 30), (45, 45))):
        pixels = np.linspace(0, 200, height * width * 4).reshape(height, width, 4) + numbers.integers(0, 56, (height, width, 4))
        out = BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).convert(("RGB", "RGBA", "L")[number % 3]).save(out, "PNG")
        found.append(out.getvalue())
    return found
