"""Models of the gliner2 package (GLiNER2, arXiv 2507.18546), which answer to schemas: their config.json, and a Card from it.

The directory is as the package saves it: config.json of the type "extractor", the encoder's configuration in encoder_config/, all
tensors in model.safetensors, and the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import Config, digest, need_config, read_config, tensor_files
from libs.catalog.kinds.gliner import count, longest_sequence
from libs.errors import ModelBroken

ENCODER_FILE: Final = "encoder_config/config.json"
ENCODER_PREFIX: Final = "encoder."
ADVICE: Final = "Write it with the gliner2 package (2.1.0): `gliner2.GLiNER2.from_pretrained(ID).save_pretrained(DIR)`"

Counting = Literal["count_lstm", "count_lstm_v2", "count_lstm_moe"]

_MODEL_TYPE = "extractor"
_MOST_WIDTH: Final = 64  # words; for each text, words x width spans are scored


@dataclass(frozen=True, slots=True)
class Gliner2:
    """`max_width`: words of the longest span. `counting`: the layer that makes a query for each instance of a label."""

    max_width: int
    counting: Counting


def is_gliner2(directory: Path) -> bool:
    """Whether config.json is the gliner2 package's."""
    config = read_config(directory, "config.json")
    return config is not None and config.values.get("model_type") == _MODEL_TYPE


def gliner2_card(directory: Path, model: str) -> Card:
    """The card of the checkpoint in `directory`. Raises ModelBroken naming the file and the key at fault."""
    read_gliner2(directory)
    encoder = need_config(directory, ENCODER_FILE)
    named = model.partition("@")[2] or directory.name.partition("@")[2]
    return Card(
        model=model,
        revision=named or digest(directory, ["config.json", ENCODER_FILE, "tokenizer_config.json"], tensor_files(directory, "")),
        family=encoder.text("model_type"),
        kind="gliner2",
        tasks=("entities", "structure"),
        representations=(),
        max_tokens=longest_sequence(directory, encoder),
        encoder_file=ENCODER_FILE,
        encoder_prefix=ENCODER_PREFIX,
    )


def read_gliner2(directory: Path) -> Gliner2:
    """The settings in config.json. Raises ModelBroken for values that are not served, and for missing keys and files."""
    config = need_config(directory, "config.json")
    architecture = config.text("architecture", "span") or "span"
    if architecture != "span":
        raise config.broken("architecture", f"is {architecture!r}, which is not served (GLiNER2.5 has 'boundary'); 'span' is")
    _need_files(directory)
    pooling = config.text("token_pooling", "first")
    if pooling in ("mean", "max"):  # the package takes any other word for "first"
        raise config.broken("token_pooling", f"is {pooling!r}, which is not served; 'first' is")
    head = config.part("span_head")
    spans = head if "max_width" in head.values else config
    return Gliner2(max_width=count(spans, "max_width", 8, most=_MOST_WIDTH), counting=_counting(config))


def _need_files(directory: Path) -> None:
    if not need_config(directory, ENCODER_FILE).text("model_type"):
        raise ModelBroken(f"{ENCODER_FILE}: `model_type` is missing: it names the encoder's family. {ADVICE}")
    if not (directory / "tokenizer.json").is_file():
        raise ModelBroken(f"tokenizer.json: missing from {directory}. {ADVICE}")
    if not list(directory.glob("model*.safetensors")):
        raise ModelBroken(
            f"model.safetensors: missing from {directory}; pickles such as pytorch_model.bin are never opened. {ADVICE}"
        )


def _counting(config: Config) -> Counting:
    name = config.text("counting_layer", "count_lstm") or "count_lstm"
    for counting in get_args(Counting):
        if name == counting:
            found: Counting = counting
            return found
    raise config.broken("counting_layer", f"is {name!r}; served are {', '.join(get_args(Counting))}")
