"""The sequences of packed batches, the outputs of heads for them, and prepared jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from libs.models.interface.work import Work

Head = str
"""The name of the model's head that a forward runs, or of several heads joined by "+"
(`dense+sparse`).
"""
GENERATE: Final = "generate"
"""The head of generative models: a forward adds tokens to its sequences, and an output takes any
number of forwards.
"""

YieldPoint = Callable[[], None]
"""Called by a forward between two layers, on its thread. May run a forward of the same model or
another.
"""


def never_yield() -> None:
    """Do nothing, for a forward that is never preempted."""


@dataclass(frozen=True, slots=True)
class InputRows:
    """The input of a sequence's tokens that are not in the vocabulary: image patches, or
    precomputed embeddings.

    Attributes:
        places: [n] int32, ascending: their indices in the sequence.
        values: [n, InputLayer.row_size]; or, if the backbone has a tower, its input for n rows.
        more: Further input of the tower, for a sequence of several images.
    """

    places: NDArray[np.int32]
    values: NDArray[np.generic]
    more: tuple[NDArray[np.generic], ...] = ()

    @property
    def inputs(self) -> tuple[NDArray[np.generic], ...]:
        """Return all input of the tower, in the order of its rows."""
        return self.values, *self.more


@dataclass(frozen=True, slots=True)
class InputSequence:
    """One row of a packed batch.

    Attributes:
        ids: int32 [tokens].
        type_ids: int32 [tokens]; None for segment 0.
        skip: Leading tokens left out of pooling, for models that do not pool their prompt.
        seen: Leading tokens that the sequence's tokens attend to; 0 for all. Later tokens attend
            but are not attended to, like the mask tokens of a ColBERT query.
        before: A shared prefix, computed one time for all sequences of a batch that share it.
            Causal models only.
        input: Further input of the model's head (positions of words or labels).
        adapter: LoRA adapter; empty for none.
        rows: Input of tokens without an id. `ids` has a placeholder within the vocabulary for
            these.
        axes: [axes, tokens], positions in several dimensions (M-RoPE, DINOv3); None: a token's
            position is its index.
        key: Cache key of its output: equal keys have equal outputs; empty to bypass the cache.
        cut: Path in the job of the text of which tokens were cut; empty if it is whole.
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
    cut: str = ""

    @property
    def tokens(self) -> int:
        """Return the number of its tokens, without the shared prefix."""
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class SparseRow:
    """A sparse vector over the vocabulary or over spans: ascending `indices` of the non-zero
    weights, and their `values`.

    Indices are int32, or int64 if more columns exist.
    """

    indices: NDArray[np.int32] | NDArray[np.int64]
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The log probability of a generated token, and of the most likely alternatives in descending
    order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class GeneratedIds:
    """The tokens generated after a prompt, including a stop token.

    Attributes:
        ids: int32.
        finish: Reason why generation ended.
        scores: Scores of each token, if requested.
    """

    ids: NDArray[np.int32]
    finish: Literal["stop", "length"]
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The sequence needs another forward.

    Attributes:
        ids: The tokens so far; the next forward may append to them.
        has_begun: False: it waits for memory, and nothing of it was computed.
    """

    ids: Sequence[int] = field(default=(), compare=False)
    has_begun: bool = True


Output = NDArray[np.float32] | SparseRow | GeneratedIds | tuple["Output", ...]
"""The output of a head for one sequence; a tuple for several heads, in the order of their names."""

Forwarded = Output | Unfinished
"""The result of a forward for one sequence."""


def collect_outputs(forwarded: Sequence[Forwarded]) -> list[Output]:
    """Return the outputs of a forward of a non-generative model. Raises TypeError for an unfinished
    sequence.
    """
    found = [each for each in forwarded if not isinstance(each, Unfinished)]
    if len(found) != len(forwarded):
        raise TypeError("a sequence is unfinished")
    return found


def is_finite(output: Output) -> bool:
    """Return whether every number of an output is finite."""
    if isinstance(output, tuple):
        return all(is_finite(part) for part in output)
    if isinstance(output, GeneratedIds):
        return True
    values = output.values if isinstance(output, SparseRow) else output
    return bool(np.isfinite(values).all())


ANY_BYTES: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job ready for `forward(head, sequences)` and `finish(prepared, outputs)`.

    Attributes:
        notes: State that the processor passes from `prepare` to `finish`.
        looked_up: Tokens of texts without a sequence: their result was looked up and is in `notes`.
        heads: Head of each sequence, if they differ (texts and images in one job have separate
            encoders); empty: `head` for all.
        fields: Path in the job of each sequence's input, if that is not an item's text.
        image_tokens: Number of tokens that represent images.
        known: Cached outputs by the index of their sequence, which then needs no forward.
        answer_bytes: Maximum bytes of the results of one item in the answer.
        cut: Paths of texts without a sequence of which tokens were cut.
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
    cut: tuple[str, ...] = ()

    @property
    def cut_texts(self) -> frozenset[str]:
        """Return the paths in the job of all texts of which tokens were cut."""
        return frozenset((*self.cut, *(one.cut for one in self.sequences if one.cut)))

    def groups(self) -> dict[Head, list[int]]:
        """Return the indices of the sequences of each head that need a forward, in order."""
        found: dict[Head, list[int]] = {}
        for index in range(len(self.sequences)):
            if index not in self.known:
                found.setdefault(self.heads[index] if self.heads else self.head, []).append(index)
        return found

    @property
    def tokens(self) -> int:
        """Return the tokens that the model computes or looks up, including special tokens, prompts
        and labels.
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
