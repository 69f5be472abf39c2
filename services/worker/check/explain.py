"""Explains how Shoal reads a checkpoint directory: the first half of `shoal models check`, without
torch.

Not on the request path. `inspect` reads the same files as a worker and reports which key of which
file determined each fact. `selftest.py` is the other half; `command.py` shows both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from math import prod
from pathlib import Path

from libs.catalog.card import Card, LateInteraction
from libs.catalog.checkpoint.files import tensor_entries
from libs.catalog.checkpoint.trace import Read, recorded
from libs.catalog.detect import read_card
from libs.catalog.overrides import Overrides
from libs.conversion import read_record
from libs.errors import ModelBroken, ShoalError


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact about the model and its source: `file key = value`, or the catalog's `file:line`."""

    what: str
    value: str
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileSummary:
    """A safetensors file: its bytes and count of numbers by data type in the format's notation
    (F32, BF16, I64 ...).
    """

    file: str
    tensors: int
    bytes: dict[str, int]
    numbers: dict[str, int]


@dataclass(frozen=True, slots=True)
class Test:
    """One check of the self-test and its measurement."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The report on one model."""

    model: str
    directory: Path | None
    """None if the model was not found."""
    card: Card | None = None
    facts: tuple[Fact, ...] = ()
    files: tuple[FileSummary, ...] = ()
    ignored: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    """Torch checkpoints from which the files were converted."""
    refused: str = ""
    """Why it cannot be served."""
    tests: tuple[Test, ...] = ()
    skipped: str = ""
    """Why it is untested."""

    @property
    def good(self) -> bool:
        return not self.refused and all(test.passed for test in self.tests)

    @property
    def parameters(self) -> int:
        """Number of floating-point numbers in all files."""
        return sum(
            count for file in self.files for name, count in file.numbers.items() if "F" in name
        )


@dataclass(frozen=True, slots=True)
class _FactRule:
    """The rule for reporting a fact."""

    what: str
    value: Callable[[Card], object]
    """Returns the fact's value on the card."""
    keys: tuple[str, ...] = ()
    """Patterns of `file:key`, or `file:key=value`, that determine the fact."""
    overrides: tuple[str, ...] = ()
    """Names of catalog overrides of the fact."""
    reason: str = ""
    """The source if neither applies."""


