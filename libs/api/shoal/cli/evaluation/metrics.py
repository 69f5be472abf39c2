"""Quality of rankings. Pure: rankings are lists of document ids, best first.

nDCG and recall are those of trec_eval, which BEIR reports: the gain of a document is its grade, and
negative grades count as 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from typing import Any, Final

import numpy as np
import numpy.typing as npt

RBO_PERSISTENCE: Final = 0.9
"""Persistence of rank-biased overlap: the share of readers who continue from one rank to the next;
the first 10 ranks weigh 86 %.
"""


def ndcg(ranking: Sequence[str], grades: Mapping[str, int], depth: int) -> float:
    """Normalised discounted cumulative gain of the first `depth` documents."""
    best = sorted((grade for grade in grades.values() if grade > 0), reverse=True)
    ideal = _gain(best[:depth])
    return (
        _gain([max(0, grades.get(document, 0)) for document in ranking[:depth]]) / ideal
        if ideal
        else 0.0
    )


def _gain(grades: Sequence[int]) -> float:
    return sum(grade / log2(rank + 1) for rank, grade in enumerate(grades, start=1))


def recall(ranking: Sequence[str], grades: Mapping[str, int], depth: int) -> float:
    """Return the share of relevant documents that are among the first `depth`."""
    relevant = {document for document, grade in grades.items() if grade > 0}
    return len(relevant.intersection(ranking[:depth])) / len(relevant) if relevant else 0.0


def overlap(first: Sequence[str], second: Sequence[str], depth: int) -> float:
    """Return the share of the first `depth` documents that two rankings have in common, whatever
    their order.
    """
    most = min(depth, max(len(first), len(second)))
    return len(set(first[:depth]).intersection(second[:depth])) / most if most else 1.0


def rank_biased_overlap(first: Sequence[str], second: Sequence[str], depth: int) -> float:
    """Extrapolated rank-biased overlap of two rankings (Webber, Moffat, Zobel 2010, equation 32),
    evaluated to `depth`.
    """
    depth = min(depth, len(first), len(second))
    if not depth:
        return 1.0
    one: set[str] = set()
    two: set[str] = set()
    total, agreement = 0.0, 0.0
    for rank in range(1, depth + 1):
        one.add(first[rank - 1])
        two.add(second[rank - 1])
        agreement = len(one & two) / rank
        total += agreement * RBO_PERSISTENCE**rank
    return agreement * RBO_PERSISTENCE**depth + (1 - RBO_PERSISTENCE) / RBO_PERSISTENCE * total


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; equal numbers share the mean of their ranks. 0 where one side is
    constant.
    """
    one, two = (_ranks(np.asarray(numbers, np.float64)) for numbers in (first, second))
    one, two = one - one.mean(), two - two.mean()
    scale = float(np.sqrt((one * one).sum() * (two * two).sum()))
    return float((one * two).sum()) / scale if scale else 0.0


def _ranks(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray(((last - counts + 1 + last) / 2)[places], np.float64)
