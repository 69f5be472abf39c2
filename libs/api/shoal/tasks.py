"""The types of the arguments of inference verbs, and the tasks of `extract`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.results import Entity, ToolCall
from shoal.schema import Schema


class PillowImage(Protocol):
    """The part of PIL.Image.Image that is used here: Pillow itself is not needed."""

    @property
    def mode(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    def convert(self, mode: str, /) -> Any: ...
    def getexif(self) -> Any: ...
    @property
    def save(self) -> Any: ...


# A picture: a file, a file's bytes (PNG, JPEG, WebP, TIFF, GIF, BMP, AVIF), an image of Pillow, or
# uint8 [height, width, 3].
Picture: TypeAlias = Path | bytes | PillowImage | NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Document:
    """Pages of a PDF file, each of which is an image for a model: `Document(Path("report.pdf"), 1,
    5)`.

    Pages count from 1. `first_page` 0: the first. `last_page` 0: the last, and then at most 16
    pages; one beyond the document's end is its last. `dots_per_inch` 0: 144. Models that read one
    image an item (CLIP) take one page: `Document(file).each(1, 5)` is a list of five items, and
    their file is sent once in a request.
    """

    file: Path | bytes
    first_page: int = 0
    last_page: int = 0
    dots_per_inch: int = 0

    def page(self, number: int) -> Document:
        """One page of the file."""
        return Document(self.file, number, number, self.dots_per_inch)

    def each(self, first: int, last: int) -> list[Document]:
        """An item for each of the pages `first` to `last`."""
        return [self.page(number) for number in range(first, last + 1)]


@dataclass(frozen=True, slots=True, init=False)
class Parts:
    """An item of several pieces, in the order in which the model reads them: `Parts("What is
    this?", Path("page.png"))`.
    """

    pieces: tuple[str | Picture | Document, ...]

    def __init__(self, *pieces: str | Picture | Document) -> None:
        object.__setattr__(self, "pieces", pieces)


Item: TypeAlias = str | Picture | Document | Parts
Items: TypeAlias = Item | Iterable[Item]
Role = Literal["query", "document"]
Truncation = Literal["none", "end", "start"]
Priority = Literal["interactive", "bulk"]
Scale = Literal["logit", "probability"]
# What happens to an item that is empty, too long (truncation "none") or not a text: the call fails,
# or the item is skipped.
OnInvalid = Literal["raise", "skip"]
# What was said before, by the user, the model or who set it up: ("user", "Who was Ada?"),
# ("assistant", "A mathematician."). An assistant's calls of functions are a third value, and what a
# function returned is said by "tool".
Turn: TypeAlias = (
    tuple[Literal["user", "assistant", "system", "tool"], str]
    | tuple[Literal["assistant"], str, Sequence[ToolCall]]
)
# What to do with the text that a document's pages have already.
TextLayer = Literal["prefer", "only", "never"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
# An entity that the caller knows: start and end (exclusive) in code points, and its label if it has
# one; or an Entity of a result.
Given = Entity | tuple[int, int] | tuple[int, int, str]


ChunkMethod = Literal["sentences", "tokens", "markdown", "spans"]


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text that is to be a chunk: code points, `end` exclusive. `context`: read before
    the chunk, as it is.
    """

    start: int
    end: int
    context: str = ""


