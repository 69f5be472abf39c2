"""Models with dense, sparse and multi-vector embeddings from one forward pass (BAAI/bge-m3), by two
linear layers in extra files.

FlagEmbedding, which trains them, writes the layers as torch checkpoints (`sparse_linear.pt`,
`colbert_linear.pt`: `weight` and `bias` of a torch Linear). The store converts them to safetensors
files of the same stems, which are served.
"""

from __future__ import annotations

from dataclasses import replace

from libs.catalog.card import Card, LateInteraction, Representation, Sparse
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import NOT_OPENED, tensor_shape
from libs.catalog.kinds.embedding.dense import dense
from libs.catalog.kinds.embedding.sparse import columns
from libs.errors import ModelBroken

SPARSE_FILE = "sparse_linear.safetensors"
TOKENS_FILE = "colbert_linear.safetensors"
_REPRESENTATIONS: dict[str, Representation] = {SPARSE_FILE: "sparse", TOKENS_FILE: "multi_vector"}


def layer_files(files: Checkpoint) -> tuple[str, ...]:
    """Return the files of the extra layers that the checkpoint has as safetensors; a hybrid model
    has at least one.
    """
    return tuple(name for name in _REPRESENTATIONS if (files.directory / name).is_file())


def pickled_layers(files: Checkpoint) -> tuple[str, ...]:
    """Notes for the card: the representations that are missing because their layers are there as
    torch checkpoints only.
    """
    notes = []
    for name, representation in _REPRESENTATIONS.items():
        pickle = name.replace(".safetensors", ".pt")
        if (files.directory / pickle).is_file() and not (files.directory / name).is_file():
            notes.append(f"{pickle}: {representation} vectors are missing: {NOT_OPENED}")
    return tuple(notes)


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
        *(_REPRESENTATIONS[name] for name in names),
    )
    found = replace(
        card, representations=representations, scoring="hybrid", notes=pickled_layers(files)
    )
    if SPARSE_FILE in names:
        found = replace(found, sparse=Sparse(columns(files)))
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
