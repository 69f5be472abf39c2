"""Models with dense, sparse and multi-vector embeddings from one forward pass (BAAI/bge-m3), by two
linear layers in extra files.

FlagEmbedding, which trains them, writes the layers as torch checkpoints (`sparse_linear.pt`,
`colbert_linear.pt`: `weight` and `bias` of a torch Linear). The store converts them to safetensors
files of the same stems, which are served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from libs.catalog.card import Card, LateInteraction, Representation, SparseOutput
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import tensor_shape
from libs.catalog.checkpoint.layout import LAYERS, layer_files
from libs.errors import ModelBroken
from libs.kinds.dense.card import dense, pickled_layers
from libs.kinds.kind import in_layout
from libs.kinds.sparse.card import columns

SPARSE_FILE, TOKENS_FILE = LAYERS


def is_hybrid(files: Checkpoint) -> bool:
    """Return True if a model with a pooling has one of the layers."""
    modules = files.modules
    return modules.queries is None and bool(modules.pooling) and bool(layer_files(files))


def hybrid(files: Checkpoint, card: Card) -> Card:
    """Return a dense model's card with the other representations. The first token ([CLS], the dense
    vector) has no token vector.
    """
    card, names = dense(files, card), layer_files(files)
    if not names:
        raise ModelBroken(
            f"{TOKENS_FILE}: missing from {files.directory}, and so is {SPARSE_FILE}: a hybrid "
            "model has one"
        )
    if not card.pool_prompt:
        raise ModelBroken(
            "1_Pooling/config.json: `include_prompt` is false, which is not served for hybrid "
            "models"
        )
    representations: tuple[Representation, ...] = (
        "dense",
        *(LAYERS[name] for name in names),
    )
    found = replace(
        card, representations=representations, scoring="hybrid", notes=pickled_layers(files)
    )
    if SPARSE_FILE in names:
        found = replace(found, sparse=SparseOutput(columns(files)))
    if TOKENS_FILE in names:
        found = replace(
            found, late=LateInteraction(leading=1), multi_vector_dimensions=_width(files)
        )
    return found


def _width(files: Checkpoint) -> int:
    shape = tensor_shape(files.directory, [TOKENS_FILE], "weight")
    if shape is None or len(shape) != 2:
        raise ModelBroken(f"{TOKENS_FILE}: has no matrix `weight`")
    return shape[0]


KIND: Final = in_layout("hybrid", is_hybrid, hybrid)
