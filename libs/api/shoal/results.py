"""The results of calls: frozen dataclasses over numpy arrays.

Arrays are views of the received buffers wherever the wire format allows it, and therefore
read-only; ask for `writable=True` to change them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar

import numpy as np
import numpy.typing as npt

from shoal.extractions import Extraction
from shoal.status import AliasModels

if TYPE_CHECKING:
    from scipy.sparse import csr_array

R = TypeVar("R")
_MAX_SHOWN = 3
"""Items that the repr of a result shows."""

Form = Literal["dense", "sparse", "multi_vector"]
DataType = Literal["float32", "float16", "bfloat16", "int8", "uint8", "binary"]
Numbers = npt.NDArray[np.number]
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Usage:
    """Resource usage of a call."""

    input_tokens: int
    """Tokens that the model read, including special tokens, prompts and labels; counted, not
    estimated.
    """
    image_tokens: int = 0
    """The part of these for images."""
    output_tokens: int = 0
    """Tokens that the model generated."""
    truncated_items: int = 0
    """Items or documents that were cut because they had more tokens than the model takes."""
    truncated_query: bool = False
    """Whether the query, or a label that the model reads as a text, was cut."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The seconds spent in each stage; for a call that was split, the longest among its
    requests.
    """

    queue_seconds: float
    prepare_seconds: float
    wait_seconds: float
    forward_seconds: float
    finish_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class ResolvedAlias(AliasModels):
    """The models of an alias when the mesh admitted the request.

    Attributes:
        model: The model that answered.
        next_model: The model to which the alias is being changed; empty: no change is in progress.
        previous_model: The model before the last change; empty: no change, or it is finished.
        revision: Revision of the alias.
    """

    model: str
    next_model: str = ""
    previous_model: str = ""
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Skipped:
    """An item that was skipped (`on_invalid="skip"`): its index in the caller's list, and reason
    and message of the error.
    """

    index: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """One row per item, in the requested data type.

    `array` is [items, dimensions] of float32 (also for "bfloat16", which numpy does not have),
    float16, int8 or uint8; for "binary" it is uint8 [items, ceil(dimensions / 8)], eight numbers a
    byte, most significant bit first. `scale` and `offset` are [items].
    """

    array: Numbers
    data_type: DataType
    dimensions: int
    scale: Floats | None = None
    offset: Floats | None = None

    def __repr__(self) -> str:
        return f"Vectors({len(self.array)} x {self.dimensions} {self.data_type})"

    def dequantize(self) -> Floats:
        """Return float32 [items, dimensions]: int8 and uint8 are scaled back, a set bit of "binary"
        becomes 1 and a clear one -1.
        """
        if self.data_type == "binary":
            return self.bits().astype(np.float32) * 2 - 1
        floats = self.array.astype(np.float32, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):  # the mesh may have sent any numbers
            if self.scale is not None:
                floats = floats * self.scale[:, None]
            return floats if self.offset is None else floats + self.offset[:, None]

    def bits(self) -> npt.NDArray[np.uint8]:
        """Return uint8 [items, dimensions] of 0 and 1: 1 where the number is > 0. For data type
        "binary" only.
        """
        if self.data_type != "binary":
            raise ValueError(f'bits are for data type "binary"; these vectors are {self.data_type}')
        return np.unpackbits(
            self.array.astype(np.uint8, copy=False), axis=-1, count=self.dimensions
        )


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Concatenated rows of different length: row i is `values[offsets[i]:offsets[i + 1]]`, of which
    `ragged[i]` is a view.

    Of int8 vectors the numbers are float32, scaled back: int8 is how they travelled.
    """

    values: Numbers  # [tokens, dimensions]
    offsets: Integers  # [rows + 1]

    def __repr__(self) -> str:
        return (
            f"Ragged({len(self)} rows, {' x '.join(map(str, self.values.shape))} "
            f"{self.values.dtype})"
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Numbers:
        row = _row(row, len(self))
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Numbers]:
        return (self[row] for row in range(len(self)))


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """Compressed sparse rows, with scipy's names: row i has the columns `indices[indptr[i]:indptr[i
    + 1]]`; `data` likewise.
    """

    data: Numbers
    indices: npt.NDArray[np.int32]
    indptr: Integers
    shape: tuple[int, int]
    truncated: bool = False
    """Whether a row had more weights than its share of the answer holds, and only the largest are
    here.
    """

    def __repr__(self) -> str:
        return f"Sparse({self.shape[0]} x {self.shape[1]}, {len(self.data)} weights)"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> tuple[npt.NDArray[np.int32], Numbers]:
        """Return the columns and the weights of a row, as views."""
        row = _row(row, len(self))
        begin, end = self.indptr[row], self.indptr[row + 1]
        return self.indices[begin:end], self.data[begin:end]

    def __iter__(self) -> Iterator[tuple[npt.NDArray[np.int32], Numbers]]:
        return (self[row] for row in range(len(self)))

    def to_scipy(self) -> csr_array:
        """Return a `scipy.sparse.csr_array` of the same arrays. Requires scipy (`pip install
        shoal[sparse]`).
        """
        from scipy.sparse import csr_array  # Imported here, because nothing else needs scipy.

        return csr_array((self.data, self.indices, self.indptr), shape=self.shape)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of an item's text. `start` and `end` (exclusive) count Unicode code points, as
    Python's strings do.

    Attributes:
        row: The chunk's row in each representation.
        tokens: Number of tokens that contribute to the chunk's vectors.
        text: The text from `start` to `end`.
        page: The page of the document on which the chunk begins, from 1; 0 for a text.
    """

    row: int
    start: int
    end: int
    tokens: int
    text: str = ""
    page: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of a call's items: `chunks[i]` are those of item i, in order. Chunk `row` has row
    `row` of each representation.

    The chunks of item i are rows `offsets[i]` to `offsets[i + 1]`; a `skipped` item has none.

    Attributes:
        texts: The texts of the items that are texts.
        pages: The page on which each chunk begins, 0 for a text; None if no item is a document.
        chunk_texts: The text of each chunk, if the mesh returned it.
        continues: The first chunks are further ones of the last item of the part before; only in
            a part of a stream.
    """

    offsets: Integers  # [items + 1]
    starts: Integers  # [chunks]
    ends: Integers  # [chunks]
    tokens: Integers  # [chunks]
    texts: Sequence[str] = ()
    pages: Integers | None = None  # [chunks]
    chunk_texts: Sequence[str] = ()  # [chunks]
    continues: bool = False

    def __repr__(self) -> str:
        return f"Chunks({len(self)} items, {len(self.starts)} chunks)"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, item: int) -> list[Chunk]:
        item = _row(item, len(self))
        text = self.texts[item] if self.texts else ""
        rows = range(int(self.offsets[item]), int(self.offsets[item + 1]))
        places = ((row, int(self.starts[row]), int(self.ends[row])) for row in rows)
        return [
            Chunk(
                row,
                start,
                end,
                int(self.tokens[row]),
                self.chunk_texts[row] if self.chunk_texts else text[start:end],
                0 if self.pages is None else int(self.pages[row]),
            )
            for row, start, end in places
        ]

    def __iter__(self) -> Iterator[list[Chunk]]:
        return (self[item] for item in range(len(self)))


