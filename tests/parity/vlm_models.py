"""Small checkpoints of vision-language models with random weights, in transformers' format, and
transformers' vectors of them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch import Tensor
from transformers.models.qwen3_vl import modeling_qwen3_vl

from tests.parity.tokenizers import ROLES, Style, train_tokenizer

_IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_TEXTS = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_VOCABULARY = 400
QUERIES = ["what must a licensee do", "a", "naïve café, 東京 and so on"]


def _tokenizer(style: Style, special: Sequence[str]) -> transformers.PreTrainedTokenizerFast:
    copy = type(train_tokenizer(style, _VOCABULARY)).from_str(
        train_tokenizer(style, _VOCABULARY).to_str()
    )
    copy.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    roles = ROLES.get(style) or {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
    }
    return transformers.PreTrainedTokenizerFast(tokenizer_object=copy, **roles)


@dataclass(frozen=True)
class Output:
    embeddings: Tensor


@dataclass(frozen=True)
class Small:
    """A model and its processor, of transformers' classes."""

    model: Any
    processor: transformers.ProcessorMixin

    def save(self, directory: Path) -> None:
        self.model.save_pretrained(directory)
        self.processor.save_pretrained(directory)

    def doubled(self) -> Small:
        """Return the same in float64, the reference of both float32 implementations."""
        return Small(copy.deepcopy(self.model).double(), self.processor)

    @torch.inference_mode()
    def pages(
        self, images: Sequence[Image.Image], dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """Return the vectors of each page alone."""
        return [
            self._vectors(self.processor.process_images(images=[image], return_tensors="pt"), dtype)
            for image in images
        ]

    @torch.inference_mode()
    def queries(self, texts: Sequence[str], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [
            self._vectors(self.processor.process_queries(text=[text], return_tensors="pt"), dtype)
            for text in texts
        ]

    def _vectors(self, batch: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        batch = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in batch.items()
            if name != "labels"
        }
        return self.model(**batch).embeddings[0].float()


def _colpali() -> Small:
    tokenizer = _tokenizer("gemma", ["<image>"])
    images = transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32})
    images.image_seq_length = 16
    config = transformers.PaliGemmaConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            **_IMAGES,
            "image_size": 32,
            "patch_size": 8,
            "vision_use_head": False,
        },
        text_config={"model_type": "gemma", **_TEXTS, "head_dim": 16, "vocab_size": len(tokenizer)},
        projection_dim=48,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = transformers.ColPaliForRetrieval(
        transformers.ColPaliConfig(vlm_config=config, embedding_dim=16)
    )
    return Small(model, transformers.ColPaliProcessor(images, tokenizer))


_TILE_TOKENS = [
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    "<|im_start|>",
    "<|begin_of_text|>",
]
_TILE_TOKENS += [f"<row_{row + 1}_col_{column + 1}>" for row in range(4) for column in range(4)]
_TILES = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}


def colmodernvbert() -> Small:
    tokenizer = _tokenizer("bert", _TILE_TOKENS)
    special = {
        "pad_token_id": 0,
        "bos_token_id": 2,
        "cls_token_id": 2,
        "eos_token_id": 3,
        "sep_token_id": 3,
    }
    config = transformers.ModernVBertConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            **_IMAGES,
            "image_size": 32,
            "patch_size": 4,
            "vision_use_head": False,
        },
        text_config={
            "model_type": "modernbert",
            **_TEXTS,
            **special,
            "num_hidden_layers": 3,
            "vocab_size": len(tokenizer),
            "local_attention": 16,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pixel_shuffle_factor=4,
    )
    model = transformers.ColModernVBertForRetrieval(
        transformers.ColModernVBertConfig(vlm_config=config, embedding_dim=16)
    )
    images = transformers.Idefics3ImageProcessorPil(**_TILES)
    return Small(model, transformers.ColModernVBertProcessor(images, tokenizer, image_seq_len=4))


class _Engine(torch.nn.Module):
    """Build colpali-engine's models: transformers' without a head, and a projection with a
    different name."""

    def __init__(self, model: transformers.PreTrainedModel, width: int, name: str) -> None:
        super().__init__()
        self.model, self.projection, self._name = model, torch.nn.Linear(width, 16), name

    def forward(self, **batch: Tensor) -> Output:
        hidden = self.model(**batch).last_hidden_state
        return Output(torch.nn.functional.normalize(self.projection(hidden), dim=-1))

    def save_pretrained(self, directory: Path) -> None:
        self.model.save_pretrained(directory)
        tensors = {
            f"model.{name}": tensor
            for name, tensor in load_file(directory / "model.safetensors").items()
        }
        head = {
            f"{self._name}.{name}": tensor.contiguous()
            for name, tensor in self.projection.state_dict().items()
        }
        save_file(tensors | head, directory / "model.safetensors")


