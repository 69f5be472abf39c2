"""V-SPLADE (arXiv 2605.30917): weights over the vocabulary from ModernVBERT's states for pages;
queries need no forward.

A page is a turn of the checkpoint's chat template without text. A query is the sum of its tokens'
weights: softplus of a linear layer over an embedding. Based on NAVER's release (`train/models`) and
its Hugging Face export.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from libs.catalog.card import SparseOutput
from libs.catalog.checkpoint.chat import read_template
from libs.errors import ModelBroken
from libs.models.images.vlm.families import idefics
from libs.models.images.vlm.families.family import (
    State,
    VisionLanguageSpec,
    VlmFiles,
    special_around,
)
from libs.models.images.vlm.parts import Prompts, TextFrame
from libs.models.images.vlm.tiles import MARK
from libs.models.interface.head import ModelHead
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config
from libs.models.text.heads.linear import check_shape
from libs.models.text.heads.mlm import MlmTransform
from libs.models.text.heads.sparse import SpladeHead
from libs.models.text.processing.static import TokenWeights
from libs.models.text.tokenising.renderer import rendered, rendered_text, special_tokens
from libs.models.weights import SINGLE, HeadRule, InFile, Rule

MODEL_TYPES: tuple[str, ...] = ()  # shared with ModernVBERT

NAMES = {
    f"encoder.encoder.model.{begin}": own
    for begin, own in idefics.NAMES.items()
    if not own.startswith("head.")
} | {
    "encoder.mlm_head.": "head.",
    "query_encoder.": "head.query.",
}

TOWER: dict[str, Rule] = idefics.TOWER
CONNECTOR: dict[str, HeadRule] = idefics.CONNECTOR
HEADS: dict[str, HeadRule] = {
    "dense": "dense",
    "norm": "norm",
    "decoder": "decoder",
    "query.embeddings": InFile("query.embeddings"),
    "query.projection": "query.projection",
}

_SILENT: Final = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
"""Tokens without a weight on either side. The release lists their ids: 50280 to 50284 of its
tokenizer.
"""

_TEMPLATE: Final = "chat_template.jinja"


def spec(files: VlmFiles) -> VisionLanguageSpec:
    """Describe a checkpoint. Raises ModelBroken for an unsupported key."""
    base = idefics.read_spec(files, is_bert=True)
    silent = _silent(files.tokenizer)
    return replace(
        base,
        text={**base.text, "model_type": "modernbert"},
        heads=partial(_heads, silent),
        prompts=_prompts(files),
        adds_special_tokens=False,
        weights=partial(_weights, silent),
    )


def _silent(tokenizer: Tokenizer) -> tuple[int, ...]:
    found = (tokenizer.token_to_id(token) for token in _SILENT)
    return tuple(one for one in found if one is not None)


def _prompts(files: VlmFiles) -> Prompts:
    """Build the template's user turn with an image and no text, with the answer begun. Texts have
    no special tokens.
    """
    template = read_template(files.directory)
    if not template:
        raise ModelBroken(f"{_TEMPLATE} is missing: pages need the model's chat template")
    content = [{"type": "image"}, {"type": "text", "text": ""}]
    values = {
        **special_tokens(files.directory),
        "add_generation_prompt": True,
        "messages": [{"role": "user", "content": content}],
    }
    (found,) = rendered(template, [values])
    before, mark, after = rendered_text(found).partition(MARK)
    if not mark or MARK in after:
        raise ModelBroken(f"{_TEMPLATE}: it has no place for the image of a message")
    first, last = special_around(files.tokenizer)
    return Prompts(
        images=TextFrame(first + before, after + last), texts=TextFrame(), queries=TextFrame()
    )


def _heads(silent: tuple[int, ...], state: State, encoder: PackedEncoder) -> dict[str, ModelHead]:
    """SPLADE over a masked language model's logits times hidden ** -0.25; norm and bias of the
    decoder include that factor here.
    """
    hidden = encoder.hidden_size
    columns = len(state["decoder.weight"])
    shapes = {"dense.bias": (hidden,), "norm.bias": (hidden,)}
    for name in shapes.keys() & state.keys():
        check_shape(state, name, shapes[name], SINGLE)
    check_shape(state, "decoder.weight", (columns, hidden), SINGLE)
    check_shape(state, "decoder.bias", (columns,), SINGLE)
    scale = hidden**-0.25
    scaled = {
        name: state[name] * scale
        for name in ("norm.weight", "norm.bias", "decoder.bias")
        if name in state
    }
    transform = MlmTransform("modernbert", Config({}), {**state, **scaled}, hidden, hidden, SINGLE)
    weight, bias = (
        _silenced(state["decoder.weight"], silent),
        _silenced(scaled["decoder.bias"], silent),
    )
    return {
        "sparse": SpladeHead(
            transform, weight.to(encoder.dtype), bias, SparseOutput(columns), shared=False
        )
    }


def _weights(silent: tuple[int, ...], state: State) -> TokenWeights:
    """Return softplus(embedding w' + b) of each token."""
    columns, hidden = state["decoder.weight"].shape
    check_shape(state, "query.embeddings.weight", (columns, hidden), SINGLE)
    check_shape(state, "query.projection.weight", (1, hidden), SINGLE)
    check_shape(state, "query.projection.bias", (1,), SINGLE)
    weight, bias = state["query.projection.weight"].cpu(), state["query.projection.bias"].cpu()
    scores = F.linear(state["query.embeddings.weight"].float(), weight, bias).squeeze(1)
    return TokenWeights(_silenced(F.softplus(scores), silent).numpy())


def _silenced(values: Tensor, silent: tuple[int, ...]) -> Tensor:
    """Return a copy with zeros in the rows of tokens without a weight."""
    rows = torch.tensor(
        [one for one in silent if one < len(values)], dtype=torch.int64, device=values.device
    )
    return values.index_fill(0, rows, 0.0)
