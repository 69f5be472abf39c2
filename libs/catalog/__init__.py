"""The cards of models (`card.py`), read from checkpoints with the standard library alone
(`detect.py`, by way of `kinds/` and `checkpoint/`) and overridden by cards in YAML (`cards.py`),
and the mesh's pools in YAML (`pools.py`). Fetching a model is in `libs/store`, loading and running
it in `libs/models`."""

from libs.catalog.card import (
    Activation,
    Card,
    DenseModule,
    Expansion,
    Kind,
    LateInteraction,
    PoolingMode,
    Problem,
    Representation,
    Scoring,
    Sparse,
    SparsePooling,
    SpladeActivation,
    StaticQueries,
    Task,
)
from libs.catalog.detect import read_card

__all__ = [
    "Activation",
    "Card",
    "DenseModule",
    "Expansion",
    "Kind",
    "LateInteraction",
    "PoolingMode",
    "Problem",
    "Representation",
    "Scoring",
    "Sparse",
    "SparsePooling",
    "SpladeActivation",
    "StaticQueries",
    "Task",
    "read_card",
]
