"""Sparse models: SPLADE, as sentence-transformers and opensearch keep it. Called by `detect.py` for cards of the kind "sparse"."""

from __future__ import annotations

from dataclasses import replace

from libs.catalog.card import Card, Sparse, SparsePooling, SpladeActivation, StaticQueries
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import Config

_IDF = "idf.json"  # opensearch's doc-only models of before sentence-transformers 5: a weight for each token of a query
_POOLINGS: dict[str, SparsePooling] = {"max": "max", "sum": "sum"}
_ACTIVATIONS: dict[str, SpladeActivation] = {"relu": "log1p_relu", "log1p_relu": "log1p_relu_twice"}


def is_sparse(files: Checkpoint) -> bool:
    """Whether a checkpoint says by its files that it is SPLADE.

    A masked language model without modules.json says it by query weights beside it or by sentence-transformers' model_type. Without
    either it may as well be meant for dense vectors, and a catalog card has to say `kind: sparse`.
    """
    said = files.top.text("model_type") == "SparseEncoder"
    if files.modules.splade is not None or (said and not files.modules.listed):
        return True
    if said:
        raise files.top.broken("model_type", "is 'SparseEncoder', but modules.json names no SpladePooling, which alone is served")
    return not files.modules.listed and files.architecture.endswith("ForMaskedLM") and (files.directory / _IDF).exists()


def sparse(files: Checkpoint, card: Card) -> Card:
    """The card of SPLADE. Scores are sums of products, or their cosine where the checkpoint says so."""
    if not files.architecture.endswith("ForMaskedLM"):
        raise files.config.broken("architectures", f"is {files.architecture!r}: SPLADE needs a masked language model (ForMaskedLM)")
    queries = files.modules.static
    if queries is None and not files.modules.listed and (files.directory / _IDF).exists():
        queries = StaticQueries(folder="", file=_IDF)
    found = splade(files.modules.splade) if files.modules.splade is not None else Sparse(columns=0)
    cosine = files.top.text("similarity_fn_name") == "cosine"
    return replace(
        card,
        tasks=("encode", "score"),
        representations=("sparse",),
        sparse=replace(found, columns=columns(files), strongest=files.top.number("max_active_dims"), queries=queries),
        scoring="sparse_cosine" if cosine else "dot",
    )


def columns(files: Checkpoint) -> int:
    """The size of the vocabulary, its padding included."""
    size = files.config.number("vocab_size")
    if size < 1:
        raise files.config.broken("vocab_size", "is missing: it is the width of sparse vectors")
    return size


def splade(config: Config) -> Sparse:
    """SpladePooling's settings, without the vocabulary's size."""
    pooling = config.text("pooling_strategy", "max")
    activation = config.text("activation_function", "relu")
    if pooling not in _POOLINGS:
        raise config.broken("pooling_strategy", f"is {pooling!r}, which is not one of {', '.join(_POOLINGS)}")
    if activation not in _ACTIVATIONS:
        raise config.broken("activation_function", f"is {activation!r}, which is not one of {', '.join(_ACTIVATIONS)}")
    return Sparse(columns=0, pooling=_POOLINGS[pooling], activation=_ACTIVATIONS[activation])
