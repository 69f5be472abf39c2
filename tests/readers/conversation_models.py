"""Tiny generative vision-language models with random weights and a chat template, and transformers'
outputs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from PIL import Image

from libs.models.images.decoding import decode
from tests.parity import vlm_models

TILED: Final = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}{% for line in "
    "message['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}<image>{% "
    "endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""SmolVLM's template."""
QWEN: Final = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful "
    "assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content "
    "%}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2-VL's template."""
PADDLE: Final = (
    "{% for message in messages %}{% if message['role'] == 'user' %}User: {% endif %}{% for "
    "content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
GLM: Final = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>\n{% for content in "
    "message['content'] %}"
    "{% if content['type'] == 'image' %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LIGHTON: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for content in "
    "message['content'] %}"
    "{% if content['type'] == 'image' %}<|image_pad|>{% elif content['type'] == 'text' %}{{ "
    "content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% "
    "endif %}"
)
KINDS: Final = (
    "idefics3",
    "smolvlm",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "lighton_ocr",
    "paddleocr_vl",
    "glm_ocr",
)
# Random weights repeat themselves. A ban on repetition gives every answer different tokens.
GENERATION: Final[dict[str, Any]] = {
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "no_repeat_ngram_size": 2,
    "repetition_penalty": 1.2,
    "max_length": None,
}


_MARKS: Final = {"glm_ocr": "<|image|>", "paddleocr_vl": "<|IMAGE_PLACEHOLDER|>"}
TILES: Final = ("idefics3", "smolvlm")


def template(kind: str) -> str:
    if kind in TILES:
        return TILED
    return {"glm_ocr": GLM, "lighton_ocr": LIGHTON, "paddleocr_vl": PADDLE}.get(kind, QWEN)


def write(
    kind: str, directory: Path, *, tied: bool = False, **generation: object
) -> transformers.PreTrainedModel:
    """Write a checkpoint, and return transformers' model of it."""
    config, images, tokenizer = _OWN[kind]() if kind in _OWN else _retrieving(kind)
    config.tie_word_embeddings = tied
    config.text_config.tie_word_embeddings = tied
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    vlm_models.draw(model)
    model.tie_weights()
    for key, value in (GENERATION | generation).items():
        setattr(model.generation_config, key, value)
    model.save_pretrained(directory)
    images.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(template(kind))
    return model


def _retrieving(kind: str) -> tuple[Any, Any, Any]:
    """Return the configuration, image processor and tokenizer of a family that is also served for
    retrieval.
    """
    made = (
        vlm_models._colidefics3(kind) if template(kind) == TILED else vlm_models._engine_qwen(kind)
    )
    return made.model.model.config, made.processor.image_processor, made.processor.tokenizer


def _lighton() -> tuple[Any, Any, Any]:
    tokenizer = vlm_models._tokenizer("qwen", vlm_models._QWEN_TOKENS)
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "num_attention_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "patch_size": 4,
        "image_size": 64,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10_000.0},
    }
    text = {
        **vlm_models._TEXTS,
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "vocab_size": len(tokenizer),
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
    }
    mark = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    config = transformers.LightOnOcrConfig(
        vision_config=vision, text_config=text, image_token_id=mark
    )
    return config, _lighton_images(), tokenizer


def _lighton_images() -> transformers.BaseImageProcessor:
    """Sides are multiples of the tower's patch, not of a square of patches, as in published
    models."""
    return transformers.PixtralImageProcessorPil(
        size={"longest_edge": 64}, patch_size={"height": 4, "width": 4}
    )


