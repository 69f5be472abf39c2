"""Models of the gliner2 package (GLiNER2, arXiv 2507.18546), which answer to schemas: their
config.json, and a Card from it.

There are two architectures: `span` scores all spans up to a width, `boundary` (GLiNER2.5) starts
and ends. The directory is in one of two layouts, which differ only in config.json. The package
writes the type "extractor" and the encoder's configuration to encoder_config/. transformers writes
the type "gliner2", the encoder's configuration to `encoder_config`, and the settings of boundaries
to `boundary_config`. Both have all tensors, with the same names, in model.safetensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal, get_args

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import CheckpointConfig, need_config
from libs.errors import ModelBroken
from libs.kinds.gliner.card import MAX_WORDS, count, longest_sequence, need_files
from libs.kinds.kind import CheckpointPlace, Kind

ENCODER_FILE: Final = "encoder_config/config.json"
_ENCODER_KEY: Final = "encoder_config"
ENCODER_PREFIX: Final = "encoder."
ADVICE: Final = (
    "Write it with the gliner2 package (2.1.0): "
    "`gliner2.GLiNER2.from_pretrained(ID).save_pretrained(DIR)`"
)

Counting = Literal["count_lstm", "count_lstm_v2", "count_lstm_moe"]

_PACKAGE: Final = "extractor"
_TRANSFORMERS: Final = "gliner2"
_MAX_WIDTH: Final = 64  # words; for each text, words x width spans are scored
_MAX_SIZE: Final = 4096  # of boundaries' states and of pairs'; the tensors must have it, too
_MAX_LAYERS: Final = 16
_MAX_ENDS: Final = 128  # starts and ends of a text, all pairs of which are scored once
_MAX_PAIRS: Final = 1024  # of a text, each of which is scored for every label
# the config_version from which heads of relations and records are there unless config.json denies
# it
_STRUCTURED_SINCE: Final = 3

# The values that all published GLiNER2.5 checkpoints share, and the package's defaults: anything
# else is refused.
_FIXED: dict[str, tuple[object, object]] = {
    "candidate_pool": ("shared", "per_query"),
    "candidate_attention_layers": (0, 2),
    "query_attention_layers": (0, 1),
    "enable_span_content": (True, False),
    "content_soft_max_pool": (False, False),
    "use_inside_evidence": (True, True),
    "enable_abstention": (True, True),
    "adaptive_threshold": (False, False),
    "overlap_policy": ("flat", "flat"),
    "pair_temperature": (1, 1),
    "relation_temperature": (1, 1),
    "record_temperature": (1, 1),
    "relation_argument_proposal_threshold": (0, 0),
}


@dataclass(frozen=True, slots=True)
class Gliner2:
    """The settings of the architecture `span`.

    Attributes:
        max_width: Words of the longest span.
        counting: The layer that makes a query for each instance of a label.
        class_temperature: Divides the logits of classes.
    """

    max_width: int
    counting: Counting
    class_temperature: float


@dataclass(frozen=True, slots=True)
class RelationSettings:
    """Settings of relations: the best `heads` and `tails` make pairs, and the best `pairs` of these
    are scored.

    Attributes:
        directional: A relation is the concatenation of the states of head and tail, else their
            mean.
        content: The words within are compared.
    """

    heads: int
    tails: int
    pairs: int
    directional: bool
    content: bool


@dataclass(frozen=True, slots=True)
class Boundary:
    """GLiNER2.5's heads.

    Attributes:
        size, pair_size, content_size: Widths of the states of a boundary, a pair, and the words
            within it.
        attention_layers: Layers over boundaries, which have `heads` and see `window` boundaries on
            each side (0: all); `layers` without attention follow.
        ends: The best `ends` starts and `ends` ends make pairs; the best `pairs` of these are
            scored, among them the best `reserved` of each label.
        abstention: A label with a probability of absence above this has no spans.
        class_temperature: Divides the logits of classes.
    """

    size: int
    pair_size: int
    content_size: int
    attention_layers: int
    heads: int
    window: int
    layers: int
    ends: int
    pairs: int
    reserved: int
    record_size: int
    relations: RelationSettings
    abstention: float
    class_temperature: float


def gliner2_card(place: CheckpointPlace) -> Card:
    directory = place.directory
    read_gliner2(directory)
    file, keys = _encoder_place(directory)
    encoder = need_config(directory, file)
    for key in keys:
        encoder = encoder.part(key)
    return Card(
        model=place.model,
        revision=place.revision(["config.json", ENCODER_FILE, "tokenizer_config.json"]),
        family=encoder.text("model_type"),
        kind="gliner2",
        tasks=("entities", "structure"),
        representations=(),
        max_tokens=longest_sequence(directory, encoder),
        encoder_file=file,
        encoder_keys=keys,
        encoder_prefix=ENCODER_PREFIX,
    )


def _encoder_place(directory: Path) -> tuple[str, tuple[str, ...]]:
    """Return the file of the encoder's configuration, and the keys that lead to it in the file.

    transformers reads its own file even if there is the package's, too.
    """
    config = need_config(directory, "config.json")
    if _is_transformers(config) and config.part(_ENCODER_KEY).text("model_type"):
        return "config.json", (_ENCODER_KEY,)
    return ENCODER_FILE, ()


def _is_transformers(config: CheckpointConfig) -> bool:
    return config.text("model_type") == _TRANSFORMERS


def read_gliner2(directory: Path) -> Gliner2 | Boundary:
    """Return the settings in config.json. Raises ModelBroken for values that are not served, and
    for missing keys and files.
    """
    config = need_config(directory, "config.json")
    architecture = config.text("architecture", "span") or "span"
    if architecture not in ("span", "boundary"):
        raise config.broken(
            "architecture", f"is {architecture!r}, which is not served; 'span' and 'boundary' are"
        )
    _need_files(directory)
    pooling = config.text("token_pooling", "first")
    if pooling in ("mean", "max"):  # the package takes any other word for "first"
        raise config.broken("token_pooling", f"is {pooling!r}, which is not served; 'first' is")
    if architecture == "boundary":
        return _boundary(config)
    head = config.part("span_head")
    spans = head if "max_width" in head.values else config
    # The package has a temperature only for boundaries.
    temperature = _temperature(config) if _is_transformers(config) else 1.0
    return Gliner2(
        max_width=count(spans, "max_width", 8, most=_MAX_WIDTH),
        counting=_counting(config),
        class_temperature=temperature,
    )


def _boundary(config: CheckpointConfig) -> Boundary:
    if (version := config.number("architecture_version", 1)) != 1:
        raise config.broken("architecture_version", f"is {version}, which is not served; 1 is")
    # transformers writes both keys, and reads the first.
    native = _is_transformers(config) and config.part("boundary_config").values
    head = config.part("boundary_config" if native else "boundary_head")
    structured = config.number("config_version") >= _STRUCTURED_SINCE
    heads_of = dict.fromkeys(("enable_records", "enable_relations"), (True, structured))
    for key, (served, default) in (_FIXED | heads_of).items():
        value = head.values.get(key)
        value = default if value is None else value
        if value != served:
            raise head.broken(key, f"is {value!r}, which is not served; {served!r} is")
    size, heads = (
        count(head, "boundary_dim", 128, most=_MAX_SIZE),
        count(head, "boundary_attention_heads", 4, most=_MAX_SIZE),
    )
    attention = head.number("boundary_attention_layers", 0, most=_MAX_LAYERS)
    if attention and size % heads:
        raise head.broken(
            "boundary_attention_heads", f"is {heads}, which does not divide `boundary_dim`, {size}"
        )
    pairs = count(head, "pool_size", 384, most=_MAX_PAIRS)
    return Boundary(
        size=size,
        pair_size=count(head, "pair_dim", 128, most=_MAX_SIZE),
        content_size=count(head, "content_dim", 64, most=_MAX_SIZE),
        attention_layers=attention,
        heads=heads,
        window=head.number("boundary_attention_window", 0, most=MAX_WORDS),
        layers=head.number("boundary_refinement_layers", 1, most=_MAX_LAYERS),
        ends=count(head, "pool_boundary_top_k", 64, most=_MAX_ENDS),
        pairs=pairs,
        reserved=head.number("min_pool_per_query", 8, most=pairs),
        record_size=count(head, "record_dim", 128, most=_MAX_SIZE),
        relations=_relations(head),
        abstention=_real(head, "abstention_threshold", 0.5, most=1.0),
        class_temperature=_temperature(head),
    )


def _relations(head: CheckpointConfig) -> RelationSettings:
    return RelationSettings(
        heads=count(head, "relation_heads_per_type", 32, most=_MAX_ENDS),
        tails=count(head, "relation_tails_per_type", 32, most=_MAX_ENDS),
        pairs=count(head, "relation_pair_cap", 128, most=_MAX_PAIRS),
        directional=head.flag("directional_relation_states"),
        content=head.flag("relation_biaffine_content"),
    )


def _temperature(settings: CheckpointConfig) -> float:
    key = "classification_temperature"
    value = _real(settings, key, 1.0)
    if not value:
        raise settings.broken(key, "must be above 0")
    return value


def _real(head: CheckpointConfig, key: str, default: float, *, most: float = math.inf) -> float:
    """Return a finite number from 0 to `most`."""
    value = head.values.get(key)
    if value is None:
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not 0 <= value <= most
    ):
        raise head.broken(key, f"must be a number from 0 to {most}, not {value!r}")
    return float(value)


def _need_files(directory: Path) -> None:
    file, keys = _encoder_place(directory)
    if not keys and not need_config(directory, file).text("model_type"):
        raise ModelBroken(
            f"{file}: `model_type` is missing: it names the encoder's family. {ADVICE}"
        )
    need_files(directory, ADVICE)


def _counting(config: CheckpointConfig) -> Counting:
    name = config.text("counting_layer", "count_lstm") or "count_lstm"
    for counting in get_args(Counting):
        if name == counting:
            found: Counting = counting
            return found
    raise config.broken(
        "counting_layer", f"is {name!r}; served are {', '.join(get_args(Counting))}"
    )


KIND: Final = Kind(
    "gliner2",
    "gliner2",
    lambda place: place.model_type in (_PACKAGE, _TRANSFORMERS),
    gliner2_card,
    folders=(str(PurePosixPath(ENCODER_FILE).parent),),
)
