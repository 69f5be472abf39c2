"""The requests of a model: one Work for each job, without protobuf.

`services/worker/mesh/job_codec.py` decodes a Job to a Work, and `PackedModel.prepare` turns a Work
into a Prepared (`sequences.py`). Paths in errors (`items[3].text`, `documents[0].text`,
`query.text`, `dimensions`) count from the job's first item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import ToolCall
from shoal.results import DataType as DataType
from shoal.schema import Schema
from shoal.tasks import Aggregation as Aggregation
from shoal.tasks import ChunkMethod as ChunkMethod
from shoal.tasks import Span as Span
from shoal.tasks import Speaker
from shoal.tasks import TextKind as TextKind
from shoal.tasks import TextLayer as TextLayer

from libs.catalog.card import Card
from libs.catalog.card import Representation as Representation
from libs.documents.joined_text import PagedText

Role = Literal["", "query", "document"]
Truncation = Literal["none", "end", "start", "windows", "default"]
"""The end at which a text that is too long is cut. "windows": it is read in overlapping windows
(`text/windows`); a processor never sees it. "default": the model's end, substituted by
`with_truncation`.
"""
Scale = Literal["", "logit", "probability"]
CancelCheck = Callable[[], None]
"""Called between slices of a job's preparation. Raises if no caller waits for the job's result."""


def never_cancelled() -> None:
    """Ignore cancellation, for work that is never cancelled."""


_T = TypeVar("_T")

SLICE_RESULTS: Final = 256
"""Results that are made between two calls of a CancelCheck: 1 to 3 ms of work."""


def in_slices(items: Iterable[_T], check_cancelled: CancelCheck) -> Iterator[_T]:
    """Yield the items, and call `check_cancelled` after each SLICE_RESULTS of them."""
    for number, item in enumerate(items, 1):
        yield item
        if number % SLICE_RESULTS == 0:
            check_cancelled()


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of an item: a text, or the bytes of an image file.

    Attributes:
        field: Its path in the job, such as `items[3].image`.
        scope: Scope within which the image's output may be cached, such as a tenant's; None: do not
            cache.
    """

    content: str | bytes
    field: str
    scope: str | None = None


