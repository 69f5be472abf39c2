"""The limits of a request: the one list that `requests.py` enforces and that users read.

`python -m services.router.admission.validation.limits` prints the table in docs/security.md, and
the comments of the fields in protos/ give the same numbers. tests/router/test_limits.py compares
them, and finds fields of requests that have no limit here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shoal.v1 import inference_pb2 as pb

from libs import embedding_id
from libs.aliases import MAX_ALIASES
from libs.documents import limits as documents
from libs.errors import InvalidInput
from libs.serving.calls import multiplex
from libs.serving.calls.decode import MAX_REQUEST_BYTES

KIB: Final = 1024
MIB: Final = 1024 * 1024
CHARACTERS: Final = "characters"
BYTES: Final = "bytes"
SECONDS: Final = "seconds"
ENTRIES: Final = "entries"
PIXELS: Final = "pixels"
PAGES: Final = "pages"


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of message fields."""

    what: str
    fields: tuple[str, ...]
    """Fields of messages of shoal.v1, such as `Item.text`, or whole messages."""
    most: int
    unit: str

    @property
    def number(self) -> str:
        """Return the number in the form of the table and the protos' comments: `4 MiB`,
        `16,384`.
        """
        if self.unit != BYTES:
            return f"{self.most:,}"
        return f"{self.most // KIB} KiB" if self.most < MIB else f"{self.most // MIB} MiB"

    def check(self, count: int, path: str, cure: str = "") -> None:
        """Raise InvalidInput for a field that holds too much. `cure`: what to do instead."""
        if count > self.most:
            message = f"{path} has {count:,} {self.unit}; at most {self.most:,} are allowed"
            raise InvalidInput(f"{message}: {cure}" if cure else message, field=path)


_REQUESTS: Final = ("EncodeRequest", "ScoreRequest", "ExtractRequest")
_OF_TOKENS: Final = ("TokenizeRequest", "DetokenizeRequest")
_LABELS: Final = (
    "EntitiesTask.labels",
    "ClassifyTask.labels",
    "RelationsTask.labels",
    "RelationsTask.entity_labels",
    "RegionsTask.labels",
)
_OF_MODELS: Final = (
    "GetModelRequest",
    "LoadModelRequest",
    "EvictModelRequest",
    "PinModelRequest",
    "ExplainPlacementRequest",
)

