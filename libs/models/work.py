"""The requests of a model: one Work for each job, without protobuf.

`services/worker/mesh/codec.py` decodes a Job to a Work, and `PackedModel.prepare` turns a Work into
a Prepared. Paths in errors (`items[3].text`, `documents[0].text`, `query.text`, `dimensions`) count
from the job's own first item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from libs.catalog.card import Card
from libs.models.schema import Schema

Role = Literal["", "query", "document"]
Representation = Literal["dense", "sparse", "multi_vector"]
DataType = Literal["float32", "float16", "bfloat16", "int8", "uint8", "binary"]
Truncation = Literal["none", "end", "start", "default"]
"""What is cut of a text that is too long. "default": the model's own end, which `with_truncation`
puts in its place.
"""
Scale = Literal["", "logit", "probability"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
TextKind = Literal["caption", "detailed_caption", "ocr", "ocr_regions"]
TextLayer = Literal["prefer", "only", "never"]
ChunkMethod = Literal["sentences", "tokens", "markdown", "spans"]
Head = str
"""The name of the model's head that a forward runs, or of several heads joined by "+"
(`dense+sparse`).
"""
GENERATE: Final = "write"
"""The head of models that write: a forward adds to the texts of its sequences, and any number of
forwards makes an output.
"""

CancelCheck = Callable[[], None]
"""A cancellation check, called between slices of a job's preparation. Raises if nobody waits for
the job's result any more.
"""


def never_cancelled() -> None:
    """A GoOn for work that is never cancelled."""


YieldPoint = Callable[[], None]
"""A preemption point, called by a forward between two layers, on its thread. May run a forward of
the same model or another.
"""


def never_yield() -> None:
    """A Between for a forward that is never preempted."""


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of an item: a text, or the bytes of an image file. `field`: its path in the job,
    such as `items[3].image`.

    `scope`: whose output of the image may be kept and found again, such as a tenant's; None:
    nobody's.
    """

    content: str | bytes
    field: str
    scope: str | None = None


Parts = tuple[Part, ...]
"""An item's pieces, in the order in which the model reads them."""


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk that the caller chose: code points of its text, end exclusive. `context`: what is put
    before the chunk.
    """

    start: int
    end: int
    context: str = ""


@dataclass(frozen=True, slots=True)
class Chunking:
    """How texts are divided into chunks.

    `max_tokens`: of a chunk, without special tokens, prompt and context; 0: as `dividing.py`
    chooses. `overlap`: tokens that a chunk repeats of the one before. `late`: the model reads whole
    texts, and the states of a chunk's tokens are pooled.
    """

    method: ChunkMethod = "sentences"
    max_tokens: int = 0
    overlap: int = 0
    late: bool = False


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """Texts to vectors. No representations: the model's main one. `dimensions` 0: all. `normalize`
    None: as the checkpoint says.

    `pooling_factor`: how many times fewer vectors a multi-vector is pooled to; 0 or 1: it is not.
    `parts`, here and in other work: the items that are no text alone, by their index; each has an
    empty text in `texts`. `adapter`, here and in other work: the LoRA adapter that the request
    names; empty: none. `chunking`: how each text is divided; None: it is not. `spans`: of each
    text, for the method "spans"; else empty. `contexts`: what is put before each chunk of a text;
    empty: nothing for any text.
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


@dataclass(frozen=True, slots=True)
class ScoreWork:
    """The relevance of each document to the query. `scale` empty: the model's own.

    `query_parts`: of a query that is no text alone; `query` is empty then. `parts`: of documents.
    """

    query: str
    documents: list[str]
    instruction: str = ""
    scale: Scale = ""
    truncation: Truncation = "end"
    query_parts: Parts = ()
    parts: Mapping[int, Parts] = field(default_factory=dict)
    adapter: str = ""


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


