"""Decode scores of words and spans to compatible entities (greedy search), as the gliner package
does.

This is the last step of an entities job, in the worker's threads. All positions are in words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.models.text.heads.extraction.spans import enumerate_spans

Array = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Spans that reach the threshold: first and last word, index of the best label, its score. All
    [candidates].
    """

    starts: Ids
    ends: Ids
    labels: Ids
    scores: Array

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, rows: Ids) -> Candidates:
        return Candidates(self.starts[rows], self.ends[rows], self.labels[rows], self.scores[rows])


def span_candidates(scores: Array, words: int, width: int, threshold: float) -> Candidates:
    """Return candidates from `scores` [spans, labels] of all spans up to `width` words, in
    `enumerate_spans`'s order.
    """
    starts, ends = enumerate_spans(words, width)
    labels, best = scores.argmax(axis=1), scores.max(axis=1)
    rows = np.flatnonzero(best >= threshold)
    return Candidates(
        starts[rows].astype(np.int64), ends[rows].astype(np.int64), labels[rows], best[rows]
    )


def word_candidates(scores: Array, threshold: float) -> Candidates:
    """Return candidates from `scores` [words, labels, 3]: of the beginning, end and inside of an
    entity."""
    words = len(scores)
    best, labels = (
        np.full((words, words), -1, dtype=np.float32),
        np.zeros((words, words), dtype=np.int64),
    )
    for label, table in enumerate(_tables(scores)):
        better = table > best
        best[better], labels[better] = table[better], label
    starts, ends = np.nonzero(best >= threshold)
    return Candidates(starts, ends, labels[starts, ends], best[starts, ends])


def word_candidates_by_label(scores: Array, threshold: float) -> Candidates:
    """Return one candidate for each pair of a span and a label with a score of at least
    `threshold`; `word_candidates` returns only the best label of a span.
    """
    tables = list(_tables(scores))
    hits = [np.nonzero(table >= threshold) for table in tables]
    return Candidates(
        starts=np.concatenate([starts for starts, _ in hits]),
        ends=np.concatenate([ends for _, ends in hits]),
        labels=np.repeat(np.arange(len(hits)), [len(starts) for starts, _ in hits]),
        scores=np.concatenate([table[rows] for table, rows in zip(tables, hits, strict=True)]),
    )


def _tables(scores: Array) -> Iterator[Array]:
    """Yield for each label the scores of all spans [words, words], by first and last word; -1 for
    invalid spans.

    A span's score is the minimum of its first word's begin score, its last word's end score and all
    its words' inside scores.
    """
    ordered = np.triu(np.ones((len(scores), len(scores)), dtype=bool))
    for begins, ends, within in scores.transpose(1, 2, 0):
        lowest = np.minimum.accumulate(np.where(ordered, within, np.float32(1)), axis=1)
        yield np.where(
            ordered, np.minimum(np.minimum(begins[:, None], ends), lowest), np.float32(-1)
        )


def choose(found: Candidates, words: int, *, flat: bool) -> Candidates:
    """Select the best compatible candidates greedily, ordered by start.

    Args:
        flat: No candidates overlap; otherwise they may nest.
    """
    ranked = found.take(np.argsort(-found.scores, kind="stable"))
    chosen = ranked.take(disjoint(ranked, words) if flat else _nested(ranked))
    return chosen.take(np.argsort(chosen.starts, kind="stable"))


def disjoint(ranked: Candidates, words: int) -> Ids:
    """Return the rows of candidates, best first, that do not overlap an earlier one."""
    taken = np.zeros(words, dtype=bool)
    kept = []
    for row, (start, end) in enumerate(zip(ranked.starts, ranked.ends, strict=True)):
        if not taken[start : end + 1].any():
            taken[start : end + 1] = True
            kept.append(row)
    return np.array(kept, dtype=np.int64)


def _nested(ranked: Candidates) -> Ids:
    """Return the rows of candidates that nest in the earlier ones or are disjoint, but do not cross
    them."""
    kept = np.empty(len(ranked), dtype=np.int64)
    count = 0
    for row, (start, end) in enumerate(zip(ranked.starts, ranked.ends, strict=True)):
        starts, ends = ranked.starts[kept[:count]], ranked.ends[kept[:count]]
        apart = (starts > end) | (ends < start)
        within = ((starts <= start) & (ends >= end)) | ((starts >= start) & (ends <= end))
        if (apart | within).all():
            kept[count] = row
            count += 1
    return kept[:count]
