"""Sparse models: SPLADE in the formats of sentence-transformers and opensearch."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from libs.catalog.card import Card, SparseOutput, SparsePooling, SpladeActivation, StaticQueries
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import CheckpointConfig
from libs.kinds.kind import in_layout

# query token weights of opensearch's doc-only models older than sentence-transformers 5
_IDF = "idf.json"
_POOLINGS: dict[str, SparsePooling] = {"max": "max", "sum": "sum"}
_ACTIVATIONS: dict[str, SpladeActivation] = {"relu": "log1p_relu", "log1p_relu": "log1p_relu_twice"}


def is_sparse(files: Checkpoint) -> bool:
    """Return True if a checkpoint's files identify it as SPLADE.

    A masked language model without modules.json is identified by a file of query weights or by
    sentence-transformers' model_type. Without either it may as well be meant for dense vectors, and
    a card of the catalog has to set `kind: sparse`.
    """
    if files.modules.queries is not None:
        return False
    named = files.top.text("model_type") == "SparseEncoder"
    if files.modules.splade is not None or (named and not files.modules.listed):
        return True
    if named:
        raise files.top.broken(
            "model_type",
            (
                "is 'SparseEncoder', but modules.json names no SpladePooling, the only pooling "
                "that is served"
            ),
        )
    return (
        not files.modules.listed
        and files.architecture.endswith("ForMaskedLM")
        and (files.directory / _IDF).exists()
    )


def sparse(files: Checkpoint, card: Card) -> Card:
    """Return the card of a SPLADE model. Scores are dot products, or cosines if the checkpoint's
    similarity function is cosine.
    """
    if not files.architecture.endswith("ForMaskedLM"):
        raise files.config.broken(
            "architectures",
            f"is {files.architecture!r}: SPLADE needs a masked language model (ForMaskedLM)",
        )
    queries = files.modules.static
    if queries is None and not files.modules.listed and (files.directory / _IDF).exists():
        queries = StaticQueries(folder="", file=_IDF)
    found = (
        splade(files.modules.splade)
        if files.modules.splade is not None
        else SparseOutput(columns=0)
    )
    cosine = files.top.text("similarity_fn_name") == "cosine"
    return replace(
        card,
        tasks=("encode", "score"),
        representations=("sparse",),
        sparse=replace(
            found,
            columns=columns(files),
            strongest=files.top.number("max_active_dims"),
            queries=queries,
        ),
        scoring="sparse_cosine" if cosine else "dot",
    )


def columns(files: Checkpoint) -> int:
    """Return the width of sparse vectors: the size of the vocabulary, padding included."""
    size = files.config.number("vocab_size")
    if size < 1:
        raise files.config.broken("vocab_size", "is missing: it is the width of sparse vectors")
    return size


def splade(config: CheckpointConfig) -> SparseOutput:
    """SpladePooling's settings; `columns` is set by the caller."""
    pooling = config.text("pooling_strategy", "max")
    activation = config.text("activation_function", "relu")
    if pooling not in _POOLINGS:
        raise config.broken(
            "pooling_strategy", f"is {pooling!r}, which is not one of {', '.join(_POOLINGS)}"
        )
    if activation not in _ACTIVATIONS:
        raise config.broken(
            "activation_function",
            f"is {activation!r}, which is not one of {', '.join(_ACTIVATIONS)}",
        )
    return SparseOutput(columns=0, pooling=_POOLINGS[pooling], activation=_ACTIVATIONS[activation])


KIND: Final = in_layout("sparse", is_sparse, sparse)
