"""Small checkpoints of image models with random weights, in transformers' format, and images of
awkward sizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import ExifTags, Image
from safetensors.torch import save_file
from transformers.image_transforms import convert_to_rgb

_SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
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
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=texts, vision_config=images, projection_dim=24)
    )


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
    return transformers.SiglipModel(
        transformers.SiglipConfig(text_config=texts, vision_config=images)
    )


_IMAGES = {**_SIZE, "hidden_size": 40, "image_size": 36, "patch_size": 8}


def _vision() -> transformers.PreTrainedModel:
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**_IMAGES))


def _projected() -> transformers.PreTrainedModel:
    return transformers.CLIPVisionModelWithProjection(
        transformers.CLIPVisionConfig(**_IMAGES, projection_dim=24)
    )


def _siglip_vision() -> transformers.PreTrainedModel:
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**_IMAGES))


# Proportions are kept: the table of positions is 5 x 5, and images have at most 23 patches.
_NAFLEX = {**_SIZE, "hidden_size": 40, "num_patches": 25, "patch_size": 8}


def _siglip2() -> transformers.PreTrainedModel:
    texts = {
        **_SIZE,
        "vocab_size": 200,
        "max_position_embeddings": TEXT_LENGTH,
        "projection_size": 40,
    }
    return transformers.Siglip2Model(
        transformers.Siglip2Config(text_config=texts, vision_config=_NAFLEX)
    )


def _siglip2_vision() -> transformers.PreTrainedModel:
    return transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**_NAFLEX))


OPEN_CLIP_SIZE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
}


def _open_clip() -> transformers.PreTrainedModel:
    """Return a SigLIP with the heads of its name in OPEN_CLIP."""
    sizes = OPEN_CLIP_SIZE
    texts = {
        **sizes,
        "vocab_size": 200,
        "max_position_embeddings": TEXT_LENGTH,
        "intermediate_size": 192,
    }
    images = {**sizes, "image_size": 36, "patch_size": 8}
    return transformers.SiglipModel(
        transformers.SiglipConfig(text_config=texts, vision_config=images)
    )


def _vit() -> transformers.PreTrainedModel:
    return transformers.ViTModel(transformers.ViTConfig(**_SIZE, image_size=32, patch_size=8))


def _classifier() -> transformers.PreTrainedModel:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**_SIZE, image_size=32, patch_size=8, qkv_bias=False)
    )


def _dinov2() -> transformers.PreTrainedModel:
    return transformers.Dinov2Model(
        transformers.Dinov2Config(**{**_SIZE, "mlp_ratio": 3}, image_size=56, patch_size=7)
    )


def _registers() -> transformers.PreTrainedModel:
    settings = {
        **_SIZE,
        "mlp_ratio": 3,
        "image_size": 56,
        "patch_size": 7,
        "num_register_tokens": 3,
    }
    settings.pop("intermediate_size")
    return transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**settings))


def _giant() -> transformers.PreTrainedModel:
    settings = {**_SIZE, "mlp_ratio": 3, "image_size": 56, "patch_size": 7, "use_swiglu_ffn": True}
    return transformers.Dinov2Model(transformers.Dinov2Config(**settings))


def _dinov3(**settings: Any) -> transformers.PreTrainedModel:
    whole = {**_SIZE, "image_size": 56, "patch_size": 7, "num_register_tokens": 3, **settings}
    return transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**whole))


def _dinov3_large() -> transformers.PreTrainedModel:
    """Return a model like the 7B one: with a gate, and without biases of queries, keys and
    values."""
    return _dinov3(
        use_gated_mlp=True, hidden_act="silu", query_bias=False, value_bias=False, rope_theta=50.0
    )


def _dinov3_biased() -> transformers.PreTrainedModel:
    return _dinov3(
        key_bias=True, value_bias=False, proj_bias=False, mlp_bias=False, num_register_tokens=0
    )


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "clip": _clip,
    "clip-projected": _projected,
    "clip-vision": _vision,
    "dinov2": _dinov2,
    "dinov2-giant": _giant,
    "dinov2-registers": _registers,
    "dinov3": _dinov3,
    "dinov3-biased": _dinov3_biased,
    "dinov3-large": _dinov3_large,
    "openclip": _open_clip,
    "siglip": _siglip,
    "siglip-vision": _siglip_vision,
    "siglip2": _siglip2,
    "siglip2-vision": _siglip2_vision,
    "vit": _vit,
    "vit-classifier": _classifier,
}


class Dinov3Processor:
    """Compute transformers' DINOv3ViTImageProcessor, which needs torchvision: rescale, resize as
    float32, crop, normalise.

    torchvision resizes float tensors by `interpolate`, with antialiasing and without rounding.
    """

    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def __init__(self, size: dict[str, int], crop_size: dict[str, int] | None = None) -> None:
        self.size, self.crop_size = size, crop_size

    def __call__(
        self, image: Image.Image, dtype: torch.dtype = torch.float32, **_: object
    ) -> dict[str, torch.Tensor]:
        pixels = torch.from_numpy(convert_to_rgb(image, return_numpy=True)).permute(2, 0, 1).to(
            dtype
        ) * (1 / 255)
        height, width = pixels.shape[1:]
        if "shortest_edge" in self.size:
            short = self.size["shortest_edge"]
            long = int(short * max(height, width) / min(height, width))
            size = (long, short) if width <= height else (short, long)
        else:
            size = (self.size["height"], self.size["width"])
        pixels = F.interpolate(
            pixels[None], size, mode="bilinear", align_corners=False, antialias=True
        )[0]
        if self.crop_size is not None:
            top, left = (
                (size[0] - self.crop_size["height"]) // 2,
                (size[1] - self.crop_size["width"]) // 2,
            )
            pixels = pixels[
                :, top : top + self.crop_size["height"], left : left + self.crop_size["width"]
            ]
        mean, std = torch.tensor(self.mean)[:, None, None], torch.tensor(self.std)[:, None, None]
        return {"pixel_values": ((pixels - mean) / std)[None]}

    def save_pretrained(self, directory: Path) -> None:
        """Write the files of facebook/dinov3-vits16-pretrain-lvd1689m."""
        values = {
            "crop_size": self.crop_size,
            "data_format": "channels_first",
            "default_to_square": True,
            "device": None,
            "disable_grouping": None,
            "do_center_crop": None if self.crop_size is None else True,
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": self.mean,
            "image_std": self.std,
            "image_processor_type": "DINOv3ViTImageProcessorFast",
            "input_data_format": None,
            "resample": 2,
            "rescale_factor": 1 / 255,
            "return_tensors": None,
            "size": self.size,
        }
        (directory / "preprocessor_config.json").write_text(json.dumps(values))


_FIXED = {"height": 36, "width": 36}
_PROCESSORS: dict[str, Any] = {
    "clip": transformers.CLIPImageProcessorPil(size={"shortest_edge": 38}, crop_size=_FIXED),
    "dinov2": transformers.BitImageProcessorPil(
        size={"shortest_edge": 40},
        do_center_crop=False,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    ),
    "dinov3": Dinov3Processor({"shortest_edge": 40}),
    "openclip": transformers.SiglipImageProcessorPil(size=_FIXED),
    "siglip": transformers.SiglipImageProcessorPil(size=_FIXED),
    "siglip2": transformers.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=23),
    "vit": transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}),
}


def processor(kind: str) -> Any:
    return _PROCESSORS[kind.split("-")[0]]


def random_model(kind: str) -> transformers.PreTrainedModel:
    """Return a model in evaluation mode, float32, with every parameter drawn wide, because
    transformers' initialisation hardly tests attention.
    """
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
    if kind == "openclip":
        write_open_clip(model, directory, OPEN_CLIP)
        return model
    model.save_pretrained(directory)
    processor(kind).save_pretrained(directory)
    return model


OPEN_CLIP: dict[str, dict[str, Any]] = {
    "model_cfg": {
        "embed_dim": 48,
        "custom_text": True,
        "vision_cfg": {
            "image_size": 36,
            "timm_model_name": "vit_base_patch16_siglip_224",
            "timm_pool": "map",
            "timm_proj": "none",
        },
        "text_cfg": {
            "context_length": TEXT_LENGTH,
            "vocab_size": 200,
            "width": 48,
            "heads": 12,
            "layers": 2,
            "no_causal_mask": True,
            "proj_bias": True,
            "pool_type": "last",
            "norm_kwargs": {"eps": 1e-6},
            "act_kwargs": {"approximate": "tanh"},
        },
    },
    "preprocess_cfg": {
        "size": [36, 36],
        "mode": "RGB",
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "interpolation": "bicubic",
        "resize_mode": "squash",
        "fill_color": 0,
    },
}

# transformers' names in open_clip's and timm's, in the order of replacement.
_OPEN_CLIP_NAMES = (
    (r"^vision_model\.embeddings\.patch_embedding", "visual.trunk.patch_embed.proj"),
    (r"^vision_model\.embeddings\.position_embedding\.weight", "visual.trunk.pos_embed"),
    (r"^vision_model\.post_layernorm", "visual.trunk.norm"),
    (r"^vision_model\.head\.probe", "visual.trunk.attn_pool.latent"),
    (r"^vision_model\.head\.attention\.out_proj", "visual.trunk.attn_pool.proj"),
    (r"^vision_model\.head\.layernorm", "visual.trunk.attn_pool.norm"),
    (r"^vision_model\.head\.mlp", "visual.trunk.attn_pool.mlp"),
    (r"^vision_model\.encoder\.layers", "visual.trunk.blocks"),
    (r"^(visual.*)\.layer_norm([12])", r"\1.norm\2"),
    (r"^(visual.*)\.self_attn\.out_proj", r"\1.attn.proj"),
    (r"^text_model\.embeddings\.token_embedding", "text.token_embedding"),
    (r"^text_model\.embeddings\.position_embedding\.weight", "text.positional_embedding"),
    (r"^text_model\.final_layer_norm", "text.ln_final"),
    (r"^text_model\.head", "text.text_projection"),
    (r"^text_model\.encoder\.layers", "text.transformer.resblocks"),
    (r"^(text.*)\.layer_norm([12])", r"\1.ln_\2"),
    (r"^(text.*)\.self_attn\.out_proj", r"\1.attn.out_proj"),
    (r"^(text.*)\.mlp\.fc1", r"\1.mlp.c_fc"),
    (r"^(text.*)\.mlp\.fc2", r"\1.mlp.c_proj"),
)


def write_open_clip(
    model: transformers.PreTrainedModel, directory: Path, config: dict[str, dict[str, Any]]
) -> None:
    """Write a SiglipModel as open_clip saves it, with its `config`: names and the fusion of
    projections differ from transformers."""
    state = dict(model.state_dict())
    found: dict[str, torch.Tensor] = {}
    for name in list(state):
        if ".q_proj." in name:
            parts = [state.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
            stem, ending = name.split(".self_attn.q_proj.")
            fused = (
                f".attn.qkv.{ending}" if stem.startswith("vision") else f".attn.in_proj_{ending}"
            )
            state[stem + fused] = torch.cat(parts)
    for ending in ("weight", "bias"):
        query, *rest = state.pop(f"vision_model.head.attention.in_proj_{ending}").chunk(3)
        found |= {
            f"visual.trunk.attn_pool.q.{ending}": query,
            f"visual.trunk.attn_pool.kv.{ending}": torch.cat(rest),
        }
    for name, tensor in state.items():
        new = name
        for pattern, other in _OPEN_CLIP_NAMES:
            new = re.sub(pattern, other, new)
        found[new] = tensor[None] if new == "visual.trunk.pos_embed" else tensor
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in found.items()},
        directory / "open_clip_model.safetensors",
    )
    (directory / "open_clip_config.json").write_text(json.dumps(config))


def pictures() -> list[bytes]:
    """Return files of noise over gradients, with odd sizes and several modes."""
    numbers = np.random.default_rng(2)
    found = []
    for number, (height, width) in enumerate(
        ((36, 36), (120, 60), (60, 121), (9, 7), (300, 200), (1, 30), (45, 45))
    ):
        pixels = np.linspace(0, 200, height * width * 4).reshape(
            height, width, 4
        ) + numbers.integers(0, 56, (height, width, 4))
        out = BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).convert(("RGB", "RGBA", "L")[number % 3]).save(
            out, "PNG"
        )
        found.append(out.getvalue())
    return found


def awkward_pictures() -> dict[str, bytes]:
    """Return files of awkward proportions, modes and metadata."""
    numbers = np.random.default_rng(3)

    def noise(height: int, width: int) -> Image.Image:
        coarse = Image.fromarray(
            numbers.integers(0, 256, (height // 6 + 1, width // 6 + 1, 4), np.uint8)
        )
        return coarse.resize((width, height), Image.Resampling.BICUBIC)

    def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
        out = BytesIO()
        image.save(out, kind, **options)
        return out.getvalue()

    found = {
        "1 x 300": saved(noise(1, 300).convert("RGB")),
        "300 x 1": saved(noise(300, 1).convert("RGB")),
        "2:1": saved(noise(140, 70).convert("RGB"), "JPEG"),
        "grey": saved(noise(50, 61).convert("L"), "JPEG"),
        "alpha": saved(noise(47, 53)),
        "palette": saved(noise(41, 67).convert("RGB").convert("P"), transparency=3),
        "1 x 1": saved(noise(1, 1).convert("RGB")),
    }
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        found[f"EXIF {orientation}"] = saved(noise(33, 58).convert("RGB"), "JPEG", exif=exif)
    return found
