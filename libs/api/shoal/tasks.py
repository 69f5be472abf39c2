"""The types of the arguments of inference verbs, and the tasks of `extract`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.extractions import Entity, ToolCall
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


# An image: a file, a file's bytes (PNG, JPEG, WebP, TIFF, GIF, BMP, AVIF), a Pillow image, or uint8
# [height, width, 3].
ImageData: TypeAlias = Path | bytes | PillowImage | NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Document:
    """Pages of a PDF file, each of which is an image for a model: `Document(Path("report.pdf"), 1,
    5)`. `ReadText`, and `encode` with `chunking`, also take DOCX, XLSX, PPTX, EPUB, HTML, e-mail
    and Markdown files, and read their text.

    Pages count from 1. `first_page` 0: the first. `last_page` 0: the last, and then at most 16
    pages (1,024 with `chunking`); one beyond the document's end is its last. `dots_per_inch` 0:
    144. Models that read one
    image an item (CLIP) take one page: `Document(file).each(1, 5)` is a list of five items, and
    their file is sent once in a request.
    """

    file: Path | bytes
    first_page: int = 0
    last_page: int = 0
    dots_per_inch: int = 0

    def page(self, number: int) -> Document:
        """Return one page of the file."""
        return Document(self.file, number, number, self.dots_per_inch)

    def each(self, first: int, last: int) -> list[Document]:
        """Return an item for each of the pages `first` to `last`."""
        return [self.page(number) for number in range(first, last + 1)]


@dataclass(frozen=True, slots=True, init=False)
class Parts:
    """An item of several pieces, in the order in which the model reads them: `Parts("What is
    this?", Path("page.png"))`.
    """

    pieces: tuple[str | ImageData | Document, ...]

    def __init__(self, *pieces: str | ImageData | Document) -> None:
        object.__setattr__(self, "pieces", pieces)


Item: TypeAlias = str | ImageData | Document | Parts
Items: TypeAlias = Item | Iterable[Item]
Role = Literal["query", "document"]
Truncation = Literal["none", "end", "start"]
# The same for results that can be merged. "windows": the model reads all of a long text, in
# overlapping windows.
LongText = Literal["none", "end", "start", "windows"]
Priority = Literal["interactive", "bulk"]
Scale = Literal["logit", "probability"]
# What happens to an item that is empty, too long (truncation "none") or not a text: the call fails,
# or the item is skipped.
OnInvalid = Literal["raise", "skip"]
Speaker = Literal["user", "assistant", "system", "tool"]
# An earlier message of the user, the model or the system: ("user", "Who was Ada?"), ("assistant",
# "A mathematician."). An assistant's function calls are a third value, and a function's return
# value has the role "tool".
Turn: TypeAlias = tuple[Speaker, str] | tuple[Literal["assistant"], str, Sequence[ToolCall]]
# What to do with the text that a document's pages have already.
TextLayer = Literal["prefer", "only", "never"]
TextKind = Literal["caption", "detailed_caption", "ocr", "ocr_regions"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
# An entity that the caller knows: start and end (exclusive) in code points, and its label if it has
# one; or an Entity of a result.
Given = Entity | tuple[int, int] | tuple[int, int, str]


ChunkMethod = Literal["sentences", "tokens", "markdown", "spans"]


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text that becomes a chunk.

    Attributes:
        start: Offset of the first code point.
        end: Offset after the last code point.
        context: A text that the model reads before the chunk, unchanged.
    """

    start: int
    end: int
    context: str = ""


