"""Idefics3, SmolVLM (arXiv 2408.12637, 2504.05299), ModernVBERT (2510.01149): ColIdefics3, ColSmol
and ColModernVBERT.

SigLIP encodes tiles of an image, pixel shuffle merges patches to fewer rows, and Llama (causal) or
ModernBERT reads them.
"""

from __future__ import annotations

from functools import partial

import torch

from libs.models.images.vlm.connectors import PixelShuffle, read_linear
from libs.models.images.vlm.families.family import (
    SIGLIP,
    State,
    VisionLanguageSpec,
    VlmFiles,
    siglip,
)
from libs.models.images.vlm.heads import vectors_of_tokens
from libs.models.images.vlm.parts import Prompts, TextFrame
from libs.models.images.vlm.tiles import MARK, Tiles
from libs.models.layers.spec import Config
from libs.models.weights import SINGLE, HeadRule, Maybe, Rule

MODEL_TYPES = ("idefics3", "smolvlm", "modernvbert", "colmodernvbert")

NAMES = {
    "text_model.": "text.",
    "vision_model.vision_model.": "tower.",
    "vision_model.": "tower.",
    "connector.modality_projection.proj.": "connector.linear.",
    "connector.modality_projection.": "connector.linear.",
    "embedding_proj_layer.": "head.projection.",
    "custom_text_proj.": "head.projection.",
    "linear.": "head.projection.",
    "lm_head.": "head.words.",
}

TOWER: dict[str, Rule] = SIGLIP
CONNECTOR: dict[str, HeadRule] = {"linear": "linear"}
HEADS: dict[str, HeadRule] = {"projection": Maybe("projection"), "words": None}

_END = "<end_of_utterance>"
_INSTRUCTION = "User:<image>Describe the image.<end_of_utterance>\nAssistant:"
_UNUSED = (
    "layers.0.attn_norm.",
)  # ModernBERT's first layer has no such norm, but NAVER's exports contain one
_AUGMENTED = 10  # tokens after a query, which the model attends to and returns vectors for


def spec(files: VlmFiles) -> VisionLanguageSpec:
    """Describe a checkpoint. Raises ModelBroken for an unsupported key."""
    return read_spec(files, is_bert="modernvbert" in files.config.text("model_type"))


def read_spec(files: VlmFiles, *, is_bert: bool) -> VisionLanguageSpec:
    """Describe a checkpoint; `is_bert` for ModernVBERT, with ModernBERT as its text encoder. Raises
    ModelBroken for an unsupported key.
    """
    config = files.config.part("vlm_config") if files.config.has("vlm_config") else files.config
    texts, images = config.part("text_config"), config.part("vision_config")
    if is_bert:
        encoder, patches = siglip(
            images, hidden=768, layers=12, heads=12, ffn=3072, image=224, patch=16
        )
        side = config.size("pixel_shuffle_factor", 4)
    else:
        encoder, patches = siglip(
            images, hidden=1152, layers=12, heads=16, ffn=3072, image=224, patch=32
        )
        side = config.size("scale_factor", 2)
    if patches.grid[0] % side:
        raise config.unsupported(
            "pixel_shuffle_factor" if is_bert else "scale_factor",
            "it does not divide the patches of a side",
        )
    count = patches.grid[0] * patches.grid[1]
    tiles = Tiles.from_config(files.images, count, count // side**2)
    if patches.patch_grid(tiles.side, tiles.side) != patches.grid:
        wanted = patches.grid[0] * patches.patch
        raise files.images.unsupported(
            "max_image_size", f"the image encoder of config.json needs tiles of {wanted} pixels"
        )
    width = texts.size("hidden_size")
    return VisionLanguageSpec(
        text={"model_type": "modernbert" if is_bert else "llama", **texts.values},
        encoder=encoder,
        patches=patches,
        processing=tiles.processing,
        connector=partial(_connector, encoder.hidden, side, width),
        heads=vectors_of_tokens,
        image_converter=tiles,
        prompts=_prompts(files.processor, "<|begin_of_text|>" if is_bert else "<|im_start|>"),
        mark=MARK,
        adds_special_tokens=True,
        unused=_UNUSED if is_bert else (),
    )


def _connector(
    inputs: int, side: int, outputs: int, state: State, dtype: torch.dtype
) -> PixelShuffle:
    return PixelShuffle(
        read_linear(state, "linear", inputs * side**2, outputs, dtype, SINGLE, bias=False), side
    )


def _prompts(processor: Config, begin: str) -> Prompts:
    """Build the prompts of transformers' ColModernVBertProcessor and of colpali-engine: an image in
    a conversation, and a plain query.
    """
    reported = processor.text("visual_prompt_prefix", begin + _INSTRUCTION)
    before, mark, after = reported.partition(MARK)
    if not mark:
        raise processor.unsupported("visual_prompt_prefix", f"it has no {MARK}")
    return Prompts(
        images=TextFrame(before, after),
        texts=TextFrame(),
        queries=TextFrame(processor.text("query_prefix", ""), _END * _AUGMENTED),
    )