@torch.inference_mode()
def written(
    model: transformers.PreTrainedModel,
    directory: Path,
    images: Sequence[bytes],
    text: str,
    most: int,
    turns: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """Return transformers' new tokens for images and a following text, after earlier turns, from a
    local or a published directory.

    transformers' processors need torchvision for videos, so their parts for texts and images are
    combined here.
    """
    tokenizer = _tokenizer_of(directory)
    pictures = [Image.fromarray(decode(image, "image")) for image in images]
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    before = [{"role": role, "content": [{"type": "text", "text": said}]} for role, said in turns]
    messages = [*before, {"role": "user", "content": content}]
    prompt = tokenizer.apply_chat_template(
        messages, chat_template=_template_of(directory), tokenize=False, add_generation_prompt=True
    )
    inputs = _inputs(model.config, tokenizer, prompt, pictures, directory)
    ids = inputs["input_ids"]
    return model.generate(**inputs, max_new_tokens=most, do_sample=False)[
        0, ids.shape[1] :
    ].tolist()


@lru_cache(1)
def _tokenizer_of(directory: Path) -> Any:
    """Keep the last one: to load it takes as long as ten tokens of a tiny model."""
    return transformers.AutoTokenizer.from_pretrained(directory)


def _template_of(directory: Path) -> str | None:
    """Older checkpoints have it in a file of the processor; with None the tokenizer has it."""
    file = directory / "chat_template.json"
    return json.loads(file.read_text())["chat_template"] if file.is_file() else None


def _inputs(
    config: Any, tokenizer: Any, prompt: str, pictures: Sequence[Image.Image], directory: Path
) -> dict[str, torch.Tensor]:
    kind = config.model_type
    if not pictures and kind in (*TILES, "lighton_ocr"):
        return dict(tokenizer(prompt, return_tensors="pt", add_special_tokens=False))
    images = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    if kind in TILES:
        tokens = (
            config.vision_config.image_size
            // config.vision_config.patch_size
            // config.scale_factor
        ) ** 2
        processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=tokens)
        return dict(
            processor(
                text=[prompt],
                images=[list(pictures)],
                return_tensors="pt",
                add_special_tokens=False,
            )
        )
    if kind == "lighton_ocr":
        square = config.vision_config.patch_size * config.spatial_merge_size
        seen = images(list(pictures), return_tensors="pt")
        counts = [
            height // square * (width // square)
            for height, width in torch.as_tensor(seen["image_sizes"]).tolist()
        ]
        inputs = dict(
            tokenizer(
                _marked(prompt, "<|image_pad|>", counts),
                return_tensors="pt",
                add_special_tokens=False,
            )
        )
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        return {
            **given,
            "pixel_values": seen["pixel_values"],
            "image_sizes": torch.as_tensor(seen["image_sizes"]),
        }
    return _gridded(tokenizer, prompt, pictures, images, _MARKS.get(kind, "<|image_pad|>"))


def _gridded(
    tokenizer: Any, prompt: str, pictures: Sequence[Image.Image], images: Any, mark: str
) -> dict[str, torch.Tensor]:
    """Write the processor of Qwen-VL and similar models. `mark` is the token of an image."""
    found: dict[str, torch.Tensor] = {}
    if pictures:
        seen = images(list(pictures), return_tensors="pt")
        found = {"pixel_values": seen["pixel_values"], "image_grid_thw": seen["image_grid_thw"]}
        prompt = _marked(
            prompt,
            mark,
            [int(grid.prod()) // images.merge_size**2 for grid in seen["image_grid_thw"]],
        )
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    kinds = (ids == tokenizer.convert_tokens_to_ids(mark)).int()
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": kinds,
        **found,
    }


def _marked(prompt: str, mark: str, counts: Sequence[int]) -> str:
    """Repeat the mark of each image for each of its tokens."""
    for count in counts:
        prompt = prompt.replace(mark, "<|seen|>" * count, 1)
    return prompt.replace("<|seen|>", mark)


def _paddle() -> tuple[Any, Any, Any]:
    tokenizer = vlm_models._tokenizer(
        "qwen", ["<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>", "<|VIDEO|>"]
    )
    mark = tokenizer.convert_tokens_to_ids("<|IMAGE_PLACEHOLDER|>")
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 20,
        "patch_size": 4,
    }
    text = {
        **vlm_models._TEXTS,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "vocab_size": len(tokenizer),
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 3, 3],
        },
    }
    config = transformers.PaddleOCRVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=mark,
        vision_start_token_id=mark - 2,
        vision_end_token_id=mark - 1,
        video_token_id=mark + 1,
    )
    return config, _paddle_images(), tokenizer


def _paddle_images() -> transformers.BaseImageProcessor:
    return transformers.PaddleOCRVLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 4 * 64, "longest_edge": 80 * 64}
    )


def _glm() -> tuple[Any, Any, Any]:
    special = ["<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"]
    tokenizer = vlm_models._tokenizer("qwen", special)
    begin, end, mark, video = (tokenizer.convert_tokens_to_ids(each) for each in special)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "depth": 3,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 48,
    }
    text = {
        **vlm_models._TEXTS,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "vocab_size": len(tokenizer),
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 3, 3],
        },
    }
    config = transformers.GlmOcrConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=mark,
        image_start_token_id=begin,
        image_end_token_id=end,
        video_token_id=video,
        video_start_token_id=begin,
        video_end_token_id=end,
    )
    return config, _glm_images(), tokenizer


def _glm_images() -> transformers.BaseImageProcessor:
    return transformers.Glm46VImageProcessorPil(
        patch_size=4, size={"shortest_edge": 8 * 64, "longest_edge": 160 * 64}
    )


_OWN: Final = {"glm_ocr": _glm, "lighton_ocr": _lighton, "paddleocr_vl": _paddle}
