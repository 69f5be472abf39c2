"""`benchmarks/images` measures both engines on one small model."""

from __future__ import annotations

import torch
import transformers

from benchmarks.images.encoders import EncoderShape, forward, loaded, photographs, prepare


def small(layers: int) -> transformers.PreTrainedModel:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
    }
    return transformers.Siglip2VisionModel(
        transformers.Siglip2VisionConfig(**sizes, num_patches=16, patch_size=16)
    )


def test_forward_and_the_preparing_of_photographs() -> None:
    shape = EncoderShape(
        "small",
        small,
        transformers.Siglip2ImageProcessorPil(max_num_patches=16),
        1.0,
        mixed=True,
        pads=True,
    )
    pictures = photographs(3)
    model, theirs = loaded(shape, 1, "float32", torch.device("cpu"))
    found = forward(shape, model, theirs, pictures["JPEG"], 1, "float32")
    assert 3 < found.tokens <= 48
    for kind, files in pictures.items():
        assert prepare(shape, model, kind, files, 1).images_per_second > 0
