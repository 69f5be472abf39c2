"""Merge token labels to entities, as transformers' TokenClassificationPipeline does (its
`aggregation_strategy`).

This is the last step of an entities job, in the worker's threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Entity

from libs.kinds.token_labels.card import entity_kind
from libs.models.interface.work import Aggregation
from libs.models.text.tokenising.text import Spans

Scores = NDArray[np.float32]
_OUTSIDE = "O"
_LAST = ("E-", "S-")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A token or a word with its class, from code point `start` to `end`."""

    label: str
    score: np.float32
    start: int
    end: int


def find_entities(
    text: str, logits: Scores, spans: Spans, classes: Sequence[str], aggregation: Aggregation
) -> list[Entity]:
    """Return the entities of one text by their start, without those of class "O".

    `logits` is [tokens, classes], special tokens included. Classes of the scheme BIOES, which
    transformers does not support, are merged by that scheme.
    """
    scores = softmax(logits[spans.rows])
    if aggregation in ("none", "simple"):
        pieces = [_piece(scores[i], classes, spans, i, i) for i in range(len(scores))]
    else:
        pieces = [
            _word(scores, classes, spans, first, last, aggregation)
            for first, last in _words(spans.continues)
        ]
    if aggregation == "none":
        return [_entity(text, [piece], piece.label) for piece in pieces if piece.label != _OUTSIDE]
    split = _split_at_ends if _has_ends(classes) else _groups
    groups = ((group, entity_kind(group[0].label)) for group in split(pieces))
    return [_entity(text, group, kind) for group, kind in groups if kind != _OUTSIDE]


def softmax(logits: Scores) -> Scores:
    """Return the softmax over the last axis."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Scores = shifted / shifted.sum(axis=-1, keepdims=True)
    return shares


def _piece(scores: Scores, classes: Sequence[str], spans: Spans, first: int, last: int) -> _Piece:
    best = int(scores.argmax())
    return _Piece(classes[best], scores[best], int(spans.starts[first]), int(spans.ends[last]))


def _words(continues: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield the first and last token of each word."""
    starts = [i for i in range(len(continues)) if i == 0 or not continues[i]]
    yield from zip(starts, [start - 1 for start in starts[1:]] + [len(continues) - 1], strict=True)


def _word(
    scores: Scores,
    classes: Sequence[str],
    spans: Spans,
    first: int,
    last: int,
    aggregation: Aggregation,
) -> _Piece:
    """Return a word with its class: that of its first token, of its tokens' mean scores, or of its
    most certain token.
    """
    tokens = scores[first : last + 1]
    if aggregation == "first":
        chosen = tokens[0]
    elif aggregation == "average":
        chosen = tokens.mean(axis=0)
    else:
        chosen = tokens[tokens.max(axis=1).argmax()]
    return _piece(chosen, classes, spans, first, last)


def _groups(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Group adjacent pieces of one entity type. A B- class begins a new group; classes without B-
    or I- count as I-.
    """
    group: list[_Piece] = []
    for piece in pieces:
        same = group and _tag(piece.label) == _tag(group[-1].label)
        if group and (not same or piece.label.startswith("B-")):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _has_ends(classes: Sequence[str]) -> bool:
    """Return whether classes are of the scheme BIOES: E- ends an entity of several tokens, and S-
    marks one of a single token.
    """
    return any(name.startswith(_LAST) and f"B-{name[2:]}" in classes for name in classes)


def _split_at_ends(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Group pieces by the scheme BIOES: as `_groups`, but S- also begins a group, and E- and S- end
    one."""
    group: list[_Piece] = []
    for piece in pieces:
        before = group[-1].label if group else ""
        if group and (
            before.startswith(_LAST)
            or piece.label.startswith(("B-", "S-"))
            or entity_kind(piece.label) != entity_kind(before)
        ):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _tag(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def _entity(text: str, group: Sequence[_Piece], label: str) -> Entity:
    start, end = group[0].start, group[-1].end
    score = float(np.mean([piece.score for piece in group]))
    return Entity(start=start, end=end, label=label, score=score, text=text[start:end])