class _EngineProcessor(transformers.Idefics3Processor):  # type: ignore[misc]
    def process_images(self, images: list[Image.Image], **kwargs: str) -> dict[str, Tensor]:
        begin = "<|im_start|>" if self.tokenizer.cls_token is None else "<|begin_of_text|>"
        text = f"{begin}User:<image>Describe the image.<end_of_utterance>\nAssistant:"
        return self(text=[text] * len(images), images=images, **kwargs)

    def process_queries(self, text: list[str], **kwargs: str) -> dict[str, Tensor]:
        return self(text=[one + "<end_of_utterance>" * 10 for one in text], **kwargs)


def _colidefics3(name: str) -> Small:
    tokenizer = _tokenizer("qwen", _TILE_TOKENS)
    settings = {
        "vision_config": {**_IMAGES, "image_size": 32, "patch_size": 8},
        "text_config": {"model_type": "llama", **_TEXTS, "vocab_size": len(tokenizer)},
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "scale_factor": 2,
    }
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(name, **settings))
    images = transformers.Idefics3ImageProcessorPil(**_TILES)
    return Small(_Engine(model, 48, "linear"), _EngineProcessor(images, tokenizer, image_seq_len=4))


def _engine_modernvbert() -> Small:
    theirs = colmodernvbert()
    tokenizer, images = theirs.processor.tokenizer, theirs.processor.image_processor
    return Small(
        _Engine(theirs.model.vlm, 48, "custom_text_proj"),
        _EngineProcessor(images, tokenizer, image_seq_len=4),
    )


_QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_QWEN_TOWER = {"depth": 3, "num_heads": 2, "spatial_merge_size": 2}


def _qwen_settings(kind: str, tokens: int, mark: int) -> dict[str, object]:
    """Windows of 2 x 2 squares in two of three layers, and additions to two layers of the text
    encoder."""
    second: dict[str, object] = {
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "intermediate_size": 40,
    }
    third: dict[str, object] = {
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 1],
        "intermediate_size": 40,
    }
    towers: dict[str, dict[str, object]] = {
        "qwen2_vl": {"embed_dim": 32, "hidden_size": 48, "patch_size": 4, "mlp_ratio": 2},
        "qwen2_5_vl": {"hidden_size": 32, "out_hidden_size": 48, "patch_size": 4, **second},
        "qwen3_vl": {"hidden_size": 32, "out_hidden_size": 48, "patch_size": 4, **third},
    }
    towers["qwen3_5"] = {
        key: value for key, value in towers["qwen3_vl"].items() if key != "deepstack_visual_indexes"
    }
    rope: dict[str, object] = {
        "rope_theta": 10_000.0,
        "rope_type": "default",
        "mrope_section": [2, 3, 3],
    }
    hybrid: dict[str, object] = {}
    if kind == "qwen3_5":  # half of a head is rotated, and every second layer is a delta net
        rope |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
        hybrid = {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        }
    return {
        "vision_config": _QWEN_TOWER | towers[kind],
        "text_config": {
            **_TEXTS,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "vocab_size": tokens,
            "rope_parameters": rope,
            **hybrid,
        }
        | {"bos_token_id": 1, "num_attention_heads": 3, "num_key_value_heads": 1},
        "image_token_id": mark,
        "vision_start_token_id": mark - 2,
        "vision_end_token_id": mark - 1,
        "video_token_id": mark + 1,
    }


def _qwen_images(patch: int = 4, squares: int = 80) -> transformers.BaseImageProcessor:
    area = (2 * patch) ** 2
    return transformers.Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": 4 * area, "longest_edge": squares * area}
    )


def _colqwen2(
    tower: Mapping[str, object] = MappingProxyType({}), patch: int = 4, squares: int = 80
) -> Small:
    tokenizer = _tokenizer("qwen", _QWEN_TOKENS)
    settings = _qwen_settings(
        "qwen2_vl", len(tokenizer), tokenizer.convert_tokens_to_ids("<|image_pad|>")
    )
    settings["vision_config"] = {**settings["vision_config"], **tower}  # type: ignore[dict-item]
    model = transformers.ColQwen2ForRetrieval(
        transformers.ColQwen2Config(
            vlm_config=transformers.Qwen2VLConfig(**settings), embedding_dim=16
        )
    )
    return Small(model, transformers.ColQwen2Processor(_qwen_images(patch, squares), tokenizer))


