"""Results of `extract` for one item, and the parts of generated text.

Models build these types (`libs/models`), so they need the standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True, slots=True)
class Entity:
    """A labelled span of text. `start` and `end` (exclusive) count Unicode code points, as Python's
    strings do. Scores are 0..1, here and below.
    """

    start: int
    end: int
    label: str
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label and its score: 0..1, for embedding models a cosine similarity."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation from the entity `head` to the entity `tail`."""

    head: Entity
    tail: Entity
    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Region:
    """A labelled box in an image, in pixels from the upper left corner of the upright image.

    Attributes:
        polygon: The x and y of each corner of an outline in turn; empty without one.
    """

    left: float
    top: float
    right: float
    bottom: float
    label: str
    score: float
    polygon: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PageText:
    """The text of a document's page, which counts from 1.

    Attributes:
        is_text_layer: Whether the text is the file's text layer, with CR LF between lines.
            Otherwise a model generated it, or it is empty.
    """

    page: int
    text: str
    is_text_layer: bool


@dataclass(frozen=True, slots=True)
class Classification:
    """The answer to a schema's question: labels, best first."""

    name: str
    labels: tuple[LabelScore, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a structure's field. `start` and `end` (exclusive) count code points of the text;
    None for a choice.
    """

    text: str
    score: float
    start: int | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Structure:
    """One object of the schema's structure `name`.

    Attributes:
        fields: The value of each field, in the order of the schema: a list, or the best value or
            None.
    """

    name: str
    fields: Mapping[str, tuple[Value, ...] | Value | None]

    def values(self) -> Iterator[tuple[str, Value]]:
        """Yield each value with the name of its field."""
        for name, found in self.fields.items():
            for value in field_values(found):
                yield name, value


def field_values(found: tuple[Value, ...] | Value | None) -> tuple[Value, ...]:
    """Return the values of a structure's field, which is a list or not."""
    return found if isinstance(found, tuple) else () if found is None else (found,)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function.

    Attributes:
        arguments: A JSON object.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text, with U+FFFD for a part of a character, and its log probability.

    Attributes:
        top: The most likely tokens at this position.
    """

    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Extraction:
    """The findings in one item. Only the fields of the requested task are filled.

    Attributes:
        text: The generated text, which the model ended (`finish_reason` "stop") or which was cut
            off ("length").
        form: The text as JSON, of models that generate a form.
        pages: The pages of an item of pages in their order, instead of `text`.
        document_pages: Number of pages of the item's documents, read or not.
        tool_calls: The functions that the model called.
        tokens: The tokens of `text`, if `top_logprobs` was requested.
    """

    entities: tuple[Entity, ...] = ()
    labels: tuple[LabelScore, ...] = ()
    relations: tuple[Relation, ...] = ()
    regions: tuple[Region, ...] = ()
    text: str = ""
    pages: tuple[PageText, ...] = ()
    document_pages: int = 0
    classifications: tuple[Classification, ...] = ()
    structures: tuple[Structure, ...] = ()
    finish_reason: Literal["", "stop", "length"] = ""
    form: Mapping[str, object] | None = None
    truncated: bool = False
    """Whether results were left out, those with the lowest scores: more was found than the item's
    share of the answer holds.
    """
    tool_calls: tuple[ToolCall, ...] = ()
    tokens: tuple[TokenLogprob, ...] = ()

    def __repr__(self) -> str:
        found = ((field.name, getattr(self, field.name)) for field in fields(self))
        shown = (f"{name}={value!r}" for name, value in found if value or value == {})
        return f"Extraction({', '.join(shown)})"

    @property
    def json(self) -> dict[str, list[dict[str, str | list[str] | None]]]:
        """The structures as plain texts: by name a list of maps from field to text, to a list of
        texts, or to None.
        """
        found: dict[str, list[dict[str, str | list[str] | None]]] = {}
        for one in self.structures:
            found.setdefault(one.name, []).append(
                {name: _plain(value) for name, value in one.fields.items()}
            )
        return found


@dataclass(frozen=True, slots=True)
class Delta:
    """The text of an item that was generated since the previous delta.

    Attributes:
        page: The page of the item's document; 0 without a document.
        restarted: The text is generated again from its beginning, since its worker was lost:
            discard all earlier deltas.
    """

    item: int
    text: str
    page: int = 0
    restarted: bool = False


def _plain(value: tuple[Value, ...] | Value | None) -> str | list[str] | None:
    if isinstance(value, tuple):
        return [one.text for one in value]
    return None if value is None else value.text