Parts = tuple[Part, ...]
"""An item's pieces, in the order in which the model reads them."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """Division of texts into chunks.

    Attributes:
        max_tokens: Limit of a chunk without special tokens, prompt and context; 0: `dividing.py`
            chooses.
        overlap: Tokens repeated from the previous chunk.
        late: The model reads whole texts, and the states of a chunk's tokens are pooled.
        return_text: The result has the texts of the chunks.
        max_chunks: Maximum chunks of all texts; 0: `dividing.py` chooses.
    """

    method: ChunkMethod = "sentences"
    max_tokens: int = 0
    overlap: int = 0
    late: bool = False
    return_text: bool = False
    max_chunks: int = 0


ANY_LENGTH: Final = 1 << 62
"""More characters than a text has."""


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """Encode texts as vectors.

    Attributes:
        representations: Empty for the model's main one.
        dimensions: 0 for all.
        normalize: None for the checkpoint's default.
        parts: Items that are not plain text, by index, here and in other work. Each has an empty
            text in `texts`.
        pooling_factor: Divisor of a multi-vector's number of vectors; 0 or 1 to keep all.
        adapter: Name of the LoRA adapter, here and in other work; empty for none.
        chunking: Division of each text; None to keep it whole.
        spans: Chunks of each text for the method "spans"; else empty.
        contexts: Text put before each chunk of a text; empty for none.
        documents: The texts of documents, by index. Each has an empty text in `texts`.
    """

    texts: list[str]
    role: Role = ""
    representations: tuple[Representation, ...] = ()
    data_type: DataType = "float32"
    dimensions: int = 0
    normalize: bool | None = None
    instruction: str = ""
    truncation: Truncation = "end"
    parts: Mapping[int, Parts] = field(default_factory=dict)
    pooling_factor: int = 0
    adapter: str = ""
    chunking: Chunking | None = None
    spans: tuple[tuple[Span, ...], ...] = ()
    contexts: tuple[str, ...] = ()
    documents: Mapping[int, PagedText] = field(default_factory=dict)

    def read_text(self, index: int, characters: int = ANY_LENGTH) -> tuple[str, bool]:
        """Return the beginning of a text, and whether that is all of it.

        Args:
            characters: The minimum to return of a longer text.
        """
        document = self.documents.get(index)
        if document is None:
            return self.texts[index], True
        return document.read(characters), document.is_whole


@dataclass(frozen=True, slots=True)
class ScoreWork:
    """Score the relevance of each document to the query.

    Attributes:
        scale: Empty for the model's default.
        query_parts: Parts of a query that is not plain text; `query` is empty then.
        parts: Parts of documents that are not plain text.
        window_overlap: Tokens that a window repeats of the one before, of the truncation "windows",
            here and in other work; None: `text/windows` chooses.
    """

    query: str
    documents: list[str]
    instruction: str = ""
    scale: Scale = ""
    truncation: Truncation = "end"
    query_parts: Parts = ()
    parts: Mapping[int, Parts] = field(default_factory=dict)
    adapter: str = ""
    window_overlap: int | None = None


@dataclass(frozen=True, slots=True)
class EntitiesWork:
    """Named entity recognition. No labels: all of the model's. `threshold` None: keep all. Token
    labels are always `flat`.
    """

    texts: list[str]
    labels: tuple[str, ...] = ()
    threshold: float | None = None
    flat: bool = True
    aggregation: Aggregation = "simple"
    truncation: Truncation = "end"
    window_overlap: int | None = None


@dataclass(frozen=True, slots=True)
class ClassifyWork:
    """Classify texts.

    Attributes:
        multi_label: None for the checkpoint's default.
        hypothesis: Template of zero-shot models that texts are compared with; `{}` stands for the
            label. Empty for the default of the model's kind.
        among_labels: Apply softmax over `labels` instead of all classes of the model.
    """

    texts: list[str]
    labels: tuple[str, ...] = ()
    multi_label: bool | None = None
    threshold: float | None = None
    hypothesis: str = ""
    truncation: Truncation = "end"
    among_labels: bool = False
    parts: Mapping[int, Parts] = field(default_factory=dict)
    adapter: str = ""
    window_overlap: int | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """An entity in the request: code points within its text, end exclusive."""

    start: int
    end: int
    label: str = ""


@dataclass(frozen=True, slots=True)
class RelationsWork:
    """Extract pairs of entities that have one of the relations `labels`.

    Attributes:
        entity_labels: Types of entities, for models that extract them.
        threshold: None for the model's default.
        entities: Entities of each text, for models that take them as input; empty for none.
    """

    texts: list[str]
    labels: tuple[str, ...]
    entity_labels: tuple[str, ...] = ()
    threshold: float | None = None
    truncation: Truncation = "end"
    entities: tuple[tuple[Given, ...], ...] = ()
    window_overlap: int | None = None


@dataclass(frozen=True, slots=True)
class RegionsWork:
    """Detect labelled boxes in images.

    Attributes:
        threshold: Minimum score; None: the model's default.
        texts: One per item, empty where the item has `parts`.
    """

    texts: list[str]
    labels: tuple[str, ...]
    threshold: float | None = None
    parts: Mapping[int, Parts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message before an item.

    Attributes:
        tool_calls: The tool calls of an assistant.
    """

    role: Speaker
    text: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of tokens. None: the checkpoint's default, or else neutral. `temperature` 0: the
    most likely token.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class TextWork:
    """Generate text about items.

    Attributes:
        texts: One per item, empty where it has `parts`.
        max_tokens: 0 for the model's default.
        text_layer: "prefer" uses a page's text layer if it has one, "only" never runs the model,
            "never" runs it for all pages.
        instruction: Instruction for the model, or the name of one of its tasks.
        region: The part of the image that the request is about: left, top, right and bottom in
            pixels.
        json_schema: JSON schema that each answer follows, with the model run for all pages; empty
            for free text.
        turns: Messages before each item, which is the user's next message.
        template_values: Additional values for the chat template, a JSON object; empty for none.
        seeds: Random seed of each item; empty for one common seed.
        stops: Texts before which an answer ends.
        top_logprobs: Number of likely tokens returned with log probabilities next to each generated
            one; None for no log probabilities at all.
        raw_prompt: The text is the whole prompt, and whitespace around an answer is kept.
        tools: Functions that the model may call, a JSON list in OpenAI's format; empty for none.
        calls_tool: The model must call a function.
        tool: The function that it must call; empty for any.
        single_tool_call: The model may call at most one function.
        item_role: Role of the items' messages.
    """

    texts: list[str]
    text_kind: TextKind = "caption"
    max_tokens: int = 0
    text_layer: TextLayer = "prefer"
    instruction: str = ""
    region: tuple[float, float, float, float] | None = None
    parts: Mapping[int, Parts] = field(default_factory=dict)
    json_schema: str = ""
    turns: tuple[Turn, ...] = ()
    template_values: str = ""
    sampling: Sampling = Sampling()
    seeds: tuple[bytes, ...] = ()
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None
    raw_prompt: bool = False
    tools: str = ""
    calls_tool: bool = False
    tool: str = ""
    single_tool_call: bool = False
    item_role: Literal["user", "tool"] = "user"


