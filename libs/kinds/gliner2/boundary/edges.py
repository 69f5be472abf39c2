"""Turn related pairs of spans into distinct relations, as the gliner2 package does.

A model scores many equivalent pairs: parts of a name in addition to the name, and every mention
with every other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from libs.kinds.gliner2.boundary.spans import ScoredSpan


class RelationEdge(NamedTuple):
    """`score` is the pair's; `head` and `tail` have the scores of their roles."""

    head: ScoredSpan
    tail: ScoredSpan
    score: float


def distinct(edges: Sequence[RelationEdge], text: str) -> list[RelationEdge]:
    """Return the distinct edges of one relation, in the order of the text. `text` is the text as
    read."""
    heads, tails = _widest(edge.head for edge in edges), _widest(edge.tail for edge in edges)
    places: dict[tuple[int, ...], RelationEdge] = {}
    for edge in edges:
        whole = RelationEdge(heads[edge.head[:2]], tails[edge.tail[:2]], edge.score)
        place = (*whole.head[:2], *whole.tail[:2])
        if place not in places or whole.score > places[place].score:
            places[place] = whole
    names: dict[tuple[str, str], RelationEdge] = {}
    for edge in places.values():
        name = _name(edge.head, text), _name(edge.tail, text)
        if name not in names or _nearness(edge) < _nearness(names[name]):
            names[name] = edge
    return sorted(
        _unimplied(names), key=lambda edge: (edge.head.start, edge.tail.start, -edge.score)
    )


def _widest(spans: Iterable[ScoredSpan]) -> dict[tuple[int, int], ScoredSpan]:
    """Map each place to the longest span that contains it; the first of equally long ones."""
    found = {span[:2]: span for span in spans}
    return {
        place: max(
            (
                other
                for other in found.values()
                if other.start <= place[0] and place[1] <= other.end
            ),
            key=lambda other: (other.end - other.start, -other.start),
        )
        for place in found
    }


def _name(span: ScoredSpan, text: str) -> str:
    return " ".join(text[span.start : span.end].casefold().split())


def _nearness(edge: RelationEdge) -> tuple[int, float, int, int]:
    """Sort key of edges with the same words: the nearest ends first, then the best score."""
    yield_point = max(edge.head.start - edge.tail.end, edge.tail.start - edge.head.end, 0)
    return yield_point, -edge.score, edge.head.start, edge.tail.start


def _unimplied(names: dict[tuple[str, str], RelationEdge]) -> list[RelationEdge]:
    """Drop an edge if another has the same words at one end and more at the other."""
    words = [(set(head.split()), set(tail.split())) for head, tail in names]
    return [
        edge
        for (head, tail), edge in zip(words, names.values(), strict=True)
        if not any(
            (head < other and tail == end) or (tail < end and head == other) for other, end in words
        )
    ]