def slow_reader() -> Small:
    """Its tower has 1,600 patches of a page and 42 million parameters: seconds on one core. The
    layers after it are small.
    """
    tower = {"embed_dim": 768, "depth": 6, "num_heads": 12, "patch_size": 14, "mlp_ratio": 4}
    return _colqwen2(tower, patch=14, squares=400)


class _QwenEngineProcessor(transformers.ColQwen2Processor):  # type: ignore[misc]
    """Build colpali-engine's processor, which gives the model the image tokens for M-RoPE, and puts
    nothing before a query.
    """

    def process_images(self, images: list[Image.Image], **kwargs: str) -> dict[str, Tensor]:
        found = dict(super().process_images(images, **kwargs))
        found["pixel_values"] = found["pixel_values"].flatten(0, 1)
        found["mm_token_type_ids"] = (found["input_ids"] == self.image_token_id).int()
        return found

    def process_queries(self, text: list[str], **kwargs: str) -> dict[str, Tensor]:
        return self.tokenizer([one + self.query_augmentation_token * 10 for one in text], **kwargs)


def _engine_qwen(kind: str) -> Small:
    tokenizer = _tokenizer("qwen", _QWEN_TOKENS)
    settings = _qwen_settings(
        kind, len(tokenizer), tokenizer.convert_tokens_to_ids("<|image_pad|>")
    )
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **settings))
    processor = _QwenEngineProcessor(_qwen_images(), tokenizer)
    processor.query_prefix = ""
    return Small(_Engine(model, 48, "custom_text_proj"), processor)


class _Tomoro(_Engine):
    """Build TomoroAI's wrapper, which transformers has no class for: another configuration, and its
    names around Qwen3-VL's.
    """

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__(model, 48, "embedding_proj_layer")

    def save_pretrained(self, directory: Path) -> None:
        super().save_pretrained(directory)
        tensors = load_file(directory / "model.safetensors")
        save_file(
            {_within_vlm(name): tensor for name, tensor in tensors.items()},
            directory / "model.safetensors",
        )
        _configure(directory, {"model_type": "colqwen3", "embed_dim": 16})


def _within_vlm(name: str) -> str:
    return name if name.startswith("embedding_proj_layer") else f"vlm.{name}"


def _configure(directory: Path, values: dict[str, object]) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _tomoro() -> Small:
    """Its prompts are colpali-engine's, and its images have at most 1,280 tokens."""
    theirs = _engine_qwen("qwen3_vl")
    processor = _QwenEngineProcessor(_qwen_images(squares=1280), theirs.processor.tokenizer)
    processor.query_prefix = ""
    return Small(_Tomoro(theirs.model.model), processor)


class _Nemotron(torch.nn.Module):
    """Build NVIDIA's wrapper, which transformers has no class for: a bidirectional Qwen3-VL with
    its last states as vectors.
    """

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Output:
        nothing_hidden = torch.zeros(
            1, 1, *batch["input_ids"].shape[-1:] * 2, dtype=self.model.dtype
        )
        with patch.object(modeling_qwen3_vl, "create_causal_mask", lambda **_: nothing_hidden):
            hidden = self.model(**batch).last_hidden_state
        return Output(torch.nn.functional.normalize(hidden, dim=-1))

    def save_pretrained(self, directory: Path) -> None:
        self.model.save_pretrained(directory)
        tensors = load_file(directory / "model.safetensors")
        save_file(
            {f"model.{name}": tensor for name, tensor in tensors.items()},
            directory / "model.safetensors",
        )
        _configure(directory, {"model_type": "qwen3_vl_nemotron_embed", "pooling": "colbert"})


class _NemotronProcessor(_QwenEngineProcessor):
    """Return one turn of the chat template."""

    def process_images(self, images: list[Image.Image], **kwargs: str) -> dict[str, Tensor]:
        self.visual_prompt_prefix = (
            "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>passage: "
            "<|im_end|>\n<|im_start|>assistant\n"
        )
        return super().process_images(images, **kwargs)

    def process_queries(self, text: list[str], **kwargs: str) -> dict[str, Tensor]:
        begin, end = "<|im_start|>user\nQuery: query: ", "<|im_end|>\n<|im_start|>assistant\n"
        return self.tokenizer([begin + one + end for one in text], **kwargs)


def _nemotron() -> Small:
    theirs = _engine_qwen("qwen3_vl")
    processor = _NemotronProcessor(_qwen_images(), theirs.processor.tokenizer)
    processor.query_prefix = "query:"
    return Small(_Nemotron(theirs.model.model), processor)


