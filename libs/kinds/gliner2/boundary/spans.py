"""Spans of one text with their scores, and the choice among overlapping ones: the set with the
largest sum of scores.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple


class ScoredSpan(NamedTuple):
    """A span from `start` to `end` (exclusive), in words or in code points; score 0..1."""

    start: int
    end: int
    score: float


def ranked(spans: Iterable[ScoredSpan]) -> list[ScoredSpan]:
    """Sort spans best first, and keep the best of the spans in the same place."""
    places: dict[tuple[int, int], ScoredSpan] = {}
    for span in sorted(spans, key=_rank):
        places.setdefault(span[:2], span)
    return list(places.values())


def _rank(span: ScoredSpan) -> tuple[float, int, int]:
    return -span.score, span.start, span.end


def disjoint(spans: Iterable[ScoredSpan]) -> list[ScoredSpan]:
    """Return the set of spans without overlaps that has the largest sum of scores, best first
    (weighted interval scheduling).

    Of sets with the same sum, the larger one is returned; of equally large ones, the one with the
    better spans.
    """
    best_first = ranked(spans)
    by_end = sorted(
        range(len(best_first)),
        key=lambda number: (best_first[number].end, best_first[number].start),
    )
    ends = [best_first[number].end for number in by_end]
    best = [_Set(0.0, ())]
    for place, number in enumerate(by_end):
        span = best_first[number]
        before = best[bisect_right(ends, span.start, 0, place)]
        best.append(
            _better(_Set(before.total + span.score, (*before.numbers, number)), best[place])
        )
    return [best_first[number] for number in sorted(best[-1].numbers)]


class _Set(NamedTuple):
    """Ranks of spans, and the sum of their scores."""

    total: float
    numbers: tuple[int, ...]


def _better(one: _Set, other: _Set) -> _Set:
    sizes = (one.total, len(one.numbers)), (other.total, len(other.numbers))
    if sizes[0] != sizes[1]:
        return one if sizes[0] > sizes[1] else other
    return min(one, other, key=lambda found: sorted(found.numbers))


def sent(span: ScoredSpan, text: str) -> ScoredSpan | None:
    """Return the span within the text as sent. The model may have read an added full stop; a span
    of that alone returns None.
    """
    if span.end <= len(text):
        return span
    end = len(text[span.start :].rstrip()) + span.start
    return ScoredSpan(span.start, end, span.score) if end > span.start else None
