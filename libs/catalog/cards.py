"""Reads cards in YAML into the Catalog: those shipped with Shoal (`models/*.yaml`), overridden by
those of SHOAL_CATALOG's folders.

Workers and `shoal models check` read them once, at start; routers again when a file changes. A card
only overrides: a model without one is served as its files say. A file holds one card or several,
separated by `---`. `CARD` is the only definition of a card's keys; `schema.py` generates the JSON
schema from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import yaml

from libs.catalog.card import Activation, Dtype, PoolingMode
from libs.catalog.overrides import Catalog, Hints, Overrides
from libs.catalog.shapes import At, Choice, Count, Flag, Key, List, OneOrMore, Record, Text, Texts
from libs.catalog.uncovered import FILE as UNCOVERED
from libs.catalog.uncovered import NOT_SERVED, read_uncovered
from libs.errors import InvalidInput
from libs.kinds.registry import NAMES

SHIPPED = Path(__file__).parent / "models"

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_MODEL = Text(
    rf"{_PART}/{_PART}(@{_PART})?", "a model id of the form org/name or org/name@revision"
)
_POOL = Text(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", "1..63 letters, digits, '.', '_' or '-'"
)  # as pools.NAME


@dataclass(frozen=True, slots=True)
class About:
    """Documentation for docs/models.md, without effect: the family (config.json's model_type) and
    kind that detection finds.

    Attributes:
        ran: Source and date of the published weights that were run with Shoal; empty if only the
            architecture was run, with random weights.
        missing: Required files that the repository lacks.
    """

    family: str
    kind: str
    note: str = ""
    ran: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class CardEntry:
    """A card of a YAML file: the models that it is for, their overrides and documentation."""

    models: tuple[str, ...]
    overrides: Overrides
    about: About | None


def _entry(
    model: tuple[str, ...], source: str, about: About | None = None, **values: object
) -> CardEntry:
    return CardEntry(model, Overrides(source, **values), about)  # type: ignore[arg-type]  # checked by CARD


_ABOUT = Record(
    About,
    {
        "family": Key(Text(), "model_type in its config.json", needed=True),
        "kind": Key(Text(), "what follows the encoder", needed=True),
        "note": Key(Text(), "a remark for readers of docs/models.md"),
        "ran": Key(
            Text(), "the source of published weights that were run with Shoal with the date"
        ),
        "missing": Key(Text(), "files that are needed and that the repository lacks, default none"),
    },
)
_DETECT = Record(
    Hints,
    {
        "kind": Key(Choice(NAMES), "what follows the encoder"),
        "pooling": Key(
            Choice(get_args(PoolingMode)), "how token states become the vector of a text"
        ),
        "normalize": Key(Flag(), "whether vectors are scaled to length 1"),
        "lowercase": Key(Flag(), "whether texts are lowercased before they are tokenised"),
        "score_activation": Key(
            Choice(get_args(Activation)), "the activation of a classifier's logit on its own scale"
        ),
        "answers": Key(
            List(Text()),
            "of a reranker that is a language model: the tokens for yes and, for most of them, no",
        ),
        "template": Key(
            Text(),
            (
                "of such a reranker: its chat template, in Jinja; it may use query, document and "
                "instruction"
            ),
        ),
    },
)
CARD = Record(
    _entry,
    {
        "model": Key(
            OneOrMore(_MODEL),
            "the model's id, or the ids of several that the card is for",
            needed=True,
        ),
        "prompts": Key(
            Texts(),
            (
                'texts put before inputs, by name ("query" and "document" by role); they override '
                'the files\', and "" removes one'
            ),
        ),
        "default_prompt": Key(Text(), 'name of the prompt for inputs without a role; "" for none'),
        "pools": Key(
            List(_POOL),
            "pools of workers that should run the model, best first; later ones take the overflow",
        ),
        "dtype": Key(
            Choice(get_args(Dtype)),
            "number format of the encoder, default auto: the worker's setting; int8 on CPUs",
        ),
        "revision": Key(
            Text(_PART, "a revision"), "commit, tag or branch to fetch where an id names none"
        ),
        "pinned": Key(
            Flag(), "whether the model is never evicted once it is loaded, default false"
        ),
        "max_tokens": Key(
            Count(),
            "longest sequence in tokens, special tokens included; positions limit it further",
        ),
        "memory_bytes": Key(Count(), "bytes to reserve for the model if its weights take less"),
        "detect": Key(_DETECT, "settings that the files alone do not determine"),
        "about": Key(_ABOUT, "for the table in docs/models.md; without effect"),
    },
    with_source=True,
)


def parse_folders(text: str) -> tuple[Path, ...]:
    """Return the value of SHOAL_CATALOG: folders of cards separated by colons; earlier ones
    override later ones.

    Raises InvalidInput for a folder that does not exist.
    """
    folders = tuple(Path(entry) for entry in text.split(":") if entry)
    for folder in folders:
        if not folder.is_dir():
            raise InvalidInput(f"SHOAL_CATALOG: {folder} is not a folder", field="SHOAL_CATALOG")
    return folders


def read_catalog(folders: Sequence[Path] = ()) -> Catalog:
    """Return the shipped cards, overridden by those of `folders`. Raises InvalidInput naming file,
    line and key.
    """
    merged: dict[str, Overrides] = {}
    for folder in (SHIPPED, *reversed(folders)):
        for model, overrides in _read_folder(folder).items():
            merged[model] = overrides.over(merged[model]) if model in merged else overrides
    unserved = {
        model: group.reason
        for group in read_uncovered(UNCOVERED)
        if group.status == NOT_SERVED
        for model in group.models
    }
    return Catalog(merged, unserved)


def entries(folder: Path) -> list[CardEntry]:
    """Return the cards of a folder's YAML files, in the order of file names and lines. Raises
    InvalidInput.
    """
    return [entry for path in sorted(folder.glob("*.yaml")) for entry in _read_file(path)]


def _read_folder(folder: Path) -> dict[str, Overrides]:
    found: dict[str, Overrides] = {}
    for entry in entries(folder):
        for model in entry.models:
            if model in found:
                source = entry.overrides.source
                raise InvalidInput(
                    f"{source}: `model` {model} has a card at {found[model].source} already: "
                    "keep one"
                )
            found[model] = entry.overrides
    return found


def _read_file(path: Path) -> Iterator[CardEntry]:
    try:
        documents = list(yaml.compose_all(path.read_text(encoding="utf-8"), yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise InvalidInput(f"{path}:{line}: is not YAML: {error.problem}") from error
    except (OSError, RecursionError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidInput(f"{path}: cannot be read: {error}") from error
    for document in documents:
        if document is not None:
            yield CARD.read(document, At(str(path)))