@dataclass(frozen=True, slots=True)
class StructureWork:
    """Extract the contents of a schema from texts."""

    texts: list[str]
    schema: Schema
    truncation: Truncation = "end"
    window_overlap: int | None = None


@dataclass(frozen=True, slots=True)
class TokenizeWork:
    """Tokenise texts.

    Attributes:
        texts: The texts.
        add_special_tokens: Whether special tokens are added around each text.
        truncation: The tokens returned of a text that is too long. "default": all; "none": the text
            is refused.
        count_only: Whether only counts are returned.
        return_tokens: Whether the tokens are also returned as the vocabulary writes them.
    """

    texts: list[str]
    add_special_tokens: bool = True
    truncation: Truncation = "default"
    count_only: bool = False
    return_tokens: bool = False


@dataclass(frozen=True, slots=True)
class DetokenizeWork:
    """Convert tokens to texts.

    Attributes:
        sequences: Token ids of each text, uint32.
        skip_special_tokens: Whether special tokens are left out.
    """

    sequences: list[NDArray[np.uint32]]
    skip_special_tokens: bool = False


GenerationWork = TextWork | RegionsWork
"""Work of generative models, which generate regions as text."""

TokenWork = TokenizeWork | DetokenizeWork
"""Work of a tokenizer without a forward."""

ModelWork = (
    EncodeWork
    | ScoreWork
    | EntitiesWork
    | ClassifyWork
    | RelationsWork
    | RegionsWork
    | TextWork
    | StructureWork
)
"""Work of a model's processor."""

Work = ModelWork | TokenWork


def with_truncation(work: Work, card: Card) -> Work:
    """Replace the truncation "default" by the model's truncation."""
    if isinstance(work, RegionsWork | TextWork | TokenWork) or work.truncation != "default":
        return work
    return replace(work, truncation=card.truncation)


def all_parts(work: Work) -> list[Part]:
    """Return the parts of every item that is not plain text, the query's first."""
    if isinstance(work, EntitiesWork | RelationsWork | StructureWork | TokenWork):
        return []
    query = work.query_parts if isinstance(work, ScoreWork) else ()
    return [*query, *(part for parts in work.parts.values() for part in parts)]


def items_as_parts(
    work: EncodeWork | ScoreWork | ClassifyWork | RegionsWork | TextWork,
) -> list[Parts]:
    """Return the parts of each item, or of each document of a ScoreWork. Plain text is one part."""
    texts, name = (
        (work.documents, "documents") if isinstance(work, ScoreWork) else (work.texts, "items")
    )
    return [
        work.parts.get(index) or (Part(text, f"{name}[{index}].text"),)
        for index, text in enumerate(texts)
    ]


def query_as_parts(work: ScoreWork) -> Parts:
    return work.query_parts or (Part(work.query, "query.text"),)


def without_images(work: Work) -> Work:
    """Drop the bytes of images, which are not needed once the work is prepared."""
    if isinstance(work, EntitiesWork | RelationsWork | StructureWork | TokenWork) or not work.parts:
        return (
            replace(work, query_parts=())
            if isinstance(work, ScoreWork) and work.query_parts
            else work
        )
    return (
        replace(work, parts={}, query_parts=())
        if isinstance(work, ScoreWork)
        else replace(work, parts={})
    )
