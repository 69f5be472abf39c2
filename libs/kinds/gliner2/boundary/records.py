"""Records: each span of a structure's first field identifies a record; the other spans are assigned
to the records.

This reproduces the gliner2 package's `extract_json` for GLiNER2.5:

1. A field with a single value takes one span in each record, no span twice, so that the product of
   the probabilities is maximal.
2. A span of a field with several values goes to the record where it is most likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from shoal.schema import SchemaStructure

from libs.kinds.gliner2.boundary.record_scorer import MAX_STEPS, UNLIKELY, steps
from libs.kinds.gliner2.spans.processor import AnswerBound

Array = NDArray[np.float32]
Numbers = NDArray[np.int64]


class RecordBound(AnswerBound):
    """Bounds the length of a text's answer and the work of its records."""

    def __init__(self, text: str, path: str) -> None:
        super().__init__(text, path)
        self._steps = MAX_STEPS

    def step(self, count: int) -> None:
        """Count work. Raises InvalidInput with the text's path beyond the bound."""
        self._steps -= count
        if self._steps < 0:
            raise self.exceeded()


@dataclass(frozen=True, slots=True)
class StructureRecord:
    """One record."""

    anchor: int
    """The span that identifies the record."""
    fields: tuple[tuple[tuple[int, float], ...], ...]
    """The spans of each field with the probability that they belong to this record."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one structure."""

    places: Numbers
    """[spans, 2], in words."""
    fields: Array
    """Probabilities of spans for each field, [fields, spans]."""
    records: Numbers
    """The spans that identify records."""
    shares: Array
    """Probabilities that a span fills a record's field, [fields, records, spans]."""


def find_records(
    asked: SchemaStructure, scores: Scores, threshold: float, bound: RecordBound
) -> list[StructureRecord]:
    """Return the records in the order of the text.

    Raises InvalidInput for more records than can be assigned.
    """
    bound.step(steps(len(scores.records), len(asked.fields)))
    best_first = np.argsort(-scores.fields[0, scores.records], kind="stable")
    anchors = scores.records[best_first]
    found: list[list[list[tuple[int, float]]]] = [
        [[(int(one), float(scores.fields[0, one]))]] for one in anchors
    ]
    for field, shares in zip(asked.fields[1:], scores.shares[1:], strict=True):
        likely = shares[best_first]
        filled = _one_each(likely) if field.dtype == "str" else _spans_by_record(likely, threshold)
        for record, own in zip(found, filled, strict=True):
            record.append(own)
    made = [
        StructureRecord(int(anchor), tuple(map(tuple, fields)))
        for anchor, fields in zip(anchors, found, strict=True)
    ]
    return sorted(made, key=lambda record: (*scores.places[record.anchor].tolist(),))


def _one_each(likely: Array) -> list[list[tuple[int, float]]]:
    """Return one span and its probability for each record, from [records, spans]."""
    chosen = assigned(-np.log(np.fmax(likely, UNLIKELY)).astype(np.float64))
    return [[(int(column), float(row[column]))] for row, column in zip(likely, chosen, strict=True)]


def _spans_by_record(likely: Array, threshold: float) -> list[list[tuple[int, float]]]:
    """Assign each span that reaches the threshold to its most likely record, and return the pairs
    of a span and its score for each record.
    """
    if not len(likely):
        return []
    owners, best = likely.argmax(axis=0), likely.max(axis=0)
    kept = best.astype(np.float64) >= threshold
    return [
        [(int(one), float(best[one])) for one in np.flatnonzero(kept & (owners == record))]
        for record in range(len(likely))
    ]


def assigned(costs: NDArray[np.float64]) -> Sequence[int]:
    """Assign a column to each row, none twice, so that the sum of costs [rows, columns] is minimal.

    At least as many columns as rows are needed. Each row is added by the shortest path over rows
    and columns that ends at a free column (Jonker and Volgenant).
    """
    rows, columns = costs.shape
    of_row, of_column = np.zeros(rows), np.zeros(columns)
    chosen, owner = np.full(rows, -1), np.full(columns, -1)
    for row in range(rows):
        current, length = row, 0.0
        ahead, back, prices = np.full(columns, np.inf), np.full(columns, -1), of_column.copy()
        passed: list[tuple[int, float]] = []
        while True:
            reached = costs[current] - prices + (length - of_row[current])
            nearer = reached < ahead
            ahead[nearer], back[nearer] = reached[nearer], current
            column = int(ahead.argmin())
            length = float(ahead[column])
            if owner[column] < 0:
                break
            passed.append((column, length))
            ahead[column], prices[column] = np.inf, -np.inf  # excluded from the rest of this path
            current = int(owner[column])
        of_row[row] += length
        for seen, distance in passed:
            of_row[owner[seen]] += length - distance
            of_column[seen] -= length - distance
        while column >= 0:
            current = int(back[column])
            owner[column], chosen[current], column = current, column, int(chosen[current])
    return chosen.tolist()