@dataclass(frozen=True, slots=True)
class Chunking:
    """Divide each text, or the text of each document, into chunks, each with a vector:
    `Chunking(max_tokens=256)`.

    Attributes:
        method: "sentences" (whole paragraphs and sentences, as many as fit), "tokens", "markdown"
            (at headings and blocks), or "spans".
        max_tokens: Maximum tokens of a chunk; 0: 512, or the model's maximum if that is smaller.
        overlap: Tokens of the previous chunk that a chunk repeats, at most half of `max_tokens`.
        late: The model reads each text whole, and a chunk's vector is pooled from the states of its
            tokens (late chunking).
        contexts: For each item, a prefix that is read before each of its chunks, such as a title.
        spans: For each text its chunks, of method "spans": `Span` or (start, end).
    """

    method: ChunkMethod = "sentences"
    max_tokens: int = 0
    overlap: int = 0
    late: bool = False
    contexts: Sequence[str] = ()
    spans: Sequence[Sequence[Span | tuple[int, int]]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entities:
    """Find named entities in text.

    Attributes:
        labels: Required by zero-shot models; for other models a subset of the model's labels.
        threshold: Minimum score, 0..1. Default: the model's.
        flat: Whether overlapping entities are removed.
        aggregation: How the labels of a word's tokens are merged, for token classification.
    """

    labels: Sequence[str] = ()
    threshold: float | None = None
    flat: bool | None = None
    aggregation: Aggregation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Classify:
    """Score labels for each item.

    Attributes:
        labels: Required by zero-shot and embedding models; for other models a subset of the model's
            labels.
        multi_label: Score each label independently (sigmoid) instead of against the others
            (softmax). Default: as the model's configuration says.
        threshold: Minimum score. Default: none.
        hypothesis: The sentence that a zero-shot or embedding model compares with the text for each
            label; `{}` is replaced by the label.
        among_labels: Normalise probabilities over `labels` instead of over all labels of the model.
    """

    labels: Sequence[str] = ()
    multi_label: bool | None = None
    threshold: float | None = None
    hypothesis: str = ""
    among_labels: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Relations:
    """Find relations between entities.

    Attributes:
        labels: Relations to find.
        entity_labels: The kinds of entities to relate, for models that find the entities.
        entities: A list of entities for each item, for models that do not find them.
        threshold: Minimum score, 0..1. Default: the model's.
    """

    labels: Sequence[str]
    entity_labels: Sequence[str] = ()
    threshold: float | None = None
    entities: Sequence[Sequence[Given]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """Find objects in images.

    Attributes:
        labels: Objects to find.
        threshold: A region's score must exceed this, 0..1. Default: the model's.
    """

    labels: Sequence[str]
    threshold: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadText:
    """Generate text: caption an image, read the text in it, or answer about a text.

    Tokens are chosen as the model's generation_config.json says unless `temperature`, `top_k`,
    `top_p`, `min_p` or a penalty is given.

    Attributes:
        max_tokens: Maximum generated tokens; 0: the model's default.
        instruction: The request to the model, such as "Summarise." or a question, or the name of
            one of the model's tasks.
        region: The part of the image to read: left, top, right and bottom in pixels of the upright
            image, for models with tasks of that kind.
        text_layer: How pages of documents are read. "prefer" (default): take the file's text, and
            let the model read pages without text; "only": the model reads no page, so that any
            model that accepts documents can be named; "never": the model reads all pages.
        schema: Each answer is JSON that follows this JSON Schema of an object, given as a dict
            (such as pydantic's `model_json_schema()`) or as JSON; `form` of an answer is the parsed
            JSON. For models with a chat template; describe the expected content in `instruction`.
        turns: Messages before each item, which is the user's next message: `[("user", "Who was
            Ada?"), ("assistant", "A mathematician.")]`. For models with a chat template.
        template_values: Values for the chat template, such as `{"enable_thinking": False}`.
        temperature: 0 always takes the most likely token.
        seed: The same seed gives the same text for an item, whatever is generated together with it;
            without a seed, each item of each request has another one.
        stop: Texts before which an answer ends.
        top_logprobs: 0..20: answers have `tokens` with their log probabilities and as many most
            likely alternatives of each.
        raw_prompt: An item is the whole prompt, without a chat template.
        tools: Functions that the model may call, in OpenAI's form, as dicts; answers have
            `tool_calls`.
        tool_choice: "auto" (the default), "required", or the name of the function to call.
        single_tool_call: Allow one call at most.
        item_role: "tool": the items are the return values of a function that was called in `turns`.
    """

    kind: TextKind = "caption"
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
