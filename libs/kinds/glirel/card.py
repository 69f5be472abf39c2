"""Zero-shot relation models of the glirel package (GLiREL, arXiv 2501.03172): glirel_config.json,
and a Card from it.

The package's own checkpoints are a torch checkpoint and a configuration that only names the
encoder: the store converts the one and completes the other (`libs/conversion/base_model.py`).
Served is a directory with the encoder's configuration in glirel_config.json, and tokenizer.json
(docs/api.md has the steps for directories outside the store).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import CheckpointConfig, need_config
from libs.kinds.gliner.card import (
    ENCODER_PREFIX,
    MAX_WORDS,
    Pooling,
    count,
    longest_sequence,
    need_files,
)
from libs.kinds.kind import CheckpointPlace, Kind

FILE: Final = "glirel_config.json"
LABEL_MARKER: Final = "[REL]"
TEXT_MARKER: Final = "[SEP]"
ADVICE: Final = (
    "By its id from a store, it is fetched together with its base model. For a directory, put "
    "into it the weights; tokenizer.json, "
    "the encoder's tokenizer with the tokens that the glirel package adds; and "
    "glirel_config.json with one more key, `encoder_config`, the encoder's config.json with that "
    "tokenizer's `vocab_size`. A few "
    "lines with the glirel package (1.2.1) do it: docs/api.md, Converting GLiREL"
)

LabelStates = Literal["ent_token", "label", "both"]
Scorer = Literal["dot", "concat_proj"]

_LABEL_STATES: Final[tuple[LabelStates, ...]] = get_args(LabelStates)
_SCORERS: Final[tuple[Scorer, ...]] = get_args(Scorer)
_POOLINGS: Final[tuple[Pooling, ...]] = ("first", "last")  # the package's "mean" computes a sum
# Options that are not served, each with the values that switch it off.
_OFF: dict[str, tuple[object, ...]] = {
    "rel_mode": (None, "marker"),
    "span_marker_mode": (None, "markerv1"),
    "refine_relation": (None, False),
    "refine_prompt": (None, False),
    "add_entity_markers": (None, False),
}


@dataclass(frozen=True, slots=True)
class Glirel:
    """Settings that turn words, entities and labels into scores.

    Attributes:
        hidden: Width of the states of words and labels.
        max_words: Maximum words of a text.
        pooling: Pooling of a word's tokens.
        label_states: A label is its marker's state, that of its first token, or the mean of both.
        farthest: The largest distance in words from a head back to a preceding tail; None:
            unlimited.
    """

    hidden: int
    max_words: int
    pooling: Pooling
    label_states: LabelStates
    scorer: Scorer
    farthest: int | None


def glirel_card(place: CheckpointPlace) -> Card:
    directory = place.directory
    read_glirel(directory)
    encoder = need_config(directory, FILE).part("encoder_config")
    return Card(
        model=place.model,
        revision=place.revision([FILE, "tokenizer_config.json"]),
        family=encoder.text("model_type"),
        kind="glirel",
        tasks=("relations",),
        representations=(),
        max_tokens=longest_sequence(directory, encoder),
        encoder_file=FILE,
        encoder_keys=("encoder_config",),
        encoder_prefix=ENCODER_PREFIX,
        given_entities=True,
    )


def read_glirel(directory: Path) -> Glirel:
    """Return the settings in glirel_config.json. Raises ModelBroken for values that are not served,
    and for missing keys and files.
    """
    config = need_config(directory, FILE)
    _need_files(directory, config)
    for key, values in _OFF.items():
        if config.values.get(key) not in values:
            raise config.broken(key, f"is {config.values[key]!r}, which is not served")
    pooling = config.choice("subtoken_pooling", _POOLINGS)
    label_states = config.choice("label_embed_strategy", _LABEL_STATES)
    if pooling != "first" and label_states != "ent_token":
        raise config.broken(
            "subtoken_pooling",
            f"is {pooling!r}, which is only served with the label_embed_strategy ent_token",
        )
    farthest = config.values.get("max_entity_pair_distance")
    return Glirel(
        hidden=count(config, "hidden_size", 512),
        max_words=count(config, "max_len", 384, most=MAX_WORDS),
        pooling=pooling,
        label_states=label_states,
        scorer=config.choice("scorer", _SCORERS),
        farthest=None if farthest is None else config.number("max_entity_pair_distance"),
    )


def _need_files(directory: Path, config: CheckpointConfig) -> None:
    if not config.part("encoder_config").text("model_type"):
        raise config.broken(
            "encoder_config", f"is missing, or its model_type: it describes the encoder. {ADVICE}"
        )
    need_files(directory, ADVICE)


KIND: Final = Kind("glirel", "glirel", lambda place: place.has(FILE), glirel_card, configs=(FILE,))
