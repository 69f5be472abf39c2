"""Requests that are larger than they look: a recipe of a few numbers, and the request of up to
megabytes that it describes.

Multiplying parts are tried most: an instruction, a query or a hypothesis with each item, labels
with each item, forms with each token. An input is the recipe as JSON, so a corpus of megabytes
stays small and readable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from google.protobuf.message import Message
from shoal.v1 import inference_pb2 as pb

from tests.fuzz import tiny_kinds
from tests.fuzz.target import Random

MAX_BYTES: Final = 4 << 20
"""The approximate maximum bytes of each repeated or single text, since a letter may have four
bytes.
"""
MAX_ITEMS: Final = 20_000
MAX_LABELS: Final = 300
DEADLINES: Final = (2.0, 2.0, 2.0, 0.5, 0.05)

LETTERS: Final[Mapping[str, str]] = {
    "words": "text a ",
    "one word": "a",
    "spaces": " ",
    "lines": "\n",
    "controls": "\x01",
    "ligatures": "\ufdfa",  # eighteen letters after normalisation
    "accents": "e\u0301",
    "emoji": "\U0001f480",
    "hangul": "\ud55c",
    "places": "{}",  # placeholders of labels in a hypothesis
    "quotes": "``",  # replaced by the tokenizer
    "unknown": "\u6771 ",
}
VERBS: Final = (
    "encode",
    "search",
    "pairs",
    "hypotheses",
    "prompts",
    "labels",
    "relations",
    "structures",
    "generation",
)
_LABELLED: Final = ("hypotheses", "prompts", "labels", "relations", "structures")

# The contract's limits of a shared text by verb, of a label and of an instruction: larger values
# are soon refused.
_SHARED: Final = {"encode": 16_000, "search": 130_000, "pairs": 130_000, "hypotheses": 1_000,
"prompts": 1_000, "labels": 0,
           "relations": 0, "structures": 0, "generation": 16_000}  # fmt: skip
_LABEL: Final = 1_000
_INSTRUCTION: Final = 16_000

RELATIONS, STRUCTURES, GENERATION = "tiny/relations", "tiny/structures", "tiny/generation"
"""Models of `package_kinds.py`, which takes seconds to import."""

Text = tuple[str, int]
"""A key of LETTERS, and the approximate bytes."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A request with `items` times `text`.

    Args:
        shared: The instruction, query or hypothesis.
        instruction: The instruction of a request with a query.
        entities: Entities given with each item, for `relations`.
        empty: Items without content.
        unknown: An unknown field of nested groups: their depth, and bytes in the innermost.
        deadline: The caller's, in seconds.
    """

    verb: str = "encode"
    items: int = 1
    text: Text = ("words", 10)
    shared: Text = ("words", 0)
    instruction: Text = ("words", 0)
    labels: int = 0
    label: Text = ("words", 5)
    forms: int = 0
    entities: int = 0
    empty: int = 0
    unknown: tuple[int, int] = (0, 0)
    adapter: bool = False
    deadline: float = 2.0

    @property
    def path(self) -> str:
        """Return the method's path."""
        verb = {"encode": "Encode", "search": "Score", "pairs": "Score"}.get(self.verb, "Extract")
        return f"/shoal.v1.InferenceService/{verb}"

    @property
    def sequences(self) -> int:
        """Return the maximum number of forward passes that a valid request pays for: one per
        generated token.
        """
        each = {"hypotheses": self.labels, "prompts": self.labels, "generation": self.forms}.get(
            self.verb, 1
        )
        return self.items * max(1, each)

    def body(self) -> bytes:
        """Return the serialised request."""
        return self._request().SerializeToString() + _unknown(*self.unknown)

    def _request(self) -> Message:
        text = _text(self.text, self.items)
        given = [
            pb.Entity(start=2 * place, end=2 * place + 1, label="a")
            for place in range(self.entities)
        ]
        items = [pb.Item(text=text, entities=given)] * self.items + [pb.Item()] * self.empty
        shared, instruction = _text(self.shared), _text(self.instruction)
        labels = [f"{number} {_text(self.label, self.labels)}" for number in range(self.labels)]
        adapter = tiny_kinds.ADAPTER if self.adapter else ""
        if self.verb == "encode":
            forms: list[Any] = [1 + number % 3 for number in range(self.forms)]
            return pb.EncodeRequest(
                model=tiny_kinds.FORMS, items=items, instruction=shared, representations=forms,
                adapter=adapter
            )  # fmt: skip
        if self.verb in ("search", "pairs"):
            model = tiny_kinds.FORMS if self.verb == "search" else tiny_kinds.PAIRS
            return pb.ScoreRequest(
                model=model, query=pb.Item(text=shared), documents=items, instruction=instruction
            )
        if self.verb == "labels":
            return pb.ExtractRequest(
                model=tiny_kinds.LABELS, items=items, entities=pb.EntitiesTask(labels=labels)
            )
        if self.verb == "relations":
            return pb.ExtractRequest(
                model=RELATIONS,
                items=items,
                relations=pb.RelationsTask(labels=labels, threshold=0.0),
            )
        if self.verb == "structures":
            fields = [pb.SchemaField(name=label[:250]) for label in labels]
            structures = [
                pb.SchemaStructure(name=str(number), fields=fields[number::16])
                for number in range(min(16, len(fields)))
            ]
            return pb.ExtractRequest(
                model=STRUCTURES,
                items=items,
                structure=pb.StructureTask(structures=structures, threshold=0.0),
            )
        if self.verb == "generation":
            return pb.ExtractRequest(
                model=GENERATION,
                items=items,
                text=pb.TextTask(instruction=shared, max_tokens=max(1, self.forms)),
            )
        model = tiny_kinds.HYPOTHESES if self.verb == "hypotheses" else tiny_kinds.FORMS
        hypothesis = shared and f"{{}} {shared}"
        return pb.ExtractRequest(
            model=model, items=items, classify=pb.ClassifyTask(labels=labels, hypothesis=hypothesis)
        )

    def to_json(self) -> bytes:
        """Return the fields that differ from the defaults."""
        own = asdict(self)
        return json.dumps(
            {one.name: own[one.name] for one in fields(self) if own[one.name] != one.default}
        ).encode()