@dataclass(frozen=True, slots=True)
class Chunking:
    """Divide each text into chunks with vectors of their own: `Chunking(max_tokens=256)`.

    `method`: "sentences" (whole paragraphs and sentences, as many as fit), "tokens", "markdown" (at
    headings and blocks), or "spans". `max_tokens`: of a chunk; 0: 512, or as many as the model
    takes if those are fewer. `overlap`: tokens that a chunk repeats of the one before, at most half
    of `max_tokens`. `late`: the model reads each text whole, and a chunk's vector is pooled from
    the states of its tokens (late chunking).

    `contexts`: for each text, what is read before each of its chunks, such as a title. `spans`: for
    each text its chunks, of method "spans": `Span` or (start, end).
    """

    method: ChunkMethod = "sentences"
    max_tokens: int = 0
    overlap: int = 0
    late: bool = False
    contexts: Sequence[str] = ()
    spans: Sequence[Sequence[Span | tuple[int, int]]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entities:
    """Find named entities in text. `labels`: required by zero-shot models, else a subset of the
    model's own. `threshold` 0..1. `flat`: no overlaps. `aggregation`: how the labels of a word's
    tokens become one, for models that label tokens."""

    labels: Sequence[str] = ()
    threshold: float | None = None
    flat: bool | None = None
    aggregation: Aggregation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Classify:
    """Score labels. `multi_label`: each on its own (sigmoid) instead of against the others
    (softmax). `hypothesis`: the sentence that a zero-shot or embedding model compares with the text
    for each label, `{}` standing for the label. `among_labels`: probabilities are normalised over
    `labels`, instead of over all labels of the model."""

    labels: Sequence[str] = ()
    multi_label: bool | None = None
    threshold: float | None = None
    hypothesis: str = ""
    among_labels: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Relations:
    """Find relations between entities. `entity_labels`: the kinds of entities to relate, for models
    that find the entities. `entities`: the entities themselves, a list for each item, for models
    that are given them. `threshold` 0..1, default the model's own."""

    labels: Sequence[str]
    entity_labels: Sequence[str] = ()
    threshold: float | None = None
    entities: Sequence[Sequence[Given]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """Find objects in images. `threshold` 0..1, which a region's score must exceed, default the
    model's own.
    """

    labels: Sequence[str]
    threshold: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadText:
    """Write: caption an image, read the text in it, or answer about a text. `max_tokens` 0: the
    model's own.

    `instruction`: what the model is asked for besides, such as "Summarise." or a question, or a
    task of the model's own by its name. `region`: the part of the image that is asked about, left,
    top, right and bottom in pixels of the upright image, of models with tasks of that kind.

    `text_layer`: of documents' pages. "prefer" (default): the text that stands in the file, and the
    model reads pages that have none; "only": the model reads no page, so that any model that takes
    documents may be asked; "never": it reads all.

    `schema`: each answer is JSON of this JSON Schema of an object, as a dict (such as pydantic's
    `model_json_schema()`) or as JSON; `form` of an answer is what it says. Models with a chat
    template follow one; tell the model in `instruction` what is asked.

    `turns`: what was said before each item, which is the user's next message: `[("user", "Who was
    Ada?"), ("assistant", "A mathematician.")]`. For models with a chat template, as
    `template_values` are: values that it looks for, such as `{"enable_thinking": False}`.

    Tokens are chosen as the model's generation_config.json says unless `temperature` (0: always the
    likeliest token), `top_k`, `top_p`, `min_p` or a penalty is given. `seed`: one seed gives one
    text for an item, whatever is written together with it; without one, each item of each request
    has another. `stop`: texts that an answer ends before. `top_logprobs` (0..20): answers have
    `tokens`, with their log probabilities and as many of the likeliest ones in the place of each.
    `raw_prompt`: an item is the whole prompt, without a chat template.

    `tools`: functions that the model may call, in OpenAI's form, as dicts; answers have
    `tool_calls`. `tool_choice`: "auto" (the default), "required", or the name of the function to
    call. `single_tool_call`: one call at most. `item_role` "tool": the items are what a function
    that was called in `turns` returned.
    """

    kind: Literal["caption", "detailed_caption", "ocr", "ocr_regions"] = "caption"
    max_tokens: int = 0
    text_layer: TextLayer | None = None
    instruction: str = ""
    region: tuple[float, float, float, float] | None = None
    schema: Mapping[str, object] | str | None = None
    turns: Sequence[Turn] = ()
    template_values: Mapping[str, str | float | bool | None] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Sequence[str] | str = ()
    top_logprobs: int | None = None
    raw_prompt: bool = False
    tools: Sequence[Mapping[str, object]] = ()
    tool_choice: str = "auto"
    single_tool_call: bool = False
    item_role: Literal["user", "tool"] = "user"


Task = Entities | Classify | Relations | Regions | ReadText | Schema
