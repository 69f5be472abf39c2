"""Cards of models: read from a checkpoint directory alone, with nothing but the standard library."""

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