@dataclass(frozen=True, slots=True)
class ClassifyWork:
    """Text classification. `multi_label` None: as the checkpoint says.

    `hypothesis`, for zero-shot models, is the template that texts are compared with; `{}` stands
    for the label. Empty: the default of the model's kind. `among_labels`: the softmax is over
    `labels`, not over all classes of the model.
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


@dataclass(frozen=True, slots=True)
class Given:
    """An entity that the request provides: code points, end exclusive, within its text."""

    start: int
    end: int
    label: str = ""


@dataclass(frozen=True, slots=True)
class RelationsWork:
    """Relation extraction: pairs of entities in texts that stand in one of the relations `labels`.

    `entity_labels`: the types of entities, for models that find them. `threshold` None: the model's
    own. `entities`: those of each text, for models that take them as input; empty: none for any
    text.
    """

    texts: list[str]
    labels: tuple[str, ...]
    entity_labels: tuple[str, ...] = ()
    threshold: float | None = None
    truncation: Truncation = "end"
    entities: tuple[tuple[Given, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class RegionsWork:
    """Boxes in images, by label. `threshold` None: the model's own. `texts`: one for each item,
    empty where it has `parts`.
    """

    texts: list[str]
    labels: tuple[str, ...]
    threshold: float | None = None
    parts: Mapping[int, Parts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function by its name. `arguments`: a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """What was said before an item. `tool_calls`: of an assistant."""

    role: Literal["user", "assistant", "system", "tool"]
    text: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request has tokens chosen. None: as the checkpoint says, else neutral; `temperature` 0:
    the likeliest token.
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
    """What a model writes about items. `max_tokens` 0: the model's own. `texts`: one for each item,
    empty where it has `parts`.

    `instruction`: what the model is asked for, or a task of its own by its name. `region`: the part
    of the image that is asked about, left, top, right and bottom in pixels. `text_layer`: "prefer"
    answers pages that have a text layer with it, "only" never asks the model, "never" asks it for
    all pages. `json_schema`, itself JSON: each answer is JSON of that schema, and the model is
    asked for all pages; empty: answers of any form. `turns`: what was said before each item, which
    is the user's next message. `template_values`: what the chat template is given besides, a JSON
    object; empty: nothing.

    `seeds`: of the random numbers of each item's answer; empty: one for all. `stops`: texts that an
    answer ends before. `top_logprobs`: how many likely tokens are wanted with their log
    probabilities beside each written one; None: of none, not of the written ones either.
    `raw_prompt`: a text is the whole prompt, and the space around an answer stays.

    `tools`: functions that the model may call, a JSON list in OpenAI's form; empty: none.
    `calls_tool`: it must call one. `tool`: the one that it must call; empty: any.
    `single_tool_call`: it may call one once. `item_role`: who says the items.
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
    """All that a schema asks for, in texts."""

    texts: list[str]
    schema: Schema
    truncation: Truncation = "end"


@dataclass(frozen=True, slots=True)
class TokenizeWork:
    """Texts to tokens.

    Attributes:
        texts: The texts. add_special_tokens: Whether special tokens are added around each text.
        truncation: Which tokens of a text that is too long are returned. "default": all; "none":
        the text is refused. count_only: Whether counts alone are returned. return_tokens: Whether
        the tokens are returned as the vocabulary writes them, too.
    """

    texts: list[str]
    add_special_tokens: bool = True
    truncation: Truncation = "default"
    count_only: bool = False
    return_tokens: bool = False


@dataclass(frozen=True, slots=True)
class DetokenizeWork:
    """Tokens to texts.

    Attributes:
        sequences: The ids of each text's tokens, uint32 each.
        skip_special_tokens: Whether special tokens are left out.
    """

    sequences: list[NDArray[np.uint32]]
    skip_special_tokens: bool = False


GenerationWork = TextWork | RegionsWork
"""What models that write are asked for: regions are written as text."""

TokenWork = TokenizeWork | DetokenizeWork
"""Work of a tokenizer alone, which needs no forward."""

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
    """The same work with the model's own truncation where the request names none."""
    if isinstance(work, RegionsWork | TextWork | TokenWork) or work.truncation != "default":
        return work
    return replace(work, truncation=card.truncation)


def parts_of(work: Work) -> list[Part]:
    """The parts of every item that is no text alone, the query's first."""
    if isinstance(work, EntitiesWork | RelationsWork | StructureWork | TokenWork):
        return []
    query = work.query_parts if isinstance(work, ScoreWork) else ()
    return [*query, *(part for parts in work.parts.values() for part in parts)]


def items_as_parts(
    work: EncodeWork | ScoreWork | ClassifyWork | RegionsWork | TextWork,
) -> list[Parts]:
    """The parts of each item, documents of a ScoreWork; a text alone is one part."""
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
    """The work without the bytes of its images, which are no longer needed once it is prepared."""
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


@dataclass(frozen=True, slots=True)
class InputRows:
    """The input of those tokens of a sequence that have none in the vocabulary: image patches, or
    embeddings made elsewhere.

    `places`: [n] int32, ascending, which tokens they are. `values`: [n, InputLayer.row_size]; or,
    where the model's backbone has a tower, the tower's input, of which it makes n rows. `more`:
    further input of the tower, where a sequence has several images.
    """

    places: NDArray[np.int32]
    values: NDArray[np.generic]
    more: tuple[NDArray[np.generic], ...] = ()

    @property
    def inputs(self) -> tuple[NDArray[np.generic], ...]:
        """All input of the tower, in the order of its rows."""
        return self.values, *self.more