MODELS: dict[str, Callable[[], Small]] = {
    "colpali": _colpali,
    "colmodernvbert": colmodernvbert,
    "idefics3": partial(_colidefics3, "idefics3"),
    "modernvbert": _engine_modernvbert,
    "smolvlm": partial(_colidefics3, "smolvlm"),
    "colqwen2": _colqwen2,
    "qwen2_vl": partial(_engine_qwen, "qwen2_vl"),
    "qwen2_5_vl": partial(_engine_qwen, "qwen2_5_vl"),
    "qwen3_vl": partial(_engine_qwen, "qwen3_vl"),
    "qwen3_5": partial(_engine_qwen, "qwen3_5"),
    "colqwen3": _tomoro,
    "qwen3_vl_nemotron_embed": _nemotron,
}


@cache
def small(kind: str) -> Small:
    made = MODELS[kind]()
    draw(made.model)
    return made


def draw(model: torch.nn.Module) -> None:
    """Return a model in evaluation mode, float32, with every parameter drawn wide, because
    transformers' initialisation hardly tests attention.
    """
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if parameter.dim() == 1 and "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)


_ADAPTED = {
    "model.language_model.layers.1.mlp.down_proj": "model.layers.1.mlp.down_proj",
    "model.language_model.layers.0.self_attn.q_proj": (
        "model.language_model.layers.0.self_attn.q_proj"
    ),
    "model.visual.blocks.2.attn.qkv": "visual.blocks.2.attn.qkv",
    "projection": "custom_text_proj",
}
"""Modules of colpali-engine's Qwen-VL, and their names in an adapter."""


def write_vlm_adapter(kind: str, directory: Path, base: str) -> Small:
    """Write an adapter of `small(kind)`, one of colpali-engine's Qwen-VL, as PEFT saves it, and
    return the adapted model.
    """
    adapted = Small(copy.deepcopy(small(kind).model), small(kind).processor)
    generator = torch.Generator().manual_seed(2)
    tensors: dict[str, Tensor] = {}
    for module, stored in _ADAPTED.items():
        weight = adapted.model.get_submodule(module).weight
        a, b = (
            torch.randn(*size, generator=generator) * 0.2
            for size in ((3, weight.shape[1]), (len(weight), 3))
        )
        weight.data += 12 / 3 * (b @ a)
        tensors |= {
            f"base_model.model.{stored}.lora_A.weight": a,
            f"base_model.model.{stored}.lora_B.weight": b,
        }
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": 3,
        "lora_alpha": 12,
        "target_modules": "(.*)",
        "base_model_name_or_path": base,
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return adapted


@dataclass(frozen=True)
class Conversation(Small):
    """A language model that reads its chat template's text."""

    def last(self, text: str, images: Sequence[Image.Image]) -> tuple[Tensor, Tensor]:
        """Return the last token's state, and its logits."""
        found = (
            dict(self.processor.image_processor(list(images), return_tensors="pt"))
            if images
            else {}
        )
        for rows in (found["image_grid_thw"].prod(-1) // 4).tolist() if images else []:
            text = text.replace("<|image_pad|>", "<|image|>" * rows, 1)
        ids = self.processor.tokenizer(
            text.replace("<|image|>", "<|image_pad|>"), return_tensors="pt"
        )["input_ids"]
        kinds = (ids == self.model.config.image_token_id).int()
        output = self.model(
            input_ids=ids, mm_token_type_ids=kinds, output_hidden_states=True, **found
        )
        return output.hidden_states[-1][0, -1], output.logits[0, -1]


@cache
def conversation() -> Conversation:
    """Qwen3-VL."""
    tokenizer = _tokenizer("qwen", _QWEN_TOKENS)
    settings = _qwen_settings(
        "qwen3_vl", len(tokenizer), tokenizer.convert_tokens_to_ids("<|image_pad|>")
    )
    model = transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(**settings))
    draw(model)
    return Conversation(model, transformers.ColQwen2Processor(_qwen_images(), tokenizer))


def pages() -> list[bytes]:
    """Return files of awkward sizes: noise over gradients, in several modes."""
    numbers = np.random.default_rng(3)
    found = []
    for number, (height, width) in enumerate(
        ((32, 32), (100, 60), (30, 61), (1, 60), (60, 1), (200, 160))
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


def opened(data: bytes) -> Image.Image:
    """Return the image as `load_image` returns it and its `pil` processors convert it."""
    return transformers.image_transforms.convert_to_rgb(Image.open(BytesIO(data)))
