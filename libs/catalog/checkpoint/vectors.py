"""The size of vectors, and how they are compared, by the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from libs.catalog.card import DenseModule, Scoring
from libs.catalog.checkpoint.files import CheckpointConfig
from libs.errors import ModelBroken

_HIDDEN_KEYS = ("hidden_size", "dim", "d_model", "n_embd")
_SIMILARITIES: dict[str, Scoring] = {
    "": "cosine",
    "cosine": "cosine",
    "dot": "dot",
    "euclidean": "euclidean",
    "manhattan": "manhattan",
}
"""Names of sentence-transformers' similarity functions for dense vectors."""


def similarity(top: CheckpointConfig) -> Scoring:
    """Return how two dense vectors are compared. Raises ModelBroken for a function that
    sentence-transformers does not have.
    """
    name = top.text("similarity_fn_name")
    if name not in _SIMILARITIES:
        known = ", ".join(name for name in _SIMILARITIES if name)
        raise top.broken("similarity_fn_name", f"is {name!r}, which is not one of {known}")
    return _SIMILARITIES[name]


def hidden_size(config: CheckpointConfig) -> int:
    """Return the width of the encoder's hidden states. Raises ModelBroken if config.json has none
    of the known keys.
    """
    for key in _HIDDEN_KEYS:
        if size := config.number(key):
            return size
    raise config.broken("hidden_size", "is missing")


def dimensions(modules: Sequence[DenseModule], size: int) -> int:
    """Return the width after the dense modules, the first of which takes `size` numbers. Raises
    ModelBroken where widths do not match.
    """
    for module in modules:
        if module.in_features != size:
            raise ModelBroken(
                f"{module.folder}/config.json: `in_features` is {module.in_features}, but its "
                f"input has {size} numbers"
            )
        size = module.out_features
    return size
