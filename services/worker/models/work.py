"""What a worker asks of a text model: one Work for each job, without protobuf.

Between `services/worker/codec.py`, which makes a Work from a Job, and `TextModel.prepare`, which makes it a Prepared. Field paths
in errors (`items[3].text`, `documents[0].text`, `query.text`, `dimensions`) count from the job's own first item.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Role = Literal["", "query", "document"]
Representation = Literal["dense", "sparse", "multi_vector"]
DataType = Literal["float32", "float16", "bfloat16", "int8", "uint8", "binary"]
Truncation = Literal["none", "end", "start"]
Scale = Literal["", "logit", "probability"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
Head = Literal["dense", "multi_vector", "logits", "token_logits"]


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

    `hypothesis`, for models without labels of their own, is what texts are compared with; `{}` stands for the label. Empty: "{}".
    """

    texts: list[str]
    labels: tuple[str, ...] = ()
    multi_label: bool | None = None
    threshold: float | None = None
    hypothesis: str = ""
    truncation: Truncation = "end"


Work = EncodeWork | ScoreWork | EntitiesWork | ClassifyWork


@dataclass(frozen=True, slots=True)
class Sequence:
    """One row of a packed batch. int32 [tokens] each; no type ids: all of segment 0.

    `skip`: leading tokens that are left out of pooling, for models that do not pool their prompt. `seen`: leading tokens that the
    sequence's tokens attend to (0: all); the tokens after them only look, as a ColBERT query's mask tokens do.
    """

    ids: NDArray[np.int32]
    type_ids: NDArray[np.int32] | None = None
    skip: int = 0
    seen: int = 0

    @property
    def tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the tokens of one text lie in it, special tokens left out. All [text tokens]."""

    rows: NDArray[np.int32]  # of the token in its sequence
    starts: NDArray[np.int32]  # code points
    ends: NDArray[np.int32]  # code points, exclusive
    continues: NDArray[np.bool_]  # the token continues the word of the token before it


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job ready for the device: `forward(head, sequences)`, then `finish(prepared, outputs)` with one output a sequence.

    For `finish` alone: `spans` of token labels, and `kept`, which token vectors of a sequence are answered (None: all).
    """

    work: Work
    head: Head
    sequences: list[Sequence]
    spans: list[Spans] = field(default_factory=list)
    kept: list[NDArray[np.bool_] | None] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that go through the model, special tokens, prompts and labels included."""
        return sum(sequence.tokens for sequence in self.sequences)
