"""Tiny checkpoints of TrOCR and Donut with random weights, and transformers' outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from transformers.models.donut.configuration_donut_swin import DonutSwinConfig

from libs.models.images.decoding import decode
from tests.parity.checkpoints import write_tokenizer

TAGS: Final = {
    "cord": ("menu", "nm", "price", "total"),
    "docvqa": ("question", "answer"),
}
# Random weights repeat themselves. A ban on repetition gives every answer different tokens.
GENERATION: Final[dict[str, Any]] = {
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "no_repeat_ngram_size": 2,
    "repetition_penalty": 1.1,
    "max_length": None,
}
_DECODER: Final[dict[str, Any]] = {
    "d_model": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 80,
    "is_decoder": True,
    "add_cross_attention": True,
    "max_position_embeddings": 96,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}


def write_trocr(
    directory: Path,
    *,
    sinusoidal: bool = False,
    projected: bool = False,
    distilled: bool = False,
    **decoder: object,
) -> Any:
    """Write a TrOCR.

    Args:
        projected: The encoder's width differs from the decoder's cross attention.
        distilled: The encoder is DeiT.
    """
    vocabulary = _tokenizer(directory, ())
    encoder = (transformers.DeiTConfig if distilled else transformers.ViTConfig)(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=48,
        patch_size=8,
        qkv_bias=False,
    )
    sine = (
        {
            "use_learned_position_embeddings": False,
            "layernorm_embedding": False,
            "scale_embedding": True,
        }
        if sinusoidal
        else {}
    )
    crossed = None if projected else 32
    settings = {
        **_DECODER,
        "vocab_size": vocabulary,
        "cross_attention_hidden_size": crossed,
        "decoder_start_token_id": 2,
        **sine,
        **decoder,
    }
    model = _written(directory, encoder, transformers.TrOCRConfig(**settings), start=2)
    name, middle = (
        ("DeiT", {"crop_size": {"height": 48, "width": 48}}) if distilled else ("ViT", {})
    )
    processor = {
        "image_processor_type": f"{name}ImageProcessor",
        "size": {"height": 48, "width": 48},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 2,
        **middle,
        "do_resize": True,
        "do_normalize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


def write_donut(
    directory: Path, task: str = "cord", *, old_size: bool = False, turns: bool = False
) -> Any:
    """Write a Donut for a `task`, "cord" or "docvqa". With `old_size`, the size is width and
    height."""
    names = [f"<{slash}s_{name}>" for name in TAGS[task] for slash in ("", "/")]
    vocabulary = _tokenizer(
        directory, ("<sep/>", "<s_iitcdip>", "<s_synthdog>", f"<s_{task}>", *names, "<paid/>")
    )
    encoder = DonutSwinConfig(
        image_size=[128, 96],
        embed_dim=8,
        depths=[1, 2, 2, 1],
        num_heads=[1, 2, 2, 4],
        window_size=2,
        patch_size=4,
        mlp_ratio=2.0,
    )
    settings = _DECODER | {
        "vocab_size": vocabulary,
        "scale_embedding": True,
        "d_model": 64,
        "add_final_layer_norm": True,
    }
    model = _written(directory, encoder, transformers.MBartConfig(**settings), start=None)
    processor = {
        "image_processor_type": "DonutImageProcessor",
        "size": [96, 128] if old_size else {"height": 128, "width": 96},
        "resample": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "do_thumbnail": True,
        "do_pad": True,
        "do_align_long_axis": turns,
        "do_resize": True,
        "do_normalize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


def _tokenizer(directory: Path, added: tuple[str, ...]) -> int:
    write_tokenizer("bart", directory, 300)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True, normalized=False) for each in added]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer.get_vocab_size()


def _written(directory: Path, encoder: Any, decoder: Any, *, start: int | None) -> Any:
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = start, 1
    model = transformers.VisionEncoderDecoderModel(config=config).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    for key, value in (GENERATION | {"decoder_start_token_id": start}).items():
        setattr(model.generation_config, key, value)
    model.save_pretrained(directory)
    return model


def processed(directory: Path, image: bytes) -> torch.Tensor:
    """Run transformers' processing of an image: [1, 3, height, width]."""
    images = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    return images(Image.fromarray(decode(image, "image")), return_tensors="pt")["pixel_values"]


@torch.inference_mode()
def written(model: Any, directory: Path, image: bytes, most: int, prompt: str = "") -> list[int]:
    """Return transformers' new tokens for an image. The unknown token is banned, as Donut's authors
    do."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    settings = {
        "max_new_tokens": most,
        "do_sample": False,
        "bad_words_ids": [[tokenizer.token_to_id("<unk>")]],
    }
    before = 1
    if prompt:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        settings["decoder_input_ids"], before = torch.tensor([ids]), len(ids)
    return model.generate(processed(directory, image), **settings)[0, before:].tolist()
