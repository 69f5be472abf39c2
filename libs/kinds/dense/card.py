"""Embedding models: one dense vector per text, by pooling and the modules after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from libs.catalog.card import Card, kept_prompts
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import NOT_OPENED, tensor_entries
from libs.catalog.checkpoint.layout import LAYERS, common_card, modules_checkpoint
from libs.catalog.checkpoint.tasks import V5, is_parametrized, read_own_adapters
from libs.catalog.checkpoint.vectors import dimensions, hidden_size, similarity
from libs.errors import ModelBroken
from libs.kinds.dense.gritlm import gritlm, is_gritlm
from libs.kinds.dense.voyage import is_voyage, voyage
from libs.kinds.kind import CheckpointPlace, in_layout
from libs.kinds.static.card import static_embedding_card

_MASKED = "ForMaskedLM"


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


def pickled_layers(files: Checkpoint) -> tuple[str, ...]:
    """Notes for the card: the representations that are missing because their layers are there as
    torch checkpoints only.
    """
    notes = []
    for name, representation in LAYERS.items():
        pickle = name.replace(".safetensors", ".pt")
        if (files.directory / pickle).is_file() and not (files.directory / name).is_file():
            notes.append(f"{pickle}: {representation} vectors are missing: {NOT_OPENED}")
    return tuple(notes)


def is_dense(files: Checkpoint) -> bool:
    """Return True if a checkpoint has a pooling, or two encoders. Raises ModelBroken for a Router
    with separate modules for queries that is not served.
    """
    queries, pooling = files.modules.queries, bool(files.modules.pooling)
    if queries is None:
        is_bare = files.modules.answers is None
        return pooling or (is_bare and is_gritlm(files.config.values))
    if not pooling or not (queries.pooling or queries.static_embedding):
        raise ModelBroken(
            "modules.json: its Router has separate modules for queries, which is served for "
            "dense vectors of two encoders, or of a StaticEmbedding for queries and an encoder for "
            "documents, and for sparse vectors with a SparseStaticEmbedding for queries"
        )
    return True


def with_queries(files: Checkpoint, card: Card) -> Card:
    """Return a card with dense vectors alone, and that of the encoder for queries where there is
    one; its note says if a hybrid model's other layers are there as pickles only.
    """
    card = dense(files, card)
    if files.modules.queries is not None:
        card = replace(
            card, queries=_query_card(files, card), query_default=files.modules.query_default
        )
    return card if card.notes else replace(card, notes=pickled_layers(files))


def _query_card(files: Checkpoint, card: Card) -> Card:
    """Return the card of a Router's encoder for queries. Raises ModelBroken if its vectors cannot
    be compared with those of documents.
    """
    if files.modules.queries is None:
        raise TypeError("queries have no separate modules")
    if files.modules.queries.static_embedding:
        found = static_embedding_card(files.directory, card.model, files.modules.queries, files.top)
    else:
        own = modules_checkpoint(files.directory, files.modules.queries)
        found = dense(own, common_card(own, card.model, "dense"))
    found = replace(found, revision=card.revision)
    if found.dimensions != card.dimensions:
        sizes = f"{found.dimensions} numbers of queries and of {card.dimensions} of documents"
        raise ModelBroken(
            f"modules.json: its Router makes vectors of {sizes}, which cannot be compared"
        )
    if found.normalize != card.normalize:
        raise ModelBroken(
            "modules.json: its Router has a Normalize for queries or for documents alone, which is "
            "not served"
        )
    return found


def _refuse_bare(files: Checkpoint) -> None:
    """Raise ModelBroken for a causal language model if no file names its use."""
    if not files.modules.listed and files.architecture.endswith("ForCausalLM"):
        raise files.config.broken(
            "architectures",
            f"is {files.architecture}, a language model, and no file names its use. A card of "
            "the catalog can, by `detect`: "
            "`kind: dense` and `pooling: lasttoken` for an embedder; `kind: yes_no`, `answers: "
            "['yes', 'no']` and `template` for a "
            "reranker; `kind: generative` for one that generates text, which a chat template and "
            "generation_config.json say too",
        )


def claims_others(place: CheckpointPlace) -> bool:
    """Return True for the encoders that no kind claims. Raises ModelBroken for a causal language
    model, if no file names its use.
    """
    if place.named is None:
        _refuse_bare(place.files)
    return place.named is None


KIND: Final = in_layout("dense", is_dense, with_queries)
OTHERS: Final = replace(KIND, claims=claims_others)
"""Encoders without a file that names their use."""
