"""Models of the laya package, which choose among options: their rl_agent_config.json, and a Card
from it.

The directory is as the package saves it: rl_agent_config.json, the encoder's configuration in
encoder/, all tensors in model.safetensors, and the tokenizer in tokenizer/. Read of laya 0.4.15.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import CheckpointConfig, need_config
from libs.errors import ModelBroken
from libs.kinds.kind import CheckpointPlace, Kind

FILE: Final = "rl_agent_config.json"
ENCODER_FOLDER: Final = "encoder"
TOKENIZER_FOLDER: Final = "tokenizer"
ENCODER_PREFIX: Final = "encoder."

_ENCODER_FILE: Final = f"{ENCODER_FOLDER}/config.json"
_MAX_LAYERS: Final = 64
_MIN_TEMPERATURE: Final = 0.5  # the package's bounds, whatever the file says
_MAX_TEMPERATURE: Final = 5.0
_MIN_TOKENS: Final = 32
_BUCKETS: Final = ((2, "2"), (5, "3-5"), (10, "6-10"))
"""The maximum number of options of a question for each name of a temperature."""


@dataclass(frozen=True, slots=True)
class Laya:
    """Settings of laya's head.

    Attributes:
        layers: Layers of the head.
        head_tokens: Approximate maximum tokens of question and options in a sequence.
        temperature: Of questions without an entry for their number of options in `by_options`,
            which has names such as "choice:3-5".
    """

    layers: int
    head_tokens: int
    temperature: float
    by_options: Mapping[str, float]

    def temperature_for(self, options: int) -> float:
        """Return the divisor of the logits."""
        name = next((name for most, name in _BUCKETS if options <= most), "11+")
        return self.by_options.get(f"choice:{name}", self.temperature)


def laya_card(place: CheckpointPlace) -> Card:
    directory = place.directory
    read_laya(directory)
    encoder = need_config(directory, _ENCODER_FILE)
    if not encoder.text("model_type"):
        raise encoder.broken("model_type", "is missing: it names the family")
    if not (directory / TOKENIZER_FOLDER / "tokenizer.json").is_file():
        raise ModelBroken(f"{TOKENIZER_FOLDER}/tokenizer.json: missing from {directory}")
    files = [FILE, _ENCODER_FILE, f"{TOKENIZER_FOLDER}/tokenizer_config.json"]
    return Card(
        model=place.model,
        revision=place.revision(files),
        family=encoder.text("model_type"),
        kind="laya",
        tasks=("classify",),
        representations=(),
        max_tokens=_max_tokens(need_config(directory, FILE), encoder),
        encoder_file=_ENCODER_FILE,
        encoder_prefix=ENCODER_PREFIX,
    )


def read_laya(directory: Path) -> Laya:
    """Return the settings in rl_agent_config.json. Raises ModelBroken for values that are not
    served.
    """
    config = need_config(directory, FILE)
    if config.text("option_layout", "sequential") != "sequential":
        raise config.broken(
            "option_layout",
            f"is {config.text('option_layout')!r}, which is not served; 'sequential' is",
        )
    layers = config.number("head_layers", 2)
    if layers > _MAX_LAYERS:
        raise config.broken("head_layers", f"is {layers}; at most {_MAX_LAYERS} are served")
    own = config.part("temperature_by_options").values
    return Laya(
        layers=layers,
        head_tokens=config.number("head_max_len", 192),
        temperature=_choices_temperature(config),
        by_options={name: _bounded(value) for name, value in own.items()},
    )


def _choices_temperature(config: CheckpointConfig) -> float:
    """Return the first of three: those of choices, of scores and of truths."""
    values = config.values.get("temperature", [1.0, 1.0, 1.0])
    if not isinstance(values, list) or len(values) != 3:
        raise config.broken("temperature", f"must be a list of three numbers, not {values!r}")
    return _bounded(values[0])


def _bounded(value: object) -> float:
    """Return the value as the package does: anything but a number counts as 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 1.0
    return min(_MAX_TEMPERATURE, max(_MIN_TEMPERATURE, float(value)))


def _max_tokens(config: CheckpointConfig, encoder: CheckpointConfig) -> int:
    limit, positions = config.number("max_len", 512), encoder.number("max_position_embeddings")
    if limit < _MIN_TOKENS:
        raise config.broken(
            "max_len", f"is {limit}; at least {_MIN_TOKENS} are needed for a question and a text"
        )
    return min(limit, positions) if positions else limit


KIND: Final = Kind(
    "laya",
    "laya",
    lambda place: place.has(FILE),
    laya_card,
    configs=(FILE,),
    folders=(ENCODER_FOLDER, TOKENIZER_FOLDER),
)
