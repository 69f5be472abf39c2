"""Heads of vision-language models. Their vectors are not normalised yet, as those of text models are not."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from libs.models.head import ModelHead
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.text.heads.tokens import TokenHead
from libs.models.weights import SINGLE


def vectors_of_tokens(shape: tuple[int, int], state: Mapping[str, Tensor]) -> dict[str, ModelHead]:
    """Late interaction: a vector for each token, of the image's and the prompt's alike. `shape` of the projection: [out, in]."""
    check_shape(state, "projection.weight", shape, SINGLE)
    return {"multi_vector": TokenHead([HeadLinear(state, "projection", "identity")])}