REQUEST: Final = Limit("a whole request", (*_REQUESTS, *_OF_TOKENS), MAX_REQUEST_BYTES, BYTES)
READ: Final = Limit(
    "bytes that all items make a worker read, including those repeated for each",
    _REQUESTS,
    256 * MIB,
    BYTES,
)
"""Four requests of the largest size: a query of 131,072 characters with 10,000 documents of one
letter would be 1.3 GB.
"""
SCORE_BYTES: Final = 16
"""Approximate bytes of a label in an answer in addition to its name."""
ANSWERED: Final = Limit(
    f"labels that an answer may repeat: their bytes and {SCORE_BYTES} for each, for each item",
    ("ExtractRequest",),
    4 * MIB,
    BYTES,
)
"""Enough for 1,000 items with 256 labels of one letter. A client with gRPC's default limit reads no
more, and a router, a worker and a client each hold up to twelve times that while it is sent or
read.
"""
SHARED: Final = Limit(
    "size shared by all items' results in addition to as many bytes as the request has: entities,"
    " relations, regions,"
    " structures, texts of pages (workers leave out the results with the lowest scores and set"
    " `Extraction.truncated`)",
    ("ExtractRequest",),
    4 * MIB,
    BYTES,
)
"""The limit ANSWERED for results that depend on the content. Each item has an equal share: a single
item all of it, and one of 10,000 still some ten results in addition to its bytes.
"""
GENERATED: Final = Limit(
    "tokens that may be generated: `max_tokens` for each item or page, 256 for each"
    " label of regions",
    ("TextTask.max_tokens",),
    1_048_576,
    "tokens",
)
"""Enough for 4,096 answers of the usual 256 tokens, some 4 MiB of text."""
ENCODED: Final = Limit(
    "vectors of one answer of Encode, by their dimensions and estimated tokens",
    ("EncodeRequest",),
    16 * MIB,
    BYTES,
)
"""Enough for 1,024 vectors of 4,096 float32 numbers, or 10,000 of 384."""
STREAMED: Final = Limit(
    "vectors of all answers of one EncodeStream, by their dimensions and estimated tokens",
    ("EncodeRequest",),
    1 << 30,
    BYTES,
)
"""The vectors of 524,288 tokens with 128 float32 numbers take 256 MiB. This bounds the work that
one request can cause; the memory of answers that clients have not read is limited by
`InFlightMemory`.
"""
SPARSE: Final = Limit(
    "size shared by all items' sparse vectors (workers leave out the smallest weights and set"
    " `SparseMatrix.truncated`)",
    ("EncodeRequest",),
    32 * MIB,
    BYTES,
)
"""Enough for 419 weights in each of 10,000 vectors, or 4,194 in each of 1,000; SPLADE models return
100 to 300. Their number is not known before the forward pass.
"""
TOKENIZED: Final = Limit(
    "tokens or texts of one answer of Tokenize or Detokenize, by the bytes or ids in the request",
    _OF_TOKENS,
    16 * MIB,
    BYTES,
)
"""Enough for the tokens of 1.3 MB of any text, with their positions."""
ITEMS: Final = Limit(
    "items",
    (
        "EncodeRequest.items",
        "ScoreRequest.documents",
        "ExtractRequest.items",
        "TokenizeRequest.texts",
        "DetokenizeRequest.sequences",
    ),
    10_000,
    ENTRIES,
)
TOKENIZED_TEXT: Final = Limit("a text to be tokenized", ("TokenizeRequest.texts",), 96 * KIB, BYTES)
"""It is tokenized as a whole, which takes about 600 bytes of memory a token: 59 MB for 96 KiB of
punctuation, where each byte is a token. 512 KiB took 300 MB, far more than 16 times its bytes and
64 MB, which is what any request may take."""
IDS: Final = Limit(
    "ids of all sequences to be turned into texts", ("TokenIds.ids",), 131_072, ENTRIES
)
TEXT: Final = Limit(
    "an item's text, of all its parts together", ("Item.text", "Part.text"), 4 * MIB, BYTES
)
"""A book has 1 MB, and the longest sequences of models (128k tokens) 0.6 MB."""
IMAGE: Final = Limit("an image's file", ("Image.data",), 16 * MIB, BYTES)
IMAGE_PIXELS: Final = Limit(
    "an image's pixels, by its file's header", ("Image.data",), 50_000_000, PIXELS
)
"""The worker's limit (libs/models/images/decoding.py), so that images which it would refuse are
refused here if their header gives the size.
"""
DOCUMENT: Final = Limit("a document's file", ("Document.data",), documents.BYTES, BYTES)
FILES: Final = Limit(
    "files that the items of a request share",
    tuple(f"{name}.files" for name in _REQUESTS),
    documents.FILES,
    ENTRIES,
)
FILE: Final = Limit(
    "a shared file", tuple(f"{name}.files" for name in _REQUESTS), documents.BYTES, BYTES
)
DPI: Final = Limit(
    "dots per inch of a document's pages",
    ("Document.dots_per_inch",),
    documents.MAX_DPI,
    "dots per inch",
)
UNKNOWN_PAGES: Final = Limit(
    "pages of a document without a last page",
    ("Document.last_page",),
    documents.UNKNOWN_PAGES,
    PAGES,
)
"""The number of pages with which such a document is priced. The worker refuses a document that has
more, or with `chunking` more than its share of REQUEST_PAGES.
"""
ITEM_PAGES: Final = Limit(
    "pages of an item, of all its documents together", ("Item.parts",), documents.PAGES, PAGES
)
CHUNKED_PAGES: Final = Limit(
    "pages of a document that is divided into chunks",
    ("Document.last_page",),
    documents.CHUNKED_PAGES,
    PAGES,
)
REQUEST_PAGES: Final = Limit(
    "pages of all items of a request", _REQUESTS, documents.REQUEST_PAGES, PAGES
)
DOCUMENT_PAGES: Final = Limit(
    "pages of a document, read or not (checked by workers)",
    ("Document.data",),
    documents.LENGTH,
    PAGES,
)
PAGE_PIXELS: Final = Limit(
    "a page's pixels, as rendered (checked by workers)",
    ("Document.data",),
    documents.PIXELS,
    PIXELS,
)
ITEM_PIXELS: Final = Limit(
    "pixels of all pages of an item (checked by workers)",
    ("Item.parts",),
    documents.ITEM_PIXELS,
    PIXELS,
)
PAGE_SECONDS: Final = Limit(
    "processor time of opening a document, or of one page (checked by workers)",
    ("Document.data",),
    documents.PAGE_SECONDS,
    SECONDS,
)
ITEM_SECONDS: Final = Limit(
    "time of reading all pages of an item (checked by workers)",
    ("Item.parts",),
    int(documents.ITEM_SECONDS),
    SECONDS,
)
ARCHIVE_FILES: Final = Limit(
    "files in a document that is a ZIP archive: DOCX, XLSX, PPTX, EPUB (checked by workers)",
    ("Document.data",),
    documents.ARCHIVE_FILES,
    ENTRIES,
)
ARCHIVE_BYTES: Final = Limit(
    "size of all files in a ZIP archive, uncompressed (checked by workers)",
    ("Document.data",),
    documents.ARCHIVE_BYTES,
    BYTES,
)
ARCHIVE_FILE_BYTES: Final = Limit(
    "size of one file that is read from a ZIP archive, uncompressed (checked by workers)",
    ("Document.data",),
    documents.ARCHIVE_FILE_BYTES,
    BYTES,
)
ARCHIVE_RATIO: Final = Limit(
    "compression of a file of more than 1 MiB in a ZIP archive (checked by workers)",
    ("Document.data",),
    documents.ARCHIVE_RATIO,
    "times",
)
DOCUMENT_DEPTH: Final = Limit(
    "elements of XML or HTML inside one another in a document (checked by workers)",
    ("Document.data",),
    documents.DEPTH,
    ENTRIES,
)
DOCUMENT_HTML: Final = Limit(
    "HTML of a document, or of a chapter of a book (checked by workers; a web page by routers, "
    "too)",
    ("Document.data",),
    documents.HTML_BYTES,
    BYTES,
)
SHEET_CELLS: Final = Limit(
    "cells of a sheet's used area, with or without a value (checked by workers)",
    ("Document.data",),
    documents.SHEET_CELLS,
    "cells",
)
CONVERTED_BYTES: Final = Limit(
    "Markdown of a document that is not a PDF file (checked by workers)",
    ("Document.data",),
    documents.CONVERTED_BYTES,
    BYTES,
)
PARTS: Final = Limit("parts of an item", ("Item.parts",), 64, ENTRIES)
QUERY: Final = Limit("a query's text", ("ScoreRequest.query",), 131_072, CHARACTERS)
"""A cross-encoder reads it with each document: 32k tokens, above the limit of any served model."""
EMBEDDING_ID: Final = Limit(
    "a required embedding id",
    ("EncodeRequest.expect_embedding_id",),
    embedding_id.MAX_ID_CHARACTERS,
    CHARACTERS,
)
INSTRUCTION: Final = Limit(
    "an instruction",
    ("EncodeRequest.instruction", "ScoreRequest.instruction", "TextTask.instruction"),
    16_384,
    CHARACTERS,
)
"""The longest instruction that a model's card names has 600 characters; few-shot examples also fit.
"""
JSON_SCHEMA: Final = Limit(
    "a JSON Schema of answers (the worker has more limits)",
    ("TextTask.json_schema",),
    32 * KIB,
    BYTES,
)
"""The worker's limit (libs/models/generation/grammars/schemas.py)."""
TURNS: Final = Limit("turns before an item", ("TextTask.turns",), 128, ENTRIES)
TURNS_TEXT: Final = Limit(
    "the texts of all turns", ("Turn.text", "ToolCall.arguments"), 65_536, CHARACTERS
)
"""Generative models have at most 8,192 tokens for a prompt and its answer."""
TEMPLATE_VALUES: Final = Limit(
    "values for the chat template", ("TextTask.template_values",), 4 * KIB, BYTES
)
STOPS: Final = Limit("texts that end an answer", ("TextTask.stop",), 16, ENTRIES)
STOP: Final = Limit("a text that ends an answer", ("TextTask.stop",), 256, CHARACTERS)
TOP_LOGPROBS: Final = Limit(
    "likely alternatives for each generated token", ("TextTask.top_logprobs",), 20, "tokens"
)
LOGPROBS: Final = Limit("log probabilities of an answer", ("ExtractRequest",), 64 * MIB, BYTES)
TOOLS: Final = Limit("functions that a model may call", ("TextTask.tools",), 64 * KIB, BYTES)
"""They precede each text, and have some 10,000 tokens."""
TOOL_CALLS: Final = Limit(
    "calls of a turn, and functions that a model may call",
    ("Turn.tool_calls", "TextTask.tools"),
    64,
    ENTRIES,
)
TOOL_NAME: Final = Limit("a function's name", ("TextTask.tool", "ToolCall.name"), 64, CHARACTERS)
POOLING: Final = Limit(
    "the factor by which multi-vectors are pooled",
    ("EncodeRequest.pooling_factor",),
    64,
    "times",
)
CHUNKED: Final = Limit(
    "an item's text that is divided into chunks",
    ("Chunking",),
    documents.CHUNKED_BYTES,
    BYTES,
)
"""The text of a book of 400 pages. A worker counts its tokens some four times, 2 s of one thread.
"""
DIVIDED: Final = Limit(
    "the text of a document that is divided into chunks (checked by workers; plain text and "
    "Markdown by routers, too)",
    ("Chunking",),
    documents.DIVIDED_BYTES,
    BYTES,
)
CHUNKS: Final = Limit(
    "chunks of an item, and its spans (checked by workers, too)",
    ("Chunking", "Item.spans"),
    8192,
    ENTRIES,
)
"""The worker's limit (libs/models/text/processing/chunking/dividing.py)."""
REQUEST_CHUNKS: Final = Limit(
    "chunks of a request, by their estimated number", ("Chunking", "Item.spans"), 65_536, ENTRIES
)
SPANNED: Final = Limit("the texts and contexts of an item's spans", ("Item.spans",), 4 * MIB, BYTES)
"""The limit of an item's text: spans may overlap, and each is read."""
CONTEXT: Final = Limit("text before chunks", ("Item.context", "Span.context"), 4096, CHARACTERS)
CHUNK_CONTEXTS: Final = Limit(
    (
        "the contexts of all chunks of an item, by the estimated number of chunks (by workers "
        "their "
        "characters)"
    ),
    ("Item.context",),
    4 * MIB,
    BYTES,
)
"""Each chunk is read with a copy."""
CHUNK_TOKENS: Final = Limit("tokens of a chunk", ("Chunking.max_tokens",), 32_768, "tokens")
CHUNK_OVERLAP: Final = Limit(
    "tokens that chunks repeat of the one before", ("Chunking.overlap",), 16_384, "tokens"
)
_WINDOW_FIELDS: Final = ("ScoreRequest.window_overlap", "ExtractRequest.window_overlap")
WINDOWED: Final = Limit("an item's text that is read in windows", _WINDOW_FIELDS, MIB, BYTES)
"""The limit of a text that is divided into chunks: reading either takes the same work."""
WINDOWS: Final = Limit(
    "windows of an item, by their estimated number (checked by workers, too)",
    _WINDOW_FIELDS,
    2048,
    ENTRIES,
)
"""The worker's limit (libs/models/text/windows/spans.py): a million tokens of a model that takes
512. Each window repeats the labels or the query, so their number bounds the work of an item.
"""
REQUEST_WINDOWS: Final = Limit(
    "windows of a request, by their estimated number, each for each label that is paired with it",
    _WINDOW_FIELDS,
    16_384,
    ENTRIES,
)
WINDOW_OVERLAP: Final = Limit(
    "tokens that windows repeat of the one before", _WINDOW_FIELDS, 16_384, "tokens"
)
HYPOTHESIS: Final = Limit("a hypothesis", ("ClassifyTask.hypothesis",), 1024, CHARACTERS)
PLACES: Final = Limit(
    "places for the label in a hypothesis", ("ClassifyTask.hypothesis",), 8, "places"
)
LABELS: Final = Limit("labels of a list", _LABELS, 256, ENTRIES)
LABEL: Final = Limit("a label", _LABELS, 1024, CHARACTERS)
"""Zero-shot models were trained on labels of a few words; some are given whole sentences."""
SCHEMA_NAMES: Final = (
    "SchemaLabel.label",
    "SchemaClassification.name",
    "SchemaStructure.name",
    "SchemaField.name",
    "SchemaField.choices",
)
SCHEMA: Final = Limit("all texts of a schema", ("StructureTask",), 64 * KIB, BYTES)
"""A model reads them before each text, and they take some thousand tokens."""
SCHEMA_LABELS: Final = Limit(
    "labels of entities or of a classification",
    ("StructureTask.entities", "SchemaClassification.labels"),
    256,
    ENTRIES,
)
SCHEMA_NAME: Final = Limit("a name or a choice in a schema", SCHEMA_NAMES, 256, CHARACTERS)
DESCRIPTION: Final = Limit(
    "a description in a schema",
    ("SchemaLabel.description", "SchemaClassification.description", "SchemaField.description"),
    1024,
    CHARACTERS,
)
CLASSIFICATIONS: Final = Limit(
    "classifications of a schema", ("StructureTask.classifications",), 32, ENTRIES
)
RELATIONS: Final = Limit("relations of a schema", ("StructureTask.relations",), 64, ENTRIES)
STRUCTURES: Final = Limit("structures of a schema", ("StructureTask.structures",), 16, ENTRIES)
FIELDS: Final = Limit("fields of a structure", ("SchemaStructure.fields",), 32, ENTRIES)
CHOICES: Final = Limit("choices of a field", ("SchemaField.choices",), 64, ENTRIES)
ENTITIES: Final = Limit("entities of an item", ("Item.entities",), 128, ENTRIES)
"""A model scores all pairs of them."""
ENTITY: Final = Limit("an entity's text", ("Entity.text",), 1000, CHARACTERS)
ENTITY_LABEL: Final = Limit("an entity's label", ("Entity.label",), 256, CHARACTERS)
"""An answer repeats both for each of its relations."""
REPRESENTATIONS: Final = Limit(
    "representations",
    ("EncodeRequest.representations",),
    len(pb.Representation.values()) - 1,
    ENTRIES,
)  # one of each kind, without UNSPECIFIED
ID: Final = Limit(
    "an id of a model or an adapter",
    tuple(f"{name}.model" for name in (*_REQUESTS, *_OF_TOKENS, *_OF_MODELS))
    + tuple(f"{name}.adapter" for name in _REQUESTS)
    + tuple(f"Alias.{name}" for name in ("model", "next_model", "previous_model")),
    256,
    CHARACTERS,
)
ALIAS: Final = Limit(
    "the name of an alias", ("Alias.name", "RemoveAliasRequest.name"), 128, CHARACTERS
)
ALIASES: Final = Limit("aliases of a mesh", ("SetAliasRequest.alias",), MAX_ALIASES, ENTRIES)
ALIAS_OUTPUT: Final = Limit(
    "the location of the vectors of an alias' next model", ("Alias.output",), 1024, CHARACTERS
)
POOL: Final = Limit(
    "a pool's name",
    tuple(f"{name}.pool" for name in (*_REQUESTS, *_OF_TOKENS, "LoadModelRequest")),
    63,
    CHARACTERS,
)
_CALL: Final = "MultiplexedCall"
MULTIPLEX: Final = Limit(
    "all calls of one message of a client's stream",
    ("MultiplexRequest", f"{_CALL}.encode", f"{_CALL}.score", f"{_CALL}.extract"),
    multiplex.MAX_STREAM_MESSAGE_BYTES,
    BYTES,
)
CALLS: Final = Limit(
    "calls of one message of a client's stream",
    ("MultiplexRequest.calls",),
    multiplex.MESSAGE_CALLS,
    ENTRIES,
)
REQUEST_ID: Final = Limit(
    "a call's request id", (f"{_CALL}.request_id",), multiplex.REQUEST_ID_CHARACTERS, CHARACTERS
)
TRACEPARENT: Final = Limit(
    "a call's trace context",
    (f"{_CALL}.traceparent",),
    multiplex.TRACEPARENT_CHARACTERS,
    CHARACTERS,
)
TRACESTATE: Final = Limit(
    "a call's trace state", (f"{_CALL}.tracestate",), multiplex.TRACESTATE_CHARACTERS, CHARACTERS
)

