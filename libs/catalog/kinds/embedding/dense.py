"""Embedding models: one dense vector per text, by pooling and the modules after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from libs.catalog.card import Card, DenseModule, Scoring, kept_prompts
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import Config, tensor_entries
from libs.catalog.checkpoint.tasks import V5, is_parametrized, read_own_adapters
from libs.catalog.kinds.embedding.gritlm import gritlm, is_gritlm
from libs.catalog.kinds.embedding.voyage import is_voyage, voyage
from libs.errors import ModelBroken

_HIDDEN_KEYS = ("hidden_size", "dim", "d_model", "n_embd")
_MASKED = "ForMaskedLM"
_SIMILARITIES: dict[str, Scoring] = {
    "": "cosine",
    "cosine": "cosine",
    "dot": "dot",
    "euclidean": "euclidean",
    "manhattan": "manhattan",
}
"""Names of sentence-transformers' similarity functions for dense vectors."""


def dense(files: Checkpoint, card: Card) -> Card:
    """Return the card of a model with dense vectors. Raises ModelBroken for modules without
    pooling, or that do not fit each other.
    """
    card = _with_own_adapters(files, card)
    if card.family == V5 and not files.modules.pooling:
        return _v5(files, card)
    if files.modules.listed and not files.modules.pooling:
        raise ModelBroken("modules.json: names no Pooling, which makes the vector of a text")
    _refuse_global_attention(files, card)
    pooling = files.modules.pooling or ("mean",)
    card = replace(
        card,
        tasks=("encode", "score", "classify"),
        representations=("dense",),
        dimensions=dimensions(files.modules.dense, hidden_size(files.config) * len(pooling)),
        pooling=pooling,
        pool_prompt=files.modules.pool_prompt,
        modules=files.modules.dense,
        normalize=files.modules.normalize,
        scoring=similarity(files.top),
        notes=_ambiguous(files),
    )
    if is_voyage(files.config.values):
        return voyage(files, card)
    if not is_gritlm(files.config.values):
        return card
    return replace(gritlm(card), dimensions=hidden_size(files.config))


def _with_own_adapters(files: Checkpoint, card: Card) -> Card:
    """Return the card with the checkpoint's task adapters, and their prompts in addition to those
    of roles.

    Copies of jina-embeddings-v3 with one adapter merged still name all of them in config.json: they
    have none.
    """
    own = read_own_adapters(files.config)
    if own.names and not own.folder and not any(map(is_parametrized, tensor_names(files))):
        return card
    prompts = kept_prompts({**own.prompts, **card.prompts})
    return replace(card, own_adapters=own.names, role_adapters=own.by_role, prompts=prompts)


def _v5(files: Checkpoint, card: Card) -> Card:
    """Return the card of jina-embeddings-v5-text, which takes the last token's state and scales it
    to length 1.
    """
    return replace(
        card,
        tasks=("encode", "score", "classify"),
        representations=("dense",),
        dimensions=hidden_size(files.config),
        pooling=("lasttoken",),
        normalize=True,
        scoring=similarity(files.top),
    )


def tensor_names(files: Checkpoint) -> Iterator[str]:
    """Yield the names of the encoder's tensors, by the headers of its files."""
    for name in files.tensors:
        yield from tensor_entries(files.directory, name)


def similarity(top: Config) -> Scoring:
    """Return how two dense vectors are compared. Raises ModelBroken for a function that
    sentence-transformers does not have.
    """
    name = top.text("similarity_fn_name")
    if name not in _SIMILARITIES:
        known = ", ".join(name for name in _SIMILARITIES if name)
        raise top.broken("similarity_fn_name", f"is {name!r}, which is not one of {known}")
    return _SIMILARITIES[name]


def hidden_size(config: Config) -> int:
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


def _refuse_global_attention(files: Checkpoint, card: Card) -> None:
    """Refuse a Longformer classifier that is read for vectors: sentence-transformers loads its
    encoder without global attention, but the family builds it by `architectures`.
    """
    if card.family == "longformer" and files.architecture.endswith("ForSequenceClassification"):
        raise files.config.broken(
            "architectures",
            "names a classifier, which has global attention; vectors are made without: write "
            "LongformerModel",
        )


def _ambiguous(files: Checkpoint) -> tuple[str, ...]:
    """Return a note for the card of a masked language model, which may be meant for SPLADE."""
    if not files.architecture.endswith(_MASKED) or files.modules.listed:
        return ()
    return (
        f"config.json: `architectures` is {files.architecture} and modules.json is missing: "
        "taken for dense vectors by the "
        "mean, as sentence-transformers does. If it is SPLADE, a card with `detect: {kind: "
        "sparse}` says so",
    )
