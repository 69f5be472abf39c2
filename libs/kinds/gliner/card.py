"""Zero-shot entity and relation models of the gliner package (GLiNER, arXiv 2311.08526):
gliner_config.json, and a Card from it.

The whole model is in one directory: gliner_config.json with the encoder's configuration in it,
model.safetensors with a prefix before the encoder's tensors, tokenizer.json, and for models with a
second encoder, for labels, a folder with its tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from libs.catalog.card import Card, Task
from libs.catalog.checkpoint.files import (
    MAX_COUNT,
    CheckpointConfig,
    need_config,
    read_config,
    tensor_files,
)
from libs.errors import ModelBroken
from libs.kinds.kind import CheckpointPlace, Kind

FILE: Final = "gliner_config.json"
LABELS_FOLDER: Final = "labels_tokenizer"
ENCODER_PREFIX: Final = "token_rep_layer.bert_layer.model."
LABELS_PREFIX: Final = "token_rep_layer.labels_encoder.model."
ADVICE: Final = (
    "By its id from a store, it is fetched together with its base model. For a directory, "
    "convert it once, where you trust it: "
    "`gliner.GLiNER.from_pretrained(ID).save_pretrained(DIR, safe_serialization=True)` of the "
    "gliner package (0.2.29 or later) "
    "writes everything that is needed"
)

SpanMode = Literal["markerV0", "markerV1", "token_level"]
Pooling = Literal["first", "last", "mean", "max"]
Adjacency = Literal["", "none", "dot", "mlp", "bilinear", "gcn"]
_SPAN_MODES: Final[tuple[SpanMode, ...]] = get_args(SpanMode)
_POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)
_ADJACENCIES: Final[tuple[Adjacency, ...]] = get_args(Adjacency)

# Options that are not served, each with the values that switch it off.
_OFF: dict[str, tuple[object, ...]] = {
    "fuse_layers": (None, False),
    "post_fusion_schema": (None, ""),
    "span_encoder_config": (None,),
    "precomputed_prompts_mode": (None, False),
    "labels_decoder": (None, ""),
    "triples_layer": (None,),
    "words_splitter_type": (None, "whitespace"),
}
# Tokens, for encoders with relative positions, which have no limit: more than 384 words and 256
# labels need.
_ANY_LENGTH: Final = 4096
# Tokens; tokenizers write a huge number for "no limit".
_NO_LIMIT: Final = 1_000_000
_MAX_WIDTH: Final = 256  # words; for each text, words x width spans are enumerated
MAX_WORDS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Gliner:
    """Settings that turn words and labels into scores.

    Attributes:
        hidden: Width of the states of words and labels.
        max_width: Words of the longest span; unused with `token_level`.
        max_words: Maximum words of a text.
        pooling: Pooling of a word's tokens.
        recurrent: LSTM layers over the words; 0: none.
        *_index: Ids of the markers; -1: not given.
        marks_*: A label is the state of its marker, else that of the token after it.
        labels: The configuration of the encoder for labels; None: one encoder reads labels and
            text.
        adjacency: Pairs of entities that are scored for relations; "": the model has no relations,
            "none": all pairs.
    """

    span_mode: SpanMode
    hidden: int
    max_width: int
    max_words: int
    pooling: Pooling
    recurrent: int
    ent_token: str
    sep_token: str
    ent_index: int
    marks_entities: bool
    labels: Mapping[str, object] | None
    adjacency: Adjacency
    rel_token: str
    rel_index: int
    marks_relations: bool


def gliner_card(place: CheckpointPlace) -> Card:
    directory = place.directory
    settings = read_gliner(directory)
    encoder = need_config(directory, FILE).part("encoder_config")
    configs = [FILE, "tokenizer_config.json", f"{LABELS_FOLDER}/tokenizer_config.json"]
    tasks: tuple[Task, ...] = ("entities", "relations") if settings.adjacency else ("entities",)
    return Card(
        model=place.model,
        revision=place.revision(configs),
        family=encoder.text("model_type"),
        kind="gliner",
        tasks=tasks,
        representations=(),
        max_tokens=longest_sequence(directory, encoder),
        encoder_file=FILE,
        encoder_keys=("encoder_config",),
        encoder_prefix=ENCODER_PREFIX,
    )


def read_gliner(directory: Path) -> Gliner:
    """Return the settings in gliner_config.json. Raises ModelBroken for values that are not served,
    and for missing keys and files.
    """
    config = need_config(directory, FILE)
    _need_files(directory, config)
    for key, values in _OFF.items():
        if config.values.get(key) not in values:
            raise config.broken(key, f"is {config.values[key]!r}, which is not served")
    relations, labels = config.text("relations_layer"), config.text("labels_encoder")
    mode = config.choice("span_mode", _SPAN_MODES, "markerV0")
    if mode == "token_level" and not relations and config.flag("represent_spans"):
        raise config.broken(
            "represent_spans", "is true, which is not served for the span_mode token_level"
        )
    if relations and labels:
        raise config.broken(
            "labels_encoder", "is set together with `relations_layer`, which is not served"
        )
    return Gliner(
        span_mode=mode,
        hidden=count(config, "hidden_size", 512),
        max_width=count(config, "max_width", 12, most=_MAX_WIDTH),
        max_words=count(config, "max_len", 384, most=MAX_WORDS),
        pooling=config.choice("subtoken_pooling", _POOLINGS, "first"),
        # Models with an encoder for labels have the LSTM's tensors, but the package never runs it.
        recurrent=0 if labels else config.number("num_rnn_layers", 1),
        ent_token=config.text("ent_token", "<<ENT>>"),
        sep_token=config.text("sep_token", "<<SEP>>"),
        ent_index=_index(config, "class_token_index"),
        marks_entities=config.flag("embed_ent_token", True),
        labels=_labels(directory, config) if labels else None,
        adjacency=config.choice("relations_layer", _ADJACENCIES),
        rel_token=config.text("rel_token", "<<REL>>"),
        rel_index=_index(config, "rel_token_index"),
        marks_relations=config.flag("embed_rel_token", True),
    )


def _need_files(directory: Path, config: CheckpointConfig) -> None:
    if not config.part("encoder_config").text("model_type"):
        raise config.broken(
            "encoder_config", f"is missing, or its model_type: it describes the encoder. {ADVICE}"
        )
    if config.text("model_type") == "gliner_streaming_span":
        raise config.broken("model_type", "is gliner_streaming_span, which is not served")
    need_files(directory, ADVICE)


def need_files(directory: Path, advice: str) -> None:
    """Raise ModelBroken, with the advice, without a tokenizer or weights."""
    if not (directory / "tokenizer.json").is_file():
        raise ModelBroken(f"tokenizer.json: missing from {directory}. {advice}")
    if not list(directory.glob("model*.safetensors")):
        tensor_files(directory, "")


def _labels(directory: Path, config: CheckpointConfig) -> Mapping[str, object]:
    labels = config.part("labels_encoder_config")
    if not labels.text("model_type"):
        raise config.broken(
            "labels_encoder_config",
            f"is missing, or its model_type: it describes the encoder for labels. {ADVICE}",
        )
    if not (directory / LABELS_FOLDER / "tokenizer.json").is_file():
        raise ModelBroken(f"{LABELS_FOLDER}/tokenizer.json: missing from {directory}. {ADVICE}")
    return labels.values


def count(config: CheckpointConfig, key: str, default: int, *, most: int = MAX_COUNT) -> int:
    """Return a whole number of 1 to `most`. Raises ModelBroken for others."""
    value = config.number(key, default, most=most)
    if value < 1:
        raise config.broken(key, "must be at least 1")
    return value


def _index(config: CheckpointConfig, key: str) -> int:
    """Return a token's id; -1 if the file does not give it."""
    return -1 if config.values.get(key) == -1 else config.number(key, -1)


def longest_sequence(directory: Path, encoder: CheckpointConfig) -> int:
    """Return the most tokens of a sequence: the tokenizer's limit, and at most the number of
    positions.
    """
    tokenizer = read_config(directory, "tokenizer_config.json") or CheckpointConfig(
        "tokenizer_config.json", {}
    )
    limits = [tokenizer.number("model_max_length", _NO_LIMIT, most=math.inf)]
    if encoder.flag("position_biased_input", True):
        limits.append(encoder.number("max_position_embeddings", _NO_LIMIT))
    found = min(limits)
    return found if found < _NO_LIMIT else _ANY_LENGTH


KIND: Final = Kind(
    "gliner",
    "gliner",
    lambda place: place.has(FILE),
    gliner_card,
    configs=(FILE,),
    folders=(LABELS_FOLDER,),
)
