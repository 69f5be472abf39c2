"""Small checkpoints with random weights, in the layout of published models, so that examples run
where no model can be fetched.

Their vectors mean nothing; they exercise the path from files, tokenizers and encoders through
queues to responses. Writing them needs only torch, safetensors and tokenizers. transformers can
load them, too (`tests/examples` compares the vectors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from torch import Tensor

CLIP = "random/clip"
COLSMOL = "random/colsmol"
WARNING = (
    "Random weights: every ranking below means nothing. --model names a published model, which "
    "is fetched from the hub."
)

_VISION = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_TEXT = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_LENGTH = 77
"""Tokens of CLIP's longest text."""
_VECTOR = 128
"""Numbers of one vector of ColSmol's."""
_SIDE, _PATCH, _MERGED, _LONGEST = 128, 16, 2, 512
"""ColSmol's: pixels of a tile's side and of a patch's, patches of a side that become one row,
pixels of a page's longest side.
"""


class _Weights:
    """Random tensors by name, the same in each run."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._numbers = torch.Generator().manual_seed(0)

    def draw(self, name: str, *shape: int, scale: float | None = None) -> None:
        """Add a random tensor.

        Args:
            name: The tensor's name in the checkpoint.
            shape: Its dimensions.
            scale: Standard deviation; None for fan_in ** -0.5, which keeps the states' variance.
        """
        drawn = torch.randn(*shape, generator=self._numbers)
        self.tensors[name] = drawn * (drawn[0].numel() ** -0.5 if scale is None else scale)

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool = True) -> None:
        self.draw(f"{name}.weight", outputs, inputs)
        if bias:
            self.draw(f"{name}.bias", outputs, scale=0.02)

    def norm(self, name: str, size: int, *, bias: bool = True) -> None:
        self.tensors[f"{name}.weight"] = torch.ones(size)
        if bias:
            self.tensors[f"{name}.bias"] = torch.zeros(size)

    def encoder(self, stem: str, sizes: Mapping[str, int]) -> None:
        """Add the layers of CLIP and SigLIP."""
        hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
        for layer in (
            f"{stem}.encoder.layers.{number}" for number in range(sizes["num_hidden_layers"])
        ):
            for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                self.linear(f"{layer}.self_attn.{part}", hidden, hidden)
            self.linear(f"{layer}.mlp.fc1", hidden, inner)
            self.linear(f"{layer}.mlp.fc2", inner, hidden)
            self.norm(f"{layer}.layer_norm1", hidden)
            self.norm(f"{layer}.layer_norm2", hidden)

    def save(self, directory: Path) -> None:
        save_file(self.tensors, directory / "model.safetensors", {"format": "pt"})


def write_clip(directory: Path) -> None:
    """Write a model with CLIP B/32's layout and 64 dimensions.

    An image has 224 x 224 pixels and 50 tokens.
    """
    start, end = "<|startoftext|>", "<|endoftext|>"
    ids = write_tokenizer(directory, (start, end), before=start, after=end, lower=True)
    texts = _TEXT | {
        "vocab_size": len(ids),
        "max_position_embeddings": _LENGTH,
        "bos_token_id": ids[start],
        "eos_token_id": ids[end],
        "pad_token_id": ids[end],
    }
    images = _VISION | {"image_size": 224, "patch_size": 32}
    config = {"model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 64}
    _write(directory, "config.json", config | {"text_config": texts, "vision_config": images})
    size = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}
    _write(
        directory,
        "preprocessor_config.json",
        {"image_processor_type": "CLIPImageProcessor", **size},
    )
    made = _Weights()
    made.draw(
        "text_model.embeddings.token_embedding.weight", len(ids), _TEXT["hidden_size"], scale=1.0
    )
    made.draw(
        "text_model.embeddings.position_embedding.weight", _LENGTH, _TEXT["hidden_size"], scale=0.2
    )
    made.encoder("text_model", _TEXT)
    made.norm("text_model.final_layer_norm", _TEXT["hidden_size"])
    hidden = _VISION["hidden_size"]
    made.draw("vision_model.embeddings.class_embedding", hidden, scale=1.0)
    made.draw("vision_model.embeddings.patch_embedding.weight", hidden, 3, 32, 32)
    made.draw(
        "vision_model.embeddings.position_embedding.weight", (224 // 32) ** 2 + 1, hidden, scale=0.2
    )
    made.norm("vision_model.pre_layrnorm", hidden)
    made.encoder("vision_model", _VISION)
    made.norm("vision_model.post_layernorm", hidden)
    made.linear("visual_projection", hidden, 64, bias=False)
    made.linear("text_projection", _TEXT["hidden_size"], 64, bias=False)
    made.tensors["logit_scale"] = torch.tensor(4.6)
    made.save(directory)


def write_colsmol(directory: Path) -> None:
    """Write a model with ColSmol's layout: 16 vectors of 128 numbers per 128 x 128 pixel tile."""
    marks = [
        "<image>",
        "<fake_token_around_image>",
        "<global-img>",
        "<end_of_utterance>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    marks += [f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)]
    ids = write_tokenizer(directory, marks)
    texts = _TEXT | {
        "model_type": "llama",
        "vocab_size": len(ids),
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": ids["<|im_start|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|im_end|>"],
    }
    images = _VISION | {"model_type": "idefics3_vision", "image_size": _SIDE, "patch_size": _PATCH}
    config: dict[str, Any] = {
        "model_type": "idefics3",
        "architectures": ["ColIdefics3"],
        "scale_factor": _MERGED,
    }
    config |= {"image_token_id": ids["<image>"], "text_config": texts, "vision_config": images}
    _write(directory, "config.json", config)
    sizes = {"size": {"longest_edge": _LONGEST}, "max_image_size": {"longest_edge": _SIDE}}
    _write(
        directory,
        "preprocessor_config.json",
        {"image_processor_type": "Idefics3ImageProcessor", **sizes},
    )
    rows = (_SIDE // _PATCH // _MERGED) ** 2
    _write(
        directory,
        "processor_config.json",
        {"processor_class": "Idefics3Processor", "image_seq_len": rows},
    )
    made = _Weights()
    seen, hidden, inner = _VISION["hidden_size"], _TEXT["hidden_size"], _TEXT["intermediate_size"]
    made.draw("model.vision_model.embeddings.patch_embedding.weight", seen, 3, _PATCH, _PATCH)
    made.draw("model.vision_model.embeddings.patch_embedding.bias", seen, scale=0.02)
    made.draw(
        "model.vision_model.embeddings.position_embedding.weight",
        (_SIDE // _PATCH) ** 2,
        seen,
        scale=0.2,
    )
    made.encoder("model.vision_model", _VISION)
    made.norm("model.vision_model.post_layernorm", seen)
    made.linear("model.connector.modality_projection.proj", seen * _MERGED**2, hidden, bias=False)
    made.draw("model.text_model.embed_tokens.weight", len(ids), hidden, scale=1.0)
    head = hidden // _TEXT["num_attention_heads"]
    for layer in (
        f"model.text_model.layers.{number}" for number in range(_TEXT["num_hidden_layers"])
    ):
        for part, heads in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)):
            made.linear(f"{layer}.self_attn.{part}", hidden, heads * head, bias=False)
        made.linear(f"{layer}.self_attn.o_proj", hidden, hidden, bias=False)
        made.linear(f"{layer}.mlp.gate_proj", hidden, inner, bias=False)
        made.linear(f"{layer}.mlp.up_proj", hidden, inner, bias=False)
        made.linear(f"{layer}.mlp.down_proj", inner, hidden, bias=False)
        made.norm(f"{layer}.input_layernorm", hidden, bias=False)
        made.norm(f"{layer}.post_attention_layernorm", hidden, bias=False)
    made.norm("model.text_model.norm", hidden, bias=False)
    made.linear("linear", hidden, _VECTOR)
    made.save(directory)


def write_tokenizer(
    directory: Path,
    special: Sequence[str],
    before: str = "",
    after: str = "",
    *,
    lower: bool = False,
) -> dict[str, int]:
    """Write a tokenizer with one token per byte and special tokens; return the special tokens' ids.

    The tokens `before` and `after` enclose every text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({character: number for number, character in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    ids = tokenizer.get_vocab()
    if before and after:
        around = [(token, ids[token]) for token in (before, after)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{before} $A {after}", special_tokens=around
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    return ids


def _write(directory: Path, name: str, values: Mapping[str, object]) -> None:
    (directory / name).write_text(json.dumps(values, indent=2))
