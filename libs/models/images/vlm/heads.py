"""Heads of vision-language models. Their vectors are not normalised yet, as those of text models are not."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from libs.errors import ModelBroken
from libs.models.head import ModelHead
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.text.heads.tokens import TokenHead
from libs.models.weights import SINGLE


def vectors_of_tokens(width: int, state: Mapping[str, Tensor]) -> dict[str, ModelHead]:
    """Late interaction: a vector for each token, of the image's and the prompt's alike. `width` of the text encoder.

    Raises ModelBroken for a checkpoint without a projection: a language model that is not trained for retrieval.
    """
    weight = state.get("projection.weight")
    if weight is None:
        raise ModelBroken(f"{SINGLE}: has no projection to vectors: the model answers with text, which is not served")
    check_shape(state, "projection.weight", (weight.shape[0], width), SINGLE)
    return {"multi_vector": TokenHead([HeadLinear(state, "projection", "identity")])}