def read(data: bytes) -> Recipe | None:
    """Return the recipe; None if it is invalid or a text exceeds MAX_BYTES."""
    try:
        reported = json.loads(data).items()
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in reported
        }
        recipe = Recipe(**values)
        counts = (
            recipe.items,
            recipe.empty,
            recipe.labels,
            recipe.forms,
            recipe.items * recipe.entities,
            *recipe.unknown,
        )
        sizes = [
            _bytes(text) for text in (recipe.text, recipe.shared, recipe.instruction, recipe.label)
        ]
        within = (
            0 < recipe.deadline <= 10
            and max(counts) <= 1 << 20
            and max(sizes) <= MAX_BYTES
            and min(*counts, *sizes) >= 0
        )
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
    typed = all(type(getattr(recipe, one.name)) is type(one.default) for one in fields(recipe))
    return recipe if within and typed and recipe.verb in VERBS else None


def make(random: Random, known: Sequence[bytes]) -> bytes:
    """Return a recipe with at least one product, or a known one with one or two values changed."""
    old = read(random.choice(known)) if known and random.random() < 0.3 else None
    drawn = asdict(_drawn(random))
    if old is None:
        return Recipe(**drawn).to_json()
    return Recipe(
        **(asdict(old) | {name: drawn[name] for name in random.sample(sorted(drawn), 2)})
    ).to_json()


def _drawn(random: Random) -> Recipe:
    verb = random.choice(VERBS)
    labelled = verb in _LABELLED
    odd, legal = random.random() < 0.1, random.random() < 0.6
    shared, label, instruction = (
        (_SHARED[verb], _LABEL, _INSTRUCTION) if legal else (MAX_BYTES,) * 3
    )
    return Recipe(
        verb=verb,
        items=count(random, MAX_ITEMS),
        text=_letters(random, 1, MAX_BYTES),
        shared=_letters(random, 0, shared) if random.random() < 0.8 else ("words", 20),
        instruction=_letters(random, 0, instruction) if random.random() < 0.3 else ("words", 0),
        labels=count(random, MAX_LABELS) if labelled else 0,
        label=_letters(random, 1, label) if labelled else ("words", 5),
        forms=count(random, 2000)
        if verb == "generation" or (verb == "encode" and random.random() < 0.3)
        else 0,
        entities=count(random, 400) if verb == "relations" else 0,
        empty=count(random, 1 << 20) if odd else 0,
        unknown=(count(random, 50_000), count(random, MAX_BYTES >> 2))
        if random.random() < 0.1
        else (0, 0),
        adapter=verb == "encode" and random.random() < 0.2,
        deadline=random.choice(DEADLINES),
    )


def count(random: Random, most: int) -> int:
    """Return a number up to `most`, as likely between 1 and 10 as between 1,000 and 10,000."""
    return int(most ** random.random()) if most else 0


def _letters(random: Random, least: int, most: int) -> Text:
    return random.choice(list(LETTERS)), max(least, count(random, most))


def _text(text: Text, times: int = 1) -> str:
    """Return a text of which `times` copies have at most MAX_BYTES."""
    letters, size = LETTERS[text[0]], min(_bytes(text), MAX_BYTES // max(1, times))
    return letters * max(-(-size // len(letters.encode())), min(1, _bytes(text)))


def _bytes(text: Text) -> int:
    name, size = text
    if name not in LETTERS:
        raise KeyError(name)
    return int(size)


def _unknown(depth: int, size: int) -> bytes:
    """Return the unknown field 100 of nested groups with bytes in the innermost; empty if both
    arguments are 0.
    """
    if not depth and not size:
        return b""
    length, inner = size, b""
    while length > 0x7F:
        inner += bytes([length & 0x7F | 0x80])
        length >>= 7
    return (
        b"\xa3\x06" * depth
        + b"\xa2\x06"
        + inner
        + bytes([length])
        + bytes(size)
        + b"\xa4\x06" * depth
    )