@dataclass(frozen=True, slots=True, eq=False)
class EncodeResult:
    """Row i of each representation is for item i, or for chunk i of a call with `chunking`. A
    representation that was not requested raises ValueError.

    The row of a `skipped` item is NaN in dense vectors (0 in "binary", which has no NaN), and has
    no entries in the other forms.
    """

    _vectors: Vectors | None
    _sparse: Sparse | None
    _multi_vector: Ragged | None
    usage: Usage
    timings: Timings
    revision: str
    skipped: tuple[Skipped, ...] = ()
    _chunks: Chunks | None = None
    embedding_id: str = ""
    """Identifies what decided the numbers: vectors with one id may be compared, and a later call
    can require it with `expect_embedding_id`. Empty from a mesh that is too old to have it.
    """
    alias: ResolvedAlias | None = None
    """The models of the alias by which the call named its model; None for a model id."""
    other: EncodeResult | None = None
    """The vectors by the other model of the alias, of a call with `both_models` during a change."""
    first_item: int = 0
    """The item of the call to which the first row belongs; above 0 only of `encode_stream`."""

    def __repr__(self) -> str:
        parts = {"dense": self._vectors, "sparse": self._sparse, "multi_vector": self._multi_vector}
        return _short(
            self, *(f"{form}={part!r}" for form, part in parts.items() if part is not None)
        )

    @property
    def representations(self) -> tuple[Form, ...]:
        """The representations that this result has."""
        parts: dict[Form, object] = {
            "dense": self._vectors,
            "sparse": self._sparse,
            "multi_vector": self._multi_vector,
        }
        return tuple(form for form, part in parts.items() if part is not None)

    @property
    def dense(self) -> Numbers:
        """[items, dimensions] as stored (see `Vectors`)."""
        return self.vectors.array

    @property
    def vectors(self) -> Vectors:
        """The dense vectors with their data type and scales."""
        return self._vectors if self._vectors is not None else self._missing("dense")

    @property
    def sparse(self) -> Sparse:
        """One row of weights an item."""
        return self._sparse if self._sparse is not None else self._missing("sparse")

    @property
    def multi_vector(self) -> Ragged:
        """One matrix of token vectors per item."""
        return (
            self._multi_vector if self._multi_vector is not None else self._missing("multi_vector")
        )

    @property
    def chunks(self) -> Chunks:
        """The chunks of each item, of a call with `chunking`; else raises ValueError."""
        if self._chunks is None:
            raise ValueError("this result has no chunks: request them with chunking=Chunking()")
        return self._chunks

    @property
    def is_divided(self) -> bool:
        """True if the items were divided into chunks."""
        return self._chunks is not None

    def dequantize(self) -> Floats:
        """Return the dense vectors as float32 [items, dimensions], for any data type."""
        return self.vectors.dequantize()

    def _missing(self, form: Form) -> Never:
        has = ", ".join(self.representations) or "nothing"
        raise ValueError(
            f"this result has no {form} representation, only: {has}; request it with "
            f'representations=["{form}"]'
        )