_FACT_RULES = (
    _FactRule("family", lambda card: card.family, ("*config.json*:model_type",)),
    _FactRule(
        "kind",
        lambda card: card.kind,
        (
            "config_sentence_transformers.json:model_type",
            "modules.json:type",
            "*config.json:architectures",
            "gliner_config.json:span_mode",
            "gliner_config.json:relations_layer",
            "gliner_config.json:labels_encoder",
            "config.json:counting_layer",
            "glirel_config.json:scorer",
            "glirel_config.json:label_embed_strategy",
        ),
        ("kind",),
    ),
    _FactRule("tasks", lambda card: ", ".join(card.tasks), reason="follow from the kind"),
    _FactRule(
        "representations",
        lambda card: ", ".join(card.representations),
        reason="follow from the kind",
    ),
    _FactRule(
        "max tokens",
        lambda card: card.max_tokens,
        (
            "*sentence_bert_config.json:max_seq_length",
            "*tokenizer_config.json:model_max_length",
            "*config.json*:max_position_embeddings",
            "*config.json*:max_trained_positions",
            "*config.json*:max_len",
        ),
        ("max_tokens",),
    ),
    _FactRule(
        "dimensions",
        lambda card: card.dimensions,
        ("*config.json*:hidden_size", "*config.json*:dim", "*Dense/*:out_features"),
    ),
    _FactRule(
        "multi-vector dimensions",
        lambda card: card.multi_vector_dimensions,
        ("*config.json*:hidden_size", "*config.json*:dim", "*Dense/*:out_features"),
    ),
    _FactRule(
        "pooling", lambda card: " + ".join(card.pooling), ("*Pooling/config.json:*",), ("pooling",)
    ),
    _FactRule(
        "dense layers",
        lambda card: "; ".join(
            f"{one.in_features} to {one.out_features}, {one.activation}" for one in card.modules
        ),
        ("*Dense*/config.json:*",),
    ),
    _FactRule(
        "normalised",
        lambda card: "yes" if card.normalize else "",
        ("modules.json:type=*Normalize*",),
        ("normalize",),
    ),
    _FactRule(
        "lowercase",
        lambda card: "yes" if card.lowercase else "",
        ("*:do_lower_case",),
        ("lowercase",),
    ),
    _FactRule(
        "prompts",
        lambda card: "\n".join(f"{name}: {text!r}" for name, text in card.prompts.items()),
        (
            "config_sentence_transformers.json:prompts",
            "*:query_prefix",
            "*:document_prefix",
            "*:*_token_id",
        ),
        ("prompts",),
    ),
    _FactRule(
        "tasks",
        lambda card: ", ".join(card.own_adapters),
        ("config.json:lora_adaptations", "config.json:task_names"),
    ),
    _FactRule(
        "default prompt",
        lambda card: card.default_prompt,
        ("*:default_prompt_name",),
        ("default_prompt",),
    ),
    _FactRule(
        "inputs",
        lambda card: "" if card.inputs == ("text",) else ", ".join(card.inputs),
        ("*config.json*:model_type",),
    ),
    _FactRule(
        "labels",
        lambda card: ", ".join(card.labels),
        ("*config.json:id2label", "*config.json:num_labels"),
    ),
    _FactRule(
        "score",
        lambda card: (
            f"{card.scoring} (logit {card.positive}, {card.score_activation})"
            if card.classes
            else card.scoring
        ),
        (
            "*:activation_fn",
            "*:sbert_ce_default_activation_function",
            "*:similarity_fn_name",
            "*config.json:problem_type",
        ),
        ("score_activation",),
    ),
    _FactRule(
        "late interaction",
        lambda card: "" if card.late is None else _lengths(card.late),
        (
            "*:query_length",
            "*:document_length",
            "*:query_maxlen",
            "*:doc_maxlen",
            "*:*query_expansion*",
            "*:attend_to_*",
            "*:skiplist*",
        ),
    ),
    _FactRule(
        "answers",
        lambda card: ", ".join(map(str, card.answers)),
        ("*:true_token_id", "*:false_token_id"),
        ("answers",),
    ),
    _FactRule(
        "chat template",
        lambda card: _short(card.template) if card.template else "",
        ("*:chat_template",),
        ("template",),
    ),
    _FactRule(
        "left out",
        lambda card: "\n".join(card.notes),
        reason="content of the files that is not served unchanged",
    ),
    _FactRule(
        "number format",
        lambda card: "" if card.dtype == "auto" else card.dtype,
        overrides=("dtype",),
    ),
    _FactRule("pools", lambda card: ", ".join(card.pools), overrides=("pools",)),
    _FactRule("pinned", lambda card: "yes" if card.pinned else "", overrides=("pinned",)),
    _FactRule(
        "set aside",
        lambda card: f"{card.memory_bytes:,} bytes" if card.memory_bytes else "",
        overrides=("memory_bytes",),
    ),
    _FactRule(
        "revision",
        lambda card: card.revision,
        reason="of the id or the folder, else a digest of the files",
    ),
)


def _lengths(late: LateInteraction) -> str:
    query = late.expansion.length if late.expansion is not None else late.query_tokens
    expanded = ", expanded" if late.expansion else ""
    return (
        f"query {query or 'any'} tokens{expanded}; document {late.document_tokens or 'any'} tokens"
    )


