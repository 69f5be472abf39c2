"""Static embedders: the vector of a text is the mean of fixed vectors of its tokens.

Model2Vec and sentence-transformers' StaticEmbedding have a tokenizer.json and a table in
model.safetensors. The rules of Model2Vec apply where config.json has its model_type: unknown tokens
are left out, and a text has at most 512 tokens by default.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import (
    CheckpointConfig,
    digest,
    read_config,
    read_json,
    tensor_entries,
    tensor_files,
)
from libs.catalog.checkpoint.modules import Modules, read_modules, read_prompts
from libs.catalog.checkpoint.vectors import dimensions, similarity
from libs.errors import ModelBroken
from libs.kinds.kind import CheckpointPlace, Kind

MODEL2VEC: Final = "model2vec"
STATIC_EMBEDDING: Final = "static_embedding"
"""The family in the card of a StaticEmbedding without Model2Vec's configuration."""

FAMILIES: Final = (MODEL2VEC, STATIC_EMBEDDING)

TABLES: Final = ("embedding.weight", "embeddings")
"""Names of the table: sentence-transformers', and Model2Vec's."""

MAX_TOKENS: Final = 1 << 15
"""Tokens of a text where no file limits them."""

_MODEL2VEC_TOKENS: Final = 512
_MODULE: Final = ".StaticEmbedding"
_TOP: Final = "config_sentence_transformers.json"


def is_static(place: CheckpointPlace) -> bool:
    """Return True if config.json is Model2Vec's, or modules.json names a StaticEmbedding."""
    if _model2vec_config(place.directory) is not None:
        return True
    listed = read_json(place.directory, "modules.json")
    types = (
        [entry.get("type") for entry in listed if isinstance(entry, dict)]
        if isinstance(listed, list)
        else []
    )
    return any(str(name).endswith(_MODULE) for name in types)


def static_card(place: CheckpointPlace) -> Card:
    """Return the card of a static embedder. Raises ModelBroken naming the file and the key or
    tensor at fault.
    """
    directory, model = place.directory, place.model
    config, modules = _model2vec_config(directory), read_modules(directory)
    top = read_config(directory, _TOP) or CheckpointConfig(_TOP, {})
    card = static_embedding_card(directory, model, modules, top)
    if config is None:
        return card
    return replace(
        card,
        family=MODEL2VEC,
        max_tokens=_max_tokens(config),
        normalize=modules.normalize or config.flag("normalize"),
    )


def static_embedding_card(
    directory: Path, model: str, modules: Modules, top: CheckpointConfig
) -> Card:
    """Return the card of a StaticEmbedding and the modules after it.

    Args:
        top: config_sentence_transformers.json.
    """
    folder = modules.encoder_folder
    if not (directory / folder / "tokenizer.json").is_file():
        raise ModelBroken(f"tokenizer.json: missing from {directory / folder}")
    tensors = tensor_files(directory, folder)
    entries = {
        name: entry for file in tensors for name, entry in tensor_entries(directory, file).items()
    }
    table = next((entries[name] for name in TABLES if name in entries), None)
    if table is None or len(table.shape) != 2 or min(table.shape) < 1:
        raise ModelBroken(f"{tensors[0]}: needs a table of vectors, {' or '.join(TABLES)}")
    prompts, default = read_prompts(top)
    configs = [
        "config.json",
        "modules.json",
        _TOP,
        *(f"{module.folder}/config.json" for module in modules.dense),
    ]
    return Card(
        model=model,
        revision=model.partition("@")[2]
        or directory.name.partition("@")[2]
        or digest(directory, configs, tensors),
        family=STATIC_EMBEDDING,
        kind="dense",
        tasks=("encode", "score", "classify"),
        representations=("dense",),
        max_tokens=MAX_TOKENS,
        dimensions=dimensions(modules.dense, table.shape[1]),
        prompts=prompts,
        default_prompt=default,
        encoder_folder=folder,
        pooling=("mean",),
        modules=modules.dense,
        normalize=modules.normalize,
        scoring=similarity(top),
    )


def _model2vec_config(directory: Path) -> CheckpointConfig | None:
    config = read_config(directory, "config.json")
    return config if config is not None and config.values.get("model_type") == MODEL2VEC else None


def _max_tokens(config: CheckpointConfig) -> int:
    """Return Model2Vec's `max_length`: 512 where the key is missing, no limit where it is null."""
    if "max_length" in config.values and config.values["max_length"] is None:
        return MAX_TOKENS
    return min(config.number("max_length", _MODEL2VEC_TOKENS), MAX_TOKENS)


KIND: Final = Kind("dense", "static", is_static, static_card)
