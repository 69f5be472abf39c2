"""Records: a structure's first field stands for it, and each of its spans makes a record; other spans are given to the records.

This is what the gliner2 package's `extract_json` does with GLiNER2.5: a field with a single value takes one span in each record, no
span twice, so that the product of the probabilities is the largest; a span of a field with several goes to the record where it is
likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.models.schema import SchemaStructure
from libs.models.text.processing.answers import sigmoid
from libs.models.text.processing.entities import softmax

Array = NDArray[np.float32]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Record:
    """`anchor`: the span that stands for it. `fields`: for each field its spans with the probability that they belong here."""

    anchor: int
    fields: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one structure: `places` [spans, 2], in words; `fields` [fields, spans]: probabilities of spans for each field.

    `records` [spans, 1 + spans] and `shares` [fields, 1 + spans] add up to the logits that nothing, or a span, fills a record's
    field.
    """

    places: Numbers
    fields: Array
    records: Array
    shares: Array


def records_of(asked: SchemaStructure, scores: Scores, threshold: float) -> list[Record]:
    """In the order of the text. Only spans that are `places` count, by the probabilities of the structure's first field."""
    valid = np.flatnonzero(scores.places[:, 0] >= 0)
    anchors = valid[scores.fields[0, valid] >= np.float32(threshold)]
    if not len(anchors):
        return []
    anchors = anchors[np.argsort(-scores.fields[0, anchors], kind="stable")]
    columns = np.concatenate([[0], 1 + valid])
    found: list[list[list[tuple[int, float]]]] = [[[(int(one), float(scores.fields[0, one]))]] for one in anchors]
    for number, field in enumerate(asked.fields[1:], start=1):
        logits = scores.records[anchors[:, None], columns] + scores.shares[number, columns]
        filled = _one_each(logits) if field.single else _several(logits, threshold)
        for record, own in zip(found, filled, strict=True):
            record.append([(int(valid[column]), score) for column, score in own])
    made = [Record(int(anchor), tuple(map(tuple, fields))) for anchor, fields in zip(anchors, found, strict=True)]
    return sorted(made, key=lambda record: (*scores.places[record.anchor].tolist(),))


def _one_each(logits: Array) -> list[list[tuple[int, float]]]:
    """For each record [records, 1 + spans] one span and its probability."""
    likely = softmax(logits)[:, 1:]
    chosen = assigned(-np.log(np.maximum(likely, np.finfo(np.float32).eps)).astype(np.float64))
    return [[(int(column), float(row[column]))] for row, column in zip(likely, chosen, strict=True)]


def _several(logits: Array, threshold: float) -> list[list[tuple[int, float]]]:
    """For each record the spans that are likelier in it than in others, and reach the threshold."""
    likely = sigmoid(logits[:, 1:])
    owners, best = likely.argmax(axis=0), likely.max(axis=0)
    kept = best.astype(np.float64) >= threshold
    return [[(int(one), float(best[one])) for one in np.flatnonzero(kept & (owners == record))] for record in range(len(logits))]


def assigned(costs: NDArray[np.float64]) -> Sequence[int]:
    """A column for each row, none twice, so that the sum of costs [rows, columns] is least; there are at least as many columns.

    The Hungarian method by shortest augmenting paths; row and column 0 are none.
    """
    rows, columns = costs.shape
    of_row, of_column = np.zeros(rows + 1), np.zeros(columns + 1)
    owner, back = np.zeros(columns + 1, dtype=np.int64), np.zeros(columns + 1, dtype=np.int64)
    for row in range(1, rows + 1):
        owner[0], column = row, 0
        least, seen = np.full(columns + 1, np.inf), np.zeros(columns + 1, dtype=bool)
        while owner[column] or not column:
            seen[column] = True
            current = owner[column]
            reached = np.append(np.inf, costs[current - 1]) - of_row[current] - of_column
            nearer = ~seen & (reached < least)
            least[nearer], back[nearer] = reached[nearer], column
            ahead = np.where(seen, np.inf, least)
            step = ahead.min()
            nearest = np.flatnonzero(ahead == step)
            free = nearest[owner[nearest] == 0]  # of equally near columns one that ends the path
            of_row[owner[seen]] += step
            of_column[seen] -= step
            least[~seen] -= step
            column = int(free[0] if len(free) else nearest[0])
        while column:
            owner[column] = owner[back[column]]
            column = int(back[column])
    found = np.zeros(rows + 1, dtype=np.int64)
    found[owner[1:]] = np.arange(columns)
    chosen: list[int] = found[1:].tolist()
    return chosen
