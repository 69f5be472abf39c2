"""voyage-4-nano: a bidirectional Qwen3 that projects its states before pooling, which only its code
says.

config.json is a Qwen3's except for its architecture; the code that it names is not run. Its effect
is implemented here, as vLLM computes it: no causal mask, a matrix `linear.weight` without a bias
for each state, the mean, and length 1. The mean of projected states is the projection of their
mean, so the matrix is a Dense module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from libs.catalog.card import Card, DenseModule
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import tensor_shape
from libs.errors import ModelBroken

_ARCHITECTURE: Final = "VoyageQwen3"
_MATRIX: Final = "linear.weight"


def is_voyage(config: Mapping[str, object]) -> bool:
    """Return True if config.json names Voyage's architecture for a Qwen3."""
    named = config.get("architectures")
    return isinstance(named, list) and any(
        isinstance(name, str) and name.startswith(_ARCHITECTURE) for name in named
    )


def voyage(files: Checkpoint, card: Card) -> Card:
    """Return the card of a model with dense vectors, as Voyage's code makes them. Raises
    ModelBroken if the matrix is missing.
    """
    shape = tensor_shape(files.directory, files.tensors, _MATRIX)
    if shape is None or len(shape) != 2:
        raise ModelBroken(
            f"{files.tensors[0]}: has no matrix `{_MATRIX}`, which the architecture "
            f"{files.architecture} needs"
        )
    matrix = DenseModule(
        "", in_features=shape[1], out_features=shape[0], bias=False, activation="identity"
    )
    return replace(card, pooling=("mean",), modules=(matrix,), dimensions=shape[0], normalize=True)
