"""Zero-shot classifiers of the gliclass package (GLiClass, arXiv 2508.07662): their config.json,
and a Card from it.

The encoder reads the labels, each after a marker token, and the text as one sequence. config.json
holds the encoder's configuration and how the states of markers and text become scores; the
encoder's tensors have a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from libs.catalog.card import Card, Problem
from libs.catalog.checkpoint.files import (
    CheckpointConfig,
    need_config,
    need_tokenizer,
)
from libs.kinds.kind import CheckpointPlace, Kind

LABEL_MARKER: Final = "<<LABEL>>"
TEXT_MARKER: Final = "<<SEP>>"
ENCODER_PREFIX: Final = "model.encoder_model."

Scorer = Literal["simple", "weighted-dot", "mlp", "hopfield", "cross-attn"]
Pooling = Literal["first", "last", "avg", "sum", "max", "rms", "abs_max", "abs_avg", "pass"]
_SCORERS: Final[tuple[Scorer, ...]] = get_args(Scorer)
_POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)

_MODEL_TYPE = "GLiClass"
_TOKENS = 1024  # the package's pipeline truncates there, whatever the tokenizer's limit
_PROBLEMS: dict[str, Problem] = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
}

# Options that are not served, each with the value that switches it off.
_OFF: dict[str, object] = {
    "architecture_type": "uni-encoder",
    "use_lstm": False,
    "squeeze_layers": False,
    "encoder_layer_id": -1,
    "use_calibrator": False,
    "multimodal": False,
}


@dataclass(frozen=True, slots=True)
class Gliclass:
    """Settings that turn the states of labels and text into scores.

    Attributes:
        label_index, text_index: Ids of the markers, before each label and between labels and text.
        prompt_first: Labels precede the text.
        pooling: Pooling of the text's states; "pass": the scorer reads them all.
        text_only: Pooling covers only the states from the text's marker on.
        marks: A label's tokens begin with its marker, else after it.
        averages: A label is the mean of its tokens' states, else the first of them.
        hidden: Width of the projectors' inner layer.
        segments: Labels and text have different token types.
        normalizes: States are scaled to length 1, and scores by a learnt factor.
        heads: Heads of the scorer's attention; 0: it has none.
    """

    label_index: int
    text_index: int
    prompt_first: bool
    pooling: Pooling
    text_only: bool
    averages: bool
    marks: bool
    scorer: Scorer
    hidden: int
    segments: bool
    normalizes: bool
    heads: int = 0


def gliclass_card(place: CheckpointPlace) -> Card:
    directory = place.directory
    read_gliclass(directory)
    config = need_config(directory, "config.json")
    need_tokenizer(directory)
    return Card(
        model=place.model,
        revision=place.revision(["config.json", "tokenizer_config.json"]),
        family=config.part("encoder_config").text("model_type"),
        kind="gliclass",
        tasks=("classify",),
        representations=(),
        max_tokens=_max_tokens(config.part("encoder_config")),
        encoder_keys=("encoder_config",),
        encoder_prefix=ENCODER_PREFIX,
        problem=_problem(config),
    )


def read_gliclass(directory: Path) -> Gliclass:
    """Return the settings in config.json. Raises ModelBroken for keys that are missing, and for
    values that are not served.
    """
    config = need_config(directory, "config.json")
    encoder = config.part("encoder_config")
    if not encoder.text("model_type"):
        raise config.broken(
            "encoder_config", "is missing, or its model_type: it describes the encoder"
        )
    for key, value in _OFF.items():
        if config.values.get(key, value) not in (None, value):
            raise config.broken(
                key, f"is {config.values[key]!r}, which is not served; {value!r} is"
            )
    pooling = config.choice("pooling_strategy", _POOLINGS, "first")
    text_only = config.flag("extract_text_features")
    if pooling == "last" and text_only:
        raise config.broken(
            "pooling_strategy",
            "is 'last', which with `extract_text_features` selects a token outside the text",
        )
    scorer = config.choice("scorer_type", _SCORERS, "simple")
    if scorer == "cross-attn" and pooling != "pass":
        raise config.broken(
            "scorer_type",
            f"is 'cross-attn', which reads all states of a text: `pooling_strategy` is {pooling!r}",
        )
    if pooling == "pass" and scorer != "cross-attn":
        raise config.broken(
            "pooling_strategy",
            f"is 'pass', which is for the scorer cross-attn: `scorer_type` is {scorer!r}",
        )
    vocabulary = config.number("vocab_size") or encoder.number("vocab_size")
    return Gliclass(
        label_index=_index(config, "class_token_index", vocabulary),
        text_index=_index(config, "text_token_index", vocabulary + 1),
        prompt_first=config.flag("prompt_first"),
        pooling=pooling,
        text_only=text_only,
        averages=config.choice("class_token_pooling", ("first", "average"), "first") == "average",
        marks=config.flag("embed_class_token", True),
        scorer=scorer,
        hidden=config.number("hidden_size") or encoder.number("hidden_size"),
        segments=config.flag("use_segment_embeddings"),
        normalizes=config.flag("normalize_features"),
        heads=_heads(config, encoder) if scorer == "cross-attn" else 0,
    )


def _max_tokens(encoder: CheckpointConfig) -> int:
    """Return the package's limit, and at most the number of positions; DeBERTa's relative positions
    are unlimited.
    """
    unlimited = encoder.text("model_type") == "deberta-v2" and not encoder.flag(
        "position_biased_input", True
    )
    positions = 0 if unlimited else encoder.number("max_position_embeddings")
    return min(_TOKENS, positions) if positions else _TOKENS


def _problem(config: CheckpointConfig) -> Problem:
    name = config.text("problem_type", "single_label_classification")
    if name not in _PROBLEMS:
        raise config.broken(
            "problem_type", f"is {name!r}, which is not one of {', '.join(_PROBLEMS)}"
        )
    return _PROBLEMS[name]


def _heads(config: CheckpointConfig, encoder: CheckpointConfig) -> int:
    """Return the number of heads of the scorer's attention over the states of the encoder."""
    heads, size = config.number("scorer_num_heads", 16), encoder.number("hidden_size")
    if heads < 1 or size % heads:
        raise config.broken(
            "scorer_num_heads", f"is {heads}, which does not divide the hidden size {size}"
        )
    return heads


def _index(config: CheckpointConfig, key: str, default: int) -> int:
    """Return a token's id; -1 in the file means `default`, a token added after the encoder's
    vocabulary.
    """
    return default if config.values.get(key) == -1 else config.number(key, default)


KIND: Final = Kind(
    "gliclass", "gliclass", lambda place: place.model_type == _MODEL_TYPE, gliclass_card
)
