"""Compare a model's outputs in two number formats: cosines of vectors, differences of
probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from libs.catalog.card import Card
from libs.models.interface.results import ScoreResult
from libs.models.interface.sequences import Output, Prepared, SparseRow
from libs.models.interface.work import Representation, ScoreWork
from libs.models.runtime.packed_model import PackedModel

MIN_COSINE: Final = 0.99
"""Minimum cosine of a text's vectors with those in float32. Below it, a number format loses too
much quality.
"""

MAX_DIFFERENCE: Final = 0.1
"""Maximum difference of the probability of a score, a label or an entity."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of outputs.

    Attributes:
        figure: Text with the lowest cosine of a text's vectors, or the largest difference of a
            probability.
        is_good: Within the bound, MIN_COSINE or MAX_DIFFERENCE.
    """

    figure: str
    is_good: bool


def agreement(
    model: PackedModel, prepared: Prepared, outputs: Sequence[Output], wanted: Sequence[Output]
) -> Agreement:
    """Compare a job's `outputs` with the correct ones, one for each of its sequences."""
    if set(prepared.head.split("+")) <= set(get_args(Representation)):
        lowest = _lowest(
            cosine(*pair) for one in zip(outputs, wanted, strict=True) for pair in _parts(*one)
        )
        return Agreement(f"lowest cosine {lowest:.5f}", lowest >= MIN_COSINE)
    parts = [_parts(*one) for one in zip(outputs, wanted, strict=True)]
    largest = float(np.max([_difference(model.card, *own[0]) for own in parts], initial=0.0))
    lowest = _lowest(cosine(*pair) for own in parts for pair in own[1:])
    words = f"largest difference of a probability {largest:.4f}"
    if lowest < 1.0:
        words += f", lowest cosine of a state {lowest:.5f}"
    ranked = _ranked_alike(model, prepared, outputs, wanted)
    return Agreement(words + ranked, largest <= MAX_DIFFERENCE and lowest >= MIN_COSINE)


def _lowest(cosines: Iterable[float]) -> float:
    """Return the minimum; 1 if empty. NaN stays NaN, and is not within any bound."""
    return float(np.min(list(cosines), initial=1.0))


def cosine(one: Output, other: Output) -> float:
    a, b = vector(one, other), vector(other, one)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    # Two empty outputs are equal.
    return (
        float(a @ b) / norms if norms else float(a.shape == b.shape and not a.any() and not b.any())
    )


def vector(output: Output, other: Output) -> NDArray[np.float64]:
    """Return all numbers of an output; for sparse ones, over the columns of it or `other`."""
    if isinstance(output, tuple):
        others: Sequence[Output] = other if isinstance(other, tuple) else (other,) * len(output)
        return np.concatenate([vector(part, its) for part, its in zip(output, others, strict=True)])
    if isinstance(output, SparseRow):
        columns = (
            np.union1d(output.indices, other.indices)
            if isinstance(other, SparseRow)
            else output.indices
        )
        values = np.zeros(len(columns))
        values[np.searchsorted(columns, output.indices)] = output.values
        return values
    return np.asarray(output, dtype=np.float64).ravel()


def _parts(output: Output, other: Output) -> list[tuple[Output, Output]]:
    if isinstance(output, tuple) and isinstance(other, tuple):
        return list(zip(output, other, strict=True))
    return [(output, other)]


def _difference(card: Card, logits: Output, right: Output) -> float:
    """Return the largest difference of a probability."""
    a, b = (
        _probabilities(card, np.asarray(values, dtype=np.float64)) for values in (logits, right)
    )
    return float(np.abs(a - b).max(initial=0.0)) if a.shape == b.shape else float("inf")


def _probabilities(card: Card, logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Apply softmax if exactly one of the model's classes is correct, else sigmoid."""
    one_of = card.kind == "token_labels" or (
        card.kind == "sequence_labels" and card.problem == "single_label"
    )
    if one_of and logits.ndim and logits.shape[-1] > 1:
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        shares: NDArray[np.float64] = powers / powers.sum(-1, keepdims=True)
        return shares
    return 1 / (1 + np.exp(-np.clip(logits, -500, 500)))


def _ranked_alike(
    model: PackedModel, prepared: Prepared, outputs: Sequence[Output], wanted: Sequence[Output]
) -> str:
    """Return, for a reranker, how many pairs of documents with different scores have the correct
    order.
    """
    if not isinstance(prepared.work, ScoreWork):
        return ""
    results = [model.finish(prepared, each) for each in (outputs, wanted)]
    found, right = (
        result.scores if isinstance(result, ScoreResult) else np.zeros(0, np.float32)
        for result in results
    )
    pairs = [(i, j) for i, j in combinations(range(len(right)), 2) if right[i] != right[j]]
    alike = sum(bool((found[i] > found[j]) == (right[i] > right[j])) for i, j in pairs)
    return f", {alike} of {len(pairs)} pairs ranked alike"
