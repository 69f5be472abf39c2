"""The results that `PackedModel.finish` returns, in numpy and without protobuf:
`services/worker/mesh/codec.py` serialises them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from libs.models.work import DataType, ToolCall


@dataclass(frozen=True, slots=True)
class Stored:
    """An array as tensor.proto stores it.

    `values` holds the stored numbers, little-endian, so that `values.tobytes()` is the message's
    `data`: float32, float16, uint16 (the bits of bfloat16), int8, uint8, or uint8 with eight
    numbers a byte (binary). `shape` counts numbers, also for binary. `scale` and `offset` have one
    float32 a row, and are None where tensor.proto leaves them empty.
    """

    data_type: DataType
    shape: tuple[int, ...]
    values: NDArray[np.generic]
    scale: NDArray[np.float32] | None = None
    offset: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Rows of different lengths, concatenated: values [all tokens, dimensions]; offsets [rows + 1],
    the first 0.
    """

    values: Stored
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class SparseRows:
    """A sparse matrix in CSR form. Row i has the columns `indices[offsets[i]:offsets[i + 1]]`,
    ascending.
    """

    columns: int
    offsets: list[int]
    indices: NDArray[np.uint32]
    values: Stored
    truncated: bool = False
    """Whether a row had more numbers than its share of the answer holds, of which the largest are
    kept.
    """


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of texts, those of text i at `offsets[i]:offsets[i + 1]`.

    `starts`, `ends`: code points of the text, ends exclusive. `tokens`: that each chunk's vectors
    are made of.
    """

    offsets: list[int]  # [texts + 1], the first 0
    starts: list[int]
    ends: list[int]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """Row i is for text i, or for chunk i if texts were divided; representations that were not
    requested are None.
    """

    dense: Stored | None = None  # [texts or chunks, dimensions]
    sparse: SparseRows | None = None
    multi_vector: RaggedRows | None = None
    chunks: Chunks | None = None


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Higher is better."""

    scores: NDArray[np.float32]  # [documents]


@dataclass(frozen=True, slots=True)
class Entity:
    """A labelled span of a text: code points, end exclusive; score 0..1."""

    start: int
    end: int
    label: str
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label and how well it fits: 0..1, for embedding models the cosine to the label's prompt."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Relation:
    """`head` stands in the relation `label` to `tail`; score 0..1."""

    head: Entity
    tail: Entity
    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Region:
    """A labelled box. Edges in pixels from the left and from the top of the upright image; score
    0..1.

    `polygon`: x and y of each corner of its outline in turn, in pixels; empty: the model gives no
    outline.
    """

    label: str
    score: float
    left: float
    top: float
    right: float
    bottom: float
    polygon: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PageText:
    """The text of a document's page. `page` counts from 1. `is_text_layer`: it stood in the file,
    and no model wrote it.
    """

    page: int
    text: str
    is_text_layer: bool


@dataclass(frozen=True, slots=True)
class Classification:
    """The answer to a schema's question: labels best first."""

    name: str
    labels: tuple[LabelScore, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a field: words of the text, from `start` to `end` (exclusive) in code points, or a
    choice; score 0..1.
    """

    text: str
    score: float
    start: int | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a structure. `many`: it is a list; else it has at most one value."""

    name: str
    values: tuple[Value, ...]
    many: bool


@dataclass(frozen=True, slots=True)
class Structure:
    """One thing of the schema's structure `name`, with all of its fields in their order."""

    name: str
    fields: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text and log probability. `top`: the likeliest tokens in its place, in descending
    order.
    """

    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Extraction:
    """The results for one item: entities ordered by start, labels, relations and regions best
    first.

    `pages`: the texts of an item's pages, in their order; `document_pages`: how many pages its
    documents have, read or not. `text`: what a model wrote, `finish`: why it ended, and `json`:
    what it says as an object, where the model writes a form. `tool_calls`: the functions that the
    model called. `tokens`: those of `text`, where their log probabilities were asked for.
    """

    entities: tuple[Entity, ...] = ()
    labels: tuple[LabelScore, ...] = ()
    relations: tuple[Relation, ...] = ()
    regions: tuple[Region, ...] = ()
    pages: tuple[PageText, ...] = ()
    document_pages: int = 0
    text: str = ""
    finish: Literal["", "stop", "length"] = ""
    json: Mapping[str, object] | None = None
    classifications: tuple[Classification, ...] = ()
    structures: tuple[Structure, ...] = ()
    truncated: bool = False
    """Whether results were left out, since the item's share of the answer holds no more."""
    tool_calls: tuple[ToolCall, ...] = ()
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ExtractResult:
    """Entry i for item i. `output_tokens`: that were written, stop tokens among them."""

    items: list[Extraction]
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The tokens of one text.

    Attributes:
        count: Tokens of the whole text. kept_tokens: Tokens that Encode would keep. ids: Of the
        returned tokens, [tokens] uint32. Empty where counts alone are asked for, as are all that
        follow. starts: The first character of each token, code points, [tokens] uint32; 0 for
        special tokens. ends: One past the last character of each token. names: The tokens as the
        vocabulary writes them; empty if they are not asked for. special_before: How many of the
        returned tokens are special ones before the text. special_after: How many of them are
        special ones after the text. kept_start: The first character that Encode would keep.
        kept_end: One past the last character that Encode would keep.
    """

    count: int
    kept_tokens: int
    ids: NDArray[np.uint32]
    starts: NDArray[np.uint32]
    ends: NDArray[np.uint32]
    names: tuple[str, ...] = ()
    special_before: int = 0
    special_after: int = 0
    kept_start: int = 0
    kept_end: int = 0


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """Entry i for text i. `max_tokens`: how many the model takes."""

    items: list[Tokenization]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class DetokenizeResult:
    """Text i for sequence i."""

    texts: list[str]


Result = EncodeResult | ScoreResult | ExtractResult | TokenizeResult | DetokenizeResult
