"""What a worker asks of a text model: one Work for each job, without protobuf.

Between `services/worker/mesh/codec.py`, which makes a Work from a Job, and `TextModel.prepare`, which makes it a Prepared. Paths
in errors (`items[3].text`, `documents[0].text`, `query.text`, `dimensions`) count from the job's own first item.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Role = Literal["", "query", "document"]
Representation = Literal["dense", "sparse", "multi_vector"]
DataType = Literal["float32", "float16", "bfloat16", "int8", "uint8", "binary"]
Truncation = Literal["none", "end", "start"]
Scale = Literal["", "logit", "probability"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
Head = str
"""The name of what a forward is to answer, one of the model's heads, or several joined by "+" (`dense+sparse`)."""

GoOn = Callable[[], None]
"""Called between slices of a job that is prepared. Raises what ends it: nobody waits for its answer any more."""


def go_on_anyway() -> None:
    """A GoOn for work that nobody takes back."""


Between = Callable[[], None]
"""Called by a forward between two of its layers, on its thread. A forward of the same model or of another may run within."""


def nothing_between() -> None:
    """A Between for a forward that is not interrupted."""


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """Texts to vectors. No representations: the model's main one. `dimensions` 0: all. `normalize` None: as the checkpoint says."""

    texts: list[str]
    role: Role = ""
    representations: tuple[Representation, ...] = ()
    data_type: DataType = "float32"
    dimensions: int = 0
    normalize: bool | None = None
    instruction: str = ""
    truncation: Truncation = "end"


@dataclass(frozen=True, slots=True)
class ScoreWork:
    """How well each document answers the query. `scale` empty: the model's own."""

    query: str
    documents: list[str]
    instruction: str = ""
    scale: Scale = ""
    truncation: Truncation = "end"


@dataclass(frozen=True, slots=True)
class EntitiesWork:
    """Labelled pieces of texts. No labels: all of the model's. `threshold` None: keep all. Token labels are always `flat`."""

    texts: list[str]
    labels: tuple[str, ...] = ()
    threshold: float | None = None
    flat: bool = True
    aggregation: Aggregation = "simple"
    truncation: Truncation = "end"


@dataclass(frozen=True, slots=True)
class ClassifyWork:
    """Labels that fit texts. `multi_label` None: as the checkpoint says.

    `hypothesis`, for models without labels of their own, is what texts are compared with; `{}` stands for the label. Empty: the
    kind of model says. `among_labels`: shares are among `labels`, not among all classes of the model.
    """

    texts: list[str]
    labels: tuple[str, ...] = ()
    multi_label: bool | None = None
    threshold: float | None = None
    hypothesis: str = ""
    truncation: Truncation = "end"
    among_labels: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """An entity that a request knows already: code points, end exclusive, within its text."""

    start: int
    end: int
    label: str = ""


@dataclass(frozen=True, slots=True)
class RelationsWork:
    """Pairs of entities in texts that stand in one of the relations `labels`.

    `entity_labels`: what counts as an entity, for models that find them. `threshold` None: the model's own. `entities`: of each
    text, for models that are given them; empty: none of any text.
    """

    texts: list[str]
    labels: tuple[str, ...]
    entity_labels: tuple[str, ...] = ()
    threshold: float | None = None
    truncation: Truncation = "end"
    entities: tuple[tuple[Given, ...], ...] = ()


Work = EncodeWork | ScoreWork | EntitiesWork | ClassifyWork | RelationsWork


@dataclass(frozen=True, slots=True)
class Sequence:
    """One row of a packed batch. int32 [tokens] each; no type ids: all of segment 0.

    `skip`: leading tokens that are left out of pooling, for models that do not pool their prompt. `seen`: leading tokens that the
    sequence's tokens attend to (0: all); the tokens after them only look, as a ColBERT query's mask tokens do. `before`: tokens
    that stand before these and are computed once for all sequences of a batch that have the same ones, causal models only.
    `input`: what the model's head must know of this sequence besides (places of words or labels); None for most. `adapter`: the
    LoRA adapter that it is for; empty: none.
    """

    ids: NDArray[np.int32]
    type_ids: NDArray[np.int32] | None = None
    skip: int = 0
    seen: int = 0
    before: NDArray[np.int32] | None = None
    input: object | None = None
    adapter: str = ""

    @property
    def tokens(self) -> int:
        """Its own, without what stands before it."""
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class SparseRow:
    """Weights of the vocabulary entries that matter: `indices` rising, int32; `values` float32 of the same length."""

    indices: NDArray[np.int32]
    values: NDArray[np.float32]


Output = NDArray[np.float32] | SparseRow | tuple["Output", ...]
"""What a head gives for one sequence; a tuple for several heads, in the order of their names."""


def is_finite(output: Output) -> bool:
    """Whether every number of an output is finite."""
    if isinstance(output, tuple):
        return all(is_finite(part) for part in output)
    values = output.values if isinstance(output, SparseRow) else output
    return bool(np.isfinite(values).all())


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job ready for the device: `forward(head, sequences)`, then `finish(prepared, outputs)` with one output a sequence.

    `notes`: what the processor that prepared it wants to know again in `finish`. `looked_up`: tokens of texts that need no forward
    and are no sequences, since `notes` has their answer.
    """

    work: Work
    head: Head
    sequences: list[Sequence]
    notes: object | None = None
    looked_up: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that go through the model or are looked up, special tokens, prompts and labels included."""
        shared = {id(sequence.before): len(sequence.before) for sequence in self.sequences if sequence.before is not None}
        return sum(sequence.tokens for sequence in self.sequences) + sum(shared.values()) + self.looked_up