@dataclass(frozen=True, slots=True)
class InputSequence:
    """One row of a packed batch. int32 [tokens] each; no type ids: all of segment 0.

    `skip`: leading tokens that are left out of pooling, for models that do not pool their prompt.
    `seen`: leading tokens that the sequence's tokens attend to (0: all); the tokens after them
    attend but are not attended to, as a ColBERT query's mask tokens. `before`: a shared prefix,
    computed once for all sequences of a batch that have the same one, causal models only. `input`:
    further input of the model's head for this sequence (positions of words or labels); None for
    most. `adapter`: its LoRA adapter; empty: none. `rows`: the input of tokens that have no id, for
    which `ids` has a placeholder within the vocabulary. `axes`: [axes, tokens], positions in
    several dimensions (M-RoPE, DINOv3); None: a token's position is its place. `key`: sequences
    with the same have the same output, which may be kept and found again; empty: nothing is known
    of it.
    """

    ids: NDArray[np.int32]
    type_ids: NDArray[np.int32] | None = None
    skip: int = 0
    seen: int = 0
    before: NDArray[np.int32] | None = None
    input: object | None = None
    adapter: str = ""
    rows: InputRows | None = None
    axes: NDArray[np.int32] | NDArray[np.float32] | None = None
    key: bytes = b""

    @property
    def tokens(self) -> int:
        """Its own tokens, without the shared prefix."""
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class SparseRow:
    """A sparse vector, over the vocabulary or over spans: `indices` of the non-zero weights,
    ascending; `values` float32, as many.

    Indices are int32, or int64 where there are more columns."""

    indices: NDArray[np.int32] | NDArray[np.int64]
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The log probability of a token that was written, and of the likeliest ones in its place, in
    descending order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class GeneratedIds:
    """The tokens that a model wrote after a prompt, int32, a stop token among them. `finish`: why
    it ended. `scores`: of each token, where they were asked for."""

    ids: NDArray[np.int32]
    finish: Literal["stop", "length"]
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Not an output yet: the sequence needs a further forward. `ids`: the tokens so far; the next
    forward may add to them.
    """

    ids: Sequence[int] = field(default=(), compare=False)


Output = NDArray[np.float32] | SparseRow | GeneratedIds | tuple["Output", ...]
"""The output of a head for one sequence; a tuple for several heads, in the order of their names."""

Forwarded = Output | Unfinished
"""What a forward gives for one sequence."""


def outputs_of(forwarded: Sequence[Forwarded]) -> list[Output]:
    """The outputs of a forward of a model that does not write. Raises TypeError for any other's."""
    found = [each for each in forwarded if not isinstance(each, Unfinished)]
    if len(found) != len(forwarded):
        raise TypeError("a sequence is unfinished")
    return found


def is_finite(output: Output) -> bool:
    """Whether every number of an output is finite."""
    if isinstance(output, tuple):
        return all(is_finite(part) for part in output)
    if isinstance(output, GeneratedIds):
        return True
    values = output.values if isinstance(output, SparseRow) else output
    return bool(np.isfinite(values).all())


ANY_BYTES: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job ready for the device: `forward(head, sequences)`, then `finish(prepared, outputs)` with
    one output a sequence.

    `notes`: state that the processor passes from `prepare` to `finish`. `looked_up`: tokens of
    texts that need no forward and have no sequence, since their result was looked up and is in
    `notes`. `heads`: of each sequence, where they differ (texts and images in one job go to
    encoders of their own); empty: `head` for all. `fields`: the path in the job of what each
    sequence was made of, where that is no item's text. `image_tokens`: those of all tokens that
    were made of images. `known`: outputs that were kept, by the index of their sequence, which then
    needs no forward.
    """

    work: Work
    head: Head
    sequences: list[InputSequence]
    notes: object | None = None
    looked_up: int = 0
    heads: tuple[Head, ...] = ()
    fields: tuple[str, ...] = ()
    image_tokens: int = 0
    known: Mapping[int, Output] = field(default_factory=dict)
    answer_bytes: int = ANY_BYTES
    """The most bytes that the results of one item may take in the answer."""

    def groups(self) -> dict[Head, list[int]]:
        """The indices of the sequences of each head that need a forward, in order."""
        found: dict[Head, list[int]] = {}
        for index in range(len(self.sequences)):
            if index not in self.known:
                found.setdefault(self.heads[index] if self.heads else self.head, []).append(index)
        return found

    @property
    def tokens(self) -> int:
        """Tokens that go through the model or are looked up, special tokens, prompts and labels
        included.
        """
        shared = {
            id(sequence.before): len(sequence.before)
            for sequence in self.sequences
            if sequence.before is not None
        }
        return (
            sum(sequence.tokens for sequence in self.sequences)
            + sum(shared.values())
            + self.looked_up
        )
