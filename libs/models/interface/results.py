"""The results that `PackedModel.finish` returns, in numpy and without protobuf.

`services/worker/mesh/codec.py` serialises them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from libs.models.interface.work import DataType, ToolCall


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array as tensor.proto stores it.

    Attributes:
        shape: Counts numbers, also for binary.
        values: The stored numbers, little-endian, so `values.tobytes()` is the message's `data`:
            float32, float16, uint16 (the bits of bfloat16), int8, uint8, or uint8 with eight
            numbers a byte (binary).
        scale: One float32 a row; None where tensor.proto leaves it empty.
        offset: As `scale`.
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

    values: StoredArray
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class SparseRows:
    """A sparse matrix in CSR form. Row i has the columns `indices[offsets[i]:offsets[i + 1]]`,
    ascending.
    """

    columns: int
    offsets: list[int]
    indices: NDArray[np.uint32]
    values: StoredArray
    truncated: bool = False
    """True if a row had more numbers than its share of the answer holds. The largest are kept."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of texts. Text i has the chunks `offsets[i]:offsets[i + 1]`.

    Attributes:
        starts: First code point of each chunk in its text.
        ends: Code point after each chunk.
        tokens: Number of tokens that each chunk's vectors are computed from.
        pages: Page of its document on which each chunk begins, 0 for a text; empty without
            documents.
        texts: Text of each chunk; empty if they are not returned.
        continues: The first chunks are further ones of the text before; of a part of an answer.
    """

    offsets: list[int]  # [texts + 1], the first 0
    starts: list[int]
    ends: list[int]
    tokens: list[int]
    pages: Sequence[int] = ()
    texts: Sequence[str] = ()
    continues: bool = False


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """Row i is for text i, or for chunk i of chunked texts. Representations that were not requested
    are None.
    """

    dense: StoredArray | None = None  # [texts or chunks, dimensions]
    sparse: SparseRows | None = None
    multi_vector: RaggedRows | None = None
    chunks: Chunks | None = None


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Scores of documents. Higher is better."""

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
    """A label and its score: 0..1; for embedding models the cosine to the label's prompt."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation `label` from `head` to `tail`; score 0..1."""

    head: Entity
    tail: Entity
    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Region:
    """A labelled box. Edges in pixels from the left and from the top of the upright image; score
    0..1.

    `polygon`: x and y of each corner of the outline in turn, in pixels; empty if the model returns
    no outline.
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
    """The text of a document's page. `page` counts from 1.

    Attributes:
        is_text_layer: Whether the text was read from the file, not generated.
    """

    page: int
    text: str
    is_text_layer: bool


@dataclass(frozen=True, slots=True)
class Classification:
    """The labels of a schema's classification, best first."""

    name: str
    labels: tuple[LabelScore, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a field: words of the text or a choice; score 0..1. `start` and `end` (exclusive)
    are code points.
    """

    text: str
    score: float
    start: int | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a structure. Without `many` it has at most one value."""

    name: str
    values: tuple[Value, ...]
    many: bool


@dataclass(frozen=True, slots=True)
class Structure:
    """One instance of the schema's structure `name`, with all of its fields in their order."""

    name: str
    fields: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text and log probability.

    Attributes:
        top: The most likely alternatives, in descending order.
    """

    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Extraction:
    """The results for one item: entities ordered by start, labels, relations and regions best
    first.

    Attributes:
        pages: Texts of the item's pages, in their order.
        document_pages: Number of pages of its documents, read or not.
        text: Generated text.
        finish: Reason why generation ended.
        json: The generated object, if the model generates a form.
        truncated: Results were dropped because the item's share of the answer is full.
        tool_calls: Functions that the model called.
        tokens: Tokens of `text`, if their log probabilities were requested.
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
    tool_calls: tuple[ToolCall, ...] = ()
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ExtractResult:
    """Entry i for item i.

    Attributes:
        output_tokens: Number of generated tokens, including stop tokens.
    """

    items: list[Extraction]
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The tokens of one text.

    Attributes:
        count: Tokens of the whole text.
        kept_tokens: Tokens that Encode would keep.
        ids: Ids of the returned tokens, [tokens] uint32. Empty for a count only, as are all fields
            below.
        starts: First character of each token, code points, [tokens] uint32; 0 for special tokens.
        ends: Character after each token.
        names: The tokens as the vocabulary writes them; empty unless requested.
        special_before: Number of returned special tokens before the text.
        special_after: Number of returned special tokens after the text.
        kept_start: First character that Encode would keep.
        kept_end: Character after the last one that Encode would keep.
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
    """Entry i for text i.

    Attributes:
        max_tokens: The model's limit.
    """

    items: list[Tokenization]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class DetokenizeResult:
    """Text i for sequence i."""

    texts: list[str]


Result = EncodeResult | ScoreResult | ExtractResult | TokenizeResult | DetokenizeResult
