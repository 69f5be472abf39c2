"""Tiny checkpoints of Florence-2 with random weights, in transformers' layout and in Microsoft's,
and transformers' outputs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from libs.models.images.decoding import decode
from libs.models.readers.florence import _ADDED
from tests.parity.checkpoints import write_tokenizer

SIDE: Final = 64
"""Pixels of a side: 16 x 16 places in the first stage, which windows of 6 do not divide, and 2 x 2
in the last.
"""
_VISION: Final[dict[str, Any]] = {
    "embed_dim": [16, 32, 32, 64],
    "num_heads": [2, 2, 4, 4],
    "num_groups": [2, 4, 2, 4],
    "depths": [1, 1, 2, 1],
    "window_size": 6,
    "max_position_embeddings": 8,
    "max_temporal_embeddings": 5,
    "projection_dim": 48,
}
_TEXT: Final[dict[str, Any]] = {
    "model_type": "bart",
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
    "activation_function": "gelu",
    "scale_embedding": False,
    "tie_word_embeddings": True,
}
# Random weights repeat themselves. A ban on repetition gives every answer different tokens.
GENERATION: Final[dict[str, Any]] = {
    "decoder_start_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "no_repeat_ngram_size": 3,
    "max_length": None,
}
_GENERATION_KEYS: Final = (*GENERATION, "num_beams", "early_stopping")
_PROCESSOR: Final[dict[str, Any]] = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "do_center_crop": False,
    "resample": 3,
    "do_normalize": True,
    "size": {"height": SIDE, "width": SIDE},
    "crop_size": {"height": SIDE, "width": SIDE},
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "image_seq_length": 5,
}


def write(
    directory: Path, layout: str = "transformers", **generation: object
) -> transformers.PreTrainedModel:
    """Write a checkpoint in the layout "transformers" or "microsoft", and return transformers'
    model of it."""
    write_tokenizer("bart", directory, 300)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    plain = tokenizer.get_vocab_size()
    if layout == "transformers":
        tokenizer.add_special_tokens(
            [AddedToken(f"<{each}>", special=True, normalized=False) for each in _ADDED]
        )
        tokenizer.save(str(directory / "tokenizer.json"))
    vocabulary = plain + len(_ADDED) + 1  # and the image's own
    config = transformers.Florence2Config(
        vision_config=_VISION,
        text_config=_TEXT | {"vocab_size": vocabulary},
        image_token_id=vocabulary - 1,
    )
    model = transformers.Florence2ForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
        # Make locations frequent in answers.
        model.lm_head.weight[plain + 4 : plain + 1004] *= 1.6
    for key, value in (GENERATION | generation).items():
        setattr(model.generation_config, key, value)
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    if layout == "microsoft":
        _as_microsoft(model, directory)
    return model


def _as_microsoft(model: transformers.PreTrainedModel, directory: Path) -> None:
    """Write the files of Microsoft's repositories, with the names of their code."""
    state = {}
    for name, tensor in model.state_dict().items():
        made = _microsoft_name(name)
        state[made] = (
            tensor.T.contiguous() if made == "image_projection" else tensor.contiguous().clone()
        )
    state["language_model.final_logits_bias"] = torch.zeros(
        1, len(state["language_model.lm_head.weight"])
    )
    save_file(state, str(directory / "model.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    vision = config["vision_config"]
    vision["model_type"], vision["dim_embed"] = "davit", vision.pop("embed_dim")
    vision["image_pos_embed"] = {
        "type": "learned_abs_2d",
        "max_pos_embeddings": vision.pop("max_position_embeddings"),
    }
    vision["visual_temporal_embedding"] = {
        "type": "COSINE",
        "max_temporal_embeddings": vision.pop("max_temporal_embeddings"),
    }
    config["text_config"]["model_type"] = "florence2_language"
    (directory / "config.json").write_text(json.dumps(config))


def _microsoft_name(name: str) -> str:
    name = name.removeprefix("model.")
    if name == "lm_head.weight":
        return "language_model.lm_head.weight"
    if name.startswith("language_model."):
        return name.replace("language_model.", "language_model.model.")
    if name.startswith("multi_modal_projector."):
        name = name.removeprefix("multi_modal_projector.").replace(
            "image_position_embed", "image_pos_embed"
        )
        return name.replace("image_projection.weight", "image_projection")
    name = re.sub(r"(convs\.\d+)\.conv\.", r"\1.proj.", name)
    name = re.sub(r"\.(window_attn|channel_attn)\.", r".\1.fn.", name)
    name = name.replace("spatial_block.norm1", "spatial_block.window_attn.norm")
    name = name.replace("channel_block.norm1", "channel_block.channel_attn.norm")
    name = re.sub(r"\.(conv[12])\.", r".\1.fn.dw.", name)
    return name.replace(".norm2.", ".ffn.norm.").replace(".ffn.fc", ".ffn.fn.net.fc")


def read(directory: Path) -> transformers.PreTrainedModel:
    """Load transformers' model, in float32, of a checkpoint in either layout."""
    values = json.loads((directory / "config.json").read_text())
    if "dim_embed" not in values["vision_config"]:
        return transformers.Florence2ForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32
        ).eval()
    config = transformers.Florence2Config(
        vision_config=_own_names(values["vision_config"]),
        text_config=values["text_config"] | {"model_type": "bart", "tie_word_embeddings": True},
        image_token_id=values["text_config"]["vocab_size"] - 1,
    )
    model = transformers.Florence2ForConditionalGeneration(config).eval()
    tensors = load_file(directory / "model.safetensors")
    state = {}
    for name in model.state_dict():
        theirs = _microsoft_name(name)
        if theirs not in tensors and name.endswith(
            ("embed_tokens.weight", "lm_head.weight")
        ):  # one table, stored once
            theirs = "language_model.model.shared.weight"
        state[name] = (
            tensors[theirs].T if theirs == "image_projection" else tensors[theirs]
        ).float()
    model.load_state_dict(state)
    if (directory / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    else:  # Microsoft's code generates by the settings of the text model
        values = {
            key: value for key, value in values["text_config"].items() if key in _GENERATION_KEYS
        }
        model.generation_config = transformers.GenerationConfig(**values)
    return model


def _own_names(vision: dict[str, Any]) -> dict[str, Any]:
    """Convert Microsoft's vision_config to transformers' names."""
    kept = {key: value for key, value in vision.items() if key in _VISION}
    return kept | {
        "embed_dim": vision["dim_embed"],
        "max_position_embeddings": vision["image_pos_embed"]["max_pos_embeddings"],
        "max_temporal_embeddings": vision["visual_temporal_embedding"]["max_temporal_embeddings"],
    }


def processor(directory: Path) -> Any:
    """Run transformers' processing of images."""
    values = json.loads((directory / "preprocessor_config.json").read_text())
    return transformers.CLIPImageProcessorPil(
        **{
            key: value
            for key, value in values.items()
            if key in _PROCESSOR and key not in ("image_processor_type", "image_seq_length")
        }
    )


@torch.inference_mode()
def written(
    model: transformers.PreTrainedModel, directory: Path, image: bytes, prompt: str, most: int
) -> list[int]:
    """Return transformers' generated tokens for an image."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if tokenizer.token_to_id("<loc_0>") is None:
        tokenizer.add_special_tokens(
            [AddedToken(f"<{each}>", special=True, normalized=False) for each in _ADDED]
        )
    picture = Image.fromarray(decode(image, "image"))
    pixels = processor(directory)(picture, return_tensors="pt")["pixel_values"]
    tokens = model.get_image_features(pixels).pooler_output.shape[1]
    prompted = [0, *tokenizer.encode(prompt, add_special_tokens=False).ids, 2]
    ids = torch.tensor([[model.config.image_token_id] * tokens + prompted])
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=pixels,
        max_new_tokens=most,
        do_sample=False,
    )
    return found[0, 1:].tolist()