ALL: Final = (
    REQUEST,
    READ,
    ANSWERED,
    SHARED,
    GENERATED,
    ENCODED,
    STREAMED,
    SPARSE,
    TOKENIZED,
    ITEMS,
    TOKENIZED_TEXT,
    IDS,
    TEXT,
    IMAGE,
    IMAGE_PIXELS,
    DOCUMENT,
    FILES,
    FILE,
    DPI,
    UNKNOWN_PAGES,
    ITEM_PAGES,
    CHUNKED_PAGES,
    REQUEST_PAGES,
    DOCUMENT_PAGES,
    PAGE_PIXELS,
    ITEM_PIXELS,
    PAGE_SECONDS,
    ITEM_SECONDS,
    ARCHIVE_FILES,
    ARCHIVE_BYTES,
    ARCHIVE_FILE_BYTES,
    ARCHIVE_RATIO,
    DOCUMENT_DEPTH,
    DOCUMENT_HTML,
    SHEET_CELLS,
    CONVERTED_BYTES,
    PARTS,
    QUERY,
    EMBEDDING_ID,
    INSTRUCTION,
    JSON_SCHEMA,
    TURNS,
    TURNS_TEXT,
    TEMPLATE_VALUES,
    STOPS,
    STOP,
    TOP_LOGPROBS,
    LOGPROBS,
    TOOLS,
    TOOL_CALLS,
    TOOL_NAME,
    POOLING,
    CHUNKED,
    DIVIDED,
    CHUNKS,
    REQUEST_CHUNKS,
    SPANNED,
    CONTEXT,
    CHUNK_CONTEXTS,
    CHUNK_TOKENS,
    CHUNK_OVERLAP,
    WINDOWED,
    WINDOWS,
    REQUEST_WINDOWS,
    WINDOW_OVERLAP,
    HYPOTHESIS,
    PLACES,
    LABELS,
    LABEL,
    SCHEMA,
    SCHEMA_LABELS,
    SCHEMA_NAME,
    DESCRIPTION,
    CLASSIFICATIONS,
    RELATIONS,
    STRUCTURES,
    FIELDS,
    CHOICES,
    ENTITIES,
    ENTITY,
    ENTITY_LABEL,
    REPRESENTATIONS,
    ID,
    ALIAS,
    ALIASES,
    ALIAS_OUTPUT,
    POOL,
    MULTIPLEX,
    CALLS,
    REQUEST_ID,
    TRACEPARENT,
    TRACESTATE,
)


def table(limits: Sequence[Limit] = ALL) -> str:
    """Return the limits as a Markdown table."""
    lines = ["| what | fields | at most |", "| --- | --- | --- |"]
    for limit in limits:
        fields = ", ".join(f"`{field}`" for field in limit.fields)
        unit = "" if limit.unit == BYTES else f" {limit.unit}"
        lines.append(f"| {limit.what} | {fields} | {limit.number}{unit} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
