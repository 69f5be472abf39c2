"""Heads of vision-language models. As with text models, their vectors are normalised later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from libs.errors import ModelBroken
from libs.models.interface.head import ModelHead
from libs.models.layers.encoder import PackedEncoder
from libs.models.text.heads.answer import AnswerHead
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.text.heads.pooled import PooledHead
from libs.models.text.heads.tokens import TokenHead
from libs.models.weights import SINGLE

Use = Literal["", "multi_vector", "dense", "score", "generate"]
"""The use of a model, and the name of its head. Empty: determined by its tensors. "generate": no
head, since the decode loop has the language head.
"""

State = Mapping[str, Tensor]


def vectors_of_tokens(state: State, encoder: PackedEncoder) -> dict[str, ModelHead]:
    """Late interaction: a vector for each token of images and prompt.

    Raises ModelBroken for a checkpoint without a projection: a language model that is not trained
    for retrieval.
    """
    weight = state.get("projection.weight")
    if weight is None:
        raise ModelBroken(
            f"{SINGLE}: has no projection to vectors: a card must define the language model's use"
        )
    check_shape(state, "projection.weight", (weight.shape[0], encoder.hidden_size), SINGLE)
    return {"multi_vector": TokenHead([HeadLinear(state, "projection", "identity")])}


def no_heads(state: State, encoder: PackedEncoder) -> dict[str, ModelHead]:
    """Return no heads, for a generative model."""
    return {}


def states_of_tokens(state: State, encoder: PackedEncoder) -> dict[str, ModelHead]:
    """Late interaction without a projection: the states are the vectors."""
    return {"multi_vector": TokenHead([])}


def last_state(state: State, encoder: PackedEncoder) -> dict[str, ModelHead]:
    """Return the head "dense", which represents an item by the state of its last token."""
    return {"dense": PooledHead(("lasttoken",), ())}


def judged(bias: float, state: State, encoder: PackedEncoder) -> dict[str, ModelHead]:
    """Return the logit that two layers make of the last token's state, minus `bias`."""
    width = encoder.hidden_size
    shapes = {
        "0.weight": (width, width),
        "0.bias": (width,),
        "2.weight": (1, width),
        "2.bias": (1,),
    }
    for name, shape in shapes.items():
        check_shape(state, f"score.{name}", shape, SINGLE)
    state = {**state, "score.2.bias": state["score.2.bias"] - bias}
    layers = [HeadLinear(state, "score.0", "relu"), HeadLinear(state, "score.2", "identity")]
    return {"score": PooledHead(("lasttoken",), layers)}


def answers(ids: tuple[int, int], state: State, encoder: PackedEncoder) -> dict[str, ModelHead]:
    """Return the logit of "yes" minus that of "no", by their `ids`, from the language model's head
    or the shared token table.
    """
    table = state.get("words.weight", encoder.token_weight)
    if table.dim() != 2 or table.shape[1] != encoder.hidden_size or max(ids) >= len(table):
        raise ModelBroken(
            f"{SINGLE}: the language model's head {list(table.shape)} "
            f"is too small for the tokens {list(ids)}"
        )
    return {"score": AnswerHead(table[list(ids)].to(device=encoder.device, dtype=torch.float32))}