def inspect(
    directory: Path, model: str, overrides: Overrides | None, base: Path | None = None
) -> ModelReport:
    """Report how a worker would read a directory and its `base`. The report includes refusals."""
    card, refused = None, ""
    files: tuple[FileSummary, ...] = ()
    with recorded() as reads:
        try:
            card = read_card(directory, model, overrides, base)
        except ShoalError as error:
            refused = error.message
    try:
        files = tuple(
            _tensors(directory, path) for path in sorted(directory.glob("**/*.safetensors"))
        )
    except ModelBroken as error:
        refused = refused or error.message
    facts = tuple(_facts(card, reads, overrides)) if card is not None else tuple(_seen(reads))
    return ModelReport(
        model,
        directory,
        card,
        facts,
        files,
        tuple(_ignored(directory)),
        tuple(_converted(directory)),
        refused,
    )


def _facts(card: Card, reads: Sequence[Read], overrides: Overrides | None) -> Iterator[Fact]:
    for rule in _FACT_RULES:
        value = rule.value(card)
        if value:
            why = _overriding(rule, overrides) + _determining(reads, rule.keys)
            yield Fact(rule.what, str(value), tuple(why) or (rule.reason,))


def _seen(reads: Sequence[Read]) -> Iterator[Fact]:
    """Yield the facts of a refused model: family and kind as far as they were read."""
    for rule in _FACT_RULES[:2]:
        if why := _determining(reads, rule.keys):
            yield Fact(rule.what, "", tuple(why))


def _overriding(rule: _FactRule, overrides: Overrides | None) -> list[str]:
    """Return the catalog's card, if it sets the fact."""
    if overrides is None:
        return []
    detect = overrides.detect
    is_set = any(
        getattr(overrides, name, None) or getattr(detect, name, None) is not None
        for name in rule.overrides
    )
    return [f"card {overrides.source}"] if is_set else []


def _determining(reads: Sequence[Read], patterns: Sequence[str]) -> list[str]:
    """Return the set keys that match the patterns, without duplicates, in reading order."""
    found = [read for read in reads if read.value is not None and read.value is not False]
    matching = [read for read in found if any(_matches(read, pattern) for pattern in patterns)]
    return list(
        dict.fromkeys(f"{read.file} {read.key} = {_short(read.value)}" for read in matching)
    )


def _matches(read: Read, pattern: str) -> bool:
    return fnmatch(
        f"{read.file}:{read.key}={read.value}", pattern if "=" in pattern else f"{pattern}=*"
    )


def _short(value: object, most: int = 80) -> str:
    """Return the value as JSON, truncated to `most` characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else text[: most - 1] + "…"


def _ignored(directory: Path) -> Iterator[str]:
    """List files next to the safetensors that could contain code, which is never run."""
    for pattern, words in (
        ("*.py", "code"),
        ("*.bin", "pickle"),
        ("*.pt", "pickle"),
        ("*.pth", "pickle"),
    ):
        names = sorted(str(path.relative_to(directory)) for path in directory.glob(f"**/{pattern}"))
        if names:
            yield f"{', '.join(names)}: {words}, never opened"


def _converted(directory: Path) -> Iterator[str]:
    """Describe the conversions that made files of the directory."""
    for one in read_record(directory):
        words = f"{one.source} to {one.output}: {one.tensors:,} tensors, by {one.converter}"
        left_out = (
            f"; skipped, as they are not tensors: {', '.join(one.left_out)}" if one.left_out else ""
        )
        tied = f"; {len(one.tied)} tied names are written once" if one.tied else ""
        yield f"{words}{tied}{left_out}"


def _tensors(directory: Path, path: Path) -> FileSummary:
    name = str(path.relative_to(directory))
    sizes: dict[str, int] = {}
    numbers: dict[str, int] = {}
    entries = tensor_entries(directory, name)
    for entry in entries.values():
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.end - entry.begin
        numbers[entry.dtype] = numbers.get(entry.dtype, 0) + prod(entry.shape)
    return FileSummary(name, len(entries), sizes, numbers)
