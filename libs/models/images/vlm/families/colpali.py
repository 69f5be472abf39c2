"""ColPali (arXiv 2407.01449): PaliGemma, i.e. SigLIP and Gemma 1, with a vector for each patch of a
page and token of a query.

All tokens attend to all others, as in PaliGemma's prompts.
"""

from __future__ import annotations

from functools import partial

import torch

from libs.errors import ModelBroken
from libs.models.images.processing import ImageProcessing
from libs.models.images.vlm.connectors import LinearConnector, read_linear
from libs.models.images.vlm.families.family import (
    SIGLIP,
    State,
    VisionLanguageSpec,
    VlmFiles,
    siglip,
)
from libs.models.images.vlm.heads import vectors_of_tokens
from libs.models.images.vlm.image_converter import OneSize
from libs.models.images.vlm.parts import Prompts, TextFrame
from libs.models.text.tokenising.text import special_token
from libs.models.weights import SINGLE, HeadRule, Maybe, Rule

MODEL_TYPES = ("colpali",)

NAMES = {
    "language_model.model.": "text.",
    "language_model.": "text.",
    "vision_tower.vision_model.": "tower.",
    "vision_tower.": "tower.",
    "multi_modal_projector.": "connector.",
    "embedding_proj_layer.": "head.projection.",
    "custom_text_proj.": "head.projection.",
}

TOWER: dict[str, Rule] = SIGLIP
CONNECTOR: dict[str, HeadRule] = {"linear": "linear"}
HEADS: dict[str, HeadRule] = {"projection": Maybe("projection")}

_MARK = "<image>"
_AUGMENTED = 10  # padding tokens after a query, which the model attends to and returns vectors for


def spec(files: VlmFiles) -> VisionLanguageSpec:
    config = files.config.part("vlm_config")
    texts, images = config.part("text_config"), config.part("vision_config")
    encoder, patches = siglip(
        images, hidden=1152, layers=27, heads=16, ffn=4304, image=224, patch=14
    )
    width = texts.size("hidden_size", 2048)
    processing = ImageProcessing.from_config(files.images, "SiglipImageProcessor")
    rows = patches.grid[0] * patches.grid[1]
    return VisionLanguageSpec(
        text={"model_type": "gemma", **texts.values, "use_bidirectional_attention": True},
        encoder=encoder,
        patches=patches,
        processing=processing,
        connector=partial(_connector, encoder.hidden, width),
        heads=vectors_of_tokens,
        image_converter=OneSize(processing, patches, _MARK, rows),
        prompts=_prompts(files),
        mark=_MARK,
    )


def _connector(inputs: int, outputs: int, state: State, dtype: torch.dtype) -> LinearConnector:
    return LinearConnector(read_linear(state, "linear", inputs, outputs, dtype, SINGLE, bias=True))


def _prompts(files: VlmFiles) -> Prompts:
    """Build the prompts of transformers' ColPaliProcessor: the image precedes the text, and padding
    follows a query.
    """
    begin, fill = (
        special_token(files.directory, "bos_token"),
        special_token(files.directory, "pad_token"),
    )
    if not begin or not fill:
        raise ModelBroken(
            "tokenizer_config.json: bos_token and pad_token are needed for queries and pages"
        )
    asked = files.processor.text("query_prefix", "Question: ")
    instruction = files.processor.text("visual_prompt_prefix", "Describe the image.")
    return Prompts(
        images=TextFrame(after=f"{begin}{instruction}\n"),
        texts=TextFrame(begin, "\n"),
        queries=TextFrame(f"{begin}{asked}", f"{fill * _AUGMENTED}\n"),
    )