@dataclass(frozen=True, slots=True, eq=False)
class ScoreResult:
    """`scores` [documents] in document order, higher is better; `ranking` the indices of the best,
    best first.

    The score of a `skipped` document is NaN, and it is not in the ranking.
    """

    scores: Floats
    ranking: Integers
    usage: Usage
    timings: Timings
    revision: str
    skipped: tuple[Skipped, ...] = ()
    alias: ResolvedAlias | None = None
    """The models of the alias by which the call named its model; None for a model id."""

    def __repr__(self) -> str:
        best = ", ".join(
            f"{index}: {self.scores[index]:.4g}" for index in self.ranking[:_MAX_SHOWN].tolist()
        )
        more = ", …" if len(self.ranking) > _MAX_SHOWN else ""
        return _short(self, f"documents={len(self.scores)}", f"best={{{best}{more}}}")


@dataclass(frozen=True, slots=True)
class ExtractResult:
    """A sequence with one extraction for each item; that of a `skipped` item is empty."""

    results: Sequence[Extraction]
    usage: Usage
    timings: Timings
    revision: str
    skipped: tuple[Skipped, ...] = ()
    alias: ResolvedAlias | None = None
    """The models of the alias by which the call named its model; None for a model id."""

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.results[:_MAX_SHOWN]))
        return _short(
            self,
            f"results=[{shown}{', …' if len(self.results) > _MAX_SHOWN else ''}]",
            f"items={len(self.results)}",
        )

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, item: int) -> Extraction:
        return self.results[item]

    def __iter__(self) -> Iterator[Extraction]:
        return iter(self.results)


def _short(result: EncodeResult | ScoreResult | ExtractResult, *parts: str) -> str:
    """Return the repr of a result: its parts and common members, without arrays."""
    skipped = (f"skipped={len(result.skipped)}",) if result.skipped else ()
    shown = (
        *parts,
        f"input_tokens={result.usage.input_tokens}",
        f"revision={result.revision!r}",
        *skipped,
    )
    return f"{type(result).__name__}({', '.join(shown)})"


def writable(result: R) -> R:
    """Return the same result with arrays that may be modified: those that are views of a received
    message are copied.
    """
    changed: dict[str, object] = {}
    for field in fields(result):  # type: ignore[arg-type]
        value = getattr(result, field.name)
        if isinstance(value, np.ndarray):
            changed[field.name] = _owned(value)
        elif isinstance(value, (Vectors, Sparse, Ragged)):
            changed[field.name] = writable(value)
    return replace(result, **changed)  # type: ignore[type-var]


def _owned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not array.flags.owndata:
        return array.copy()
    array.flags.writeable = True
    return array


def _row(row: int, rows: int) -> int:
    if not -rows <= row < rows:
        raise IndexError(f"row {row} is out of range: there are {rows} rows")
    return row % rows
