"""Cards in YAML -> the Catalog: those that Shoal ships (`models/*.yaml`), and over them the folders of SHOAL_CATALOG.

Read once when a worker starts, and by `shoal models check`. A card only overrides: a model without one is served as its files say.
A file holds one card or several, apart by `---`. `CARD` is the only definition of what may stand there; `schema.py`
makes the JSON schema of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import yaml

from libs.catalog.card import Activation, Dtype, Kind, PoolingMode
from libs.catalog.overrides import Catalog, Hints, Overrides
from libs.catalog.shapes import At, Choice, Count, Flag, Key, List, OneOrMore, Record, Text, Texts
from libs.errors import InvalidInput

SHIPPED = Path(__file__).parent / "models"

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_MODEL = Text(rf"{_PART}/{_PART}(@{_PART})?", "a model id of the form org/name or org/name@revision")
_POOL = Text(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", "1..63 letters, digits, '.', '_' or '-'")  # as pools.NAME


@dataclass(frozen=True, slots=True)
class About:
    """For docs/models.md, without effect: the family (config.json's model_type) and kind that the model's files are known to give.

    `ran`: here with the published weights, not only its architecture with random ones. `convert`: its weights are published as
    pickle only.
    """

    family: str
    kind: str
    note: str = ""
    ran: bool = False
    convert: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A card as it stands in a file."""

    models: tuple[str, ...]
    says: Overrides
    about: About | None


def _entry(model: tuple[str, ...], source: str, about: About | None = None, **says: object) -> Entry:
    return Entry(model, Overrides(source, **says), about)  # type: ignore[arg-type]  # checked by CARD


_ABOUT = Record(
    About,
    {
        "family": Key(Text(), "model_type in its config.json", needed=True),
        "kind": Key(Text(), "what stands after the encoder", needed=True),
        "note": Key(Text(), "what a reader of docs/models.md should know"),
        "ran": Key(Flag(), "the published weights were run with Shoal, default false"),
        "convert": Key(Flag(), "the weights are published as pickle only, default false"),
    },
)
_DETECT = Record(
    Hints,
    {
        "kind": Key(Choice(get_args(Kind)), "what stands after the encoder"),
        "pooling": Key(Choice(get_args(PoolingMode)), "how token states become the vector of a text"),
        "normalize": Key(Flag(), "whether vectors are scaled to length 1"),
        "lowercase": Key(Flag(), "whether texts are lowercased before they are tokenised"),
        "score_activation": Key(Choice(get_args(Activation)), "what a classifier's logit goes through on its own scale"),
        "answers": Key(List(Text()), "of a reranker that is a language model: the token that says yes and, for most, that for no"),
        "template": Key(Text(), "of such a reranker: its chat template, in Jinja; it may name query, document and instruction"),
    },
)
CARD = Record(
    _entry,
    {
        "model": Key(OneOrMore(_MODEL), "the model's id, or the ids of several that the card is for", needed=True),
        "prompts": Key(
            Texts(), 'texts put before inputs, by name ("query" and "document" by role); over those of the files, "" takes one away'
        ),
        "default_prompt": Key(Text(), 'name of the prompt for inputs without a role; "" for none'),
        "pools": Key(List(_POOL), "pools of workers that should run the model, best first; later ones take what overflows"),
        "dtype": Key(Choice(get_args(Dtype)), "number format of the encoder, default auto: as the worker is set"),
        "revision": Key(Text(_PART, "a revision"), "commit, tag or branch to fetch where an id names none"),
        "pinned": Key(Flag(), "whether the model is never evicted once it is loaded, default false"),
        "max_tokens": Key(Count(), "longest sequence in tokens, special tokens included; positions limit it further"),
        "memory_bytes": Key(Count(), "bytes to set aside for the model if its weights take less"),
        "detect": Key(_DETECT, "what the files alone cannot tell"),
        "about": Key(_ABOUT, "for the table in docs/models.md; without effect"),
    },
    place=True,
)


def parse_folders(text: str) -> tuple[Path, ...]:
    """SHOAL_CATALOG: folders of cards, separated by colons, the first before the others. Raises InvalidInput for one not there."""
    folders = tuple(Path(entry) for entry in text.split(":") if entry)
    for folder in folders:
        if not folder.is_dir():
            raise InvalidInput(f"SHOAL_CATALOG: {folder} is not a folder", field="SHOAL_CATALOG")
    return folders


def read_catalog(folders: Sequence[Path] = ()) -> Catalog:
    """The shipped cards with those of `folders` over them. Raises InvalidInput naming file, line and key."""
    merged: dict[str, Overrides] = {}
    for folder in (SHIPPED, *reversed(folders)):
        for model, says in _folder(folder).items():
            merged[model] = says.over(merged[model]) if model in merged else says
    return Catalog(merged)


def entries(folder: Path) -> list[Entry]:
    """The cards of a folder, by file and line."""
    return [entry for path in sorted(folder.glob("*.yaml")) for entry in _file(path)]


def _folder(folder: Path) -> dict[str, Overrides]:
    found: dict[str, Overrides] = {}
    for entry in entries(folder):
        for model in entry.models:
            if model in found:
                raise InvalidInput(f"{entry.says.source}: `model` {model} has a card at {found[model].source} already: keep one")
            found[model] = entry.says
    return found


def _file(path: Path) -> Iterator[Entry]:
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
