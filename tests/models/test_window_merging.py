"""The rules by which results of a text's windows are merged, those of docs/long-texts.md."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from shoal.extractions import (
    Classification,
    Entity,
    Extraction,
    LabelScore,
    Relation,
    Structure,
    Value,
)

from libs.models.interface.work import Span, never_cancelled
from libs.models.text.windows import merging
from libs.models.text.windows.merging import MergeRules, best_scores, merged

TEXT = "0123456789" * 10
SPANS = [Span(0, 40), Span(30, 70), Span(60, 100)]


def entity(
    start: int, end: int, score: float = 0.5, label: str = "a", *, window: int = 0
) -> Entity:
    """An entity at a place in the text, as its window reports it."""
    shift = SPANS[window].start
    return Entity(start - shift, end - shift, label, score, TEXT[start:end])


def merge(*found: Extraction, rules: MergeRules | None = None) -> Extraction:
    return merged(TEXT, SPANS, found, rules or MergeRules(), never_cancelled)


def test_only_window_that_begins_later_has_the_texts_places() -> None:
    inner = entity(31, 34, window=1)
    found = merged(TEXT, SPANS[1:2], [Extraction(entities=(inner,))], MergeRules(), never_cancelled)
    assert [(one.start, one.end) for one in found.entities] == [(31, 34)]


def entities(*found: tuple[Entity, ...], flat: bool = True) -> list[tuple[int, int, str, float]]:
    result = merge(*(Extraction(entities=one) for one in found), rules=MergeRules(flat=flat))
    return [(one.start, one.end, one.label, one.score) for one in result.entities]


def test_same_entity_of_two_windows_is_one_with_the_better_score() -> None:
    assert entities(
        (entity(32, 36, 0.6),), (entity(32, 36, 0.9, window=1), entity(50, 52, window=1)), ()
    ) == [(32, 36, "a", 0.9), (50, 52, "a", 0.5)]


def test_whole_entity_precedes_a_better_one_at_an_edge() -> None:
    assert entities((entity(35, 40, 0.9),), (entity(35, 44, 0.4, window=1),), ()) == [
        (35, 44, "a", 0.4)
    ]
    assert entities((entity(25, 34, 0.4),), (entity(30, 34, 0.9, window=1),), ()) == [
        (25, 34, "a", 0.4)
    ]


def test_longer_of_two_entities_at_edges_is_kept() -> None:
    assert entities((entity(33, 40, 0.4),), (entity(30, 36, 0.9, window=1),), ()) == [
        (33, 40, "a", 0.4)
    ]


def test_text_edges_are_not_window_edges() -> None:
    found = entities((entity(0, 4, 0.4),), (), (entity(95, 100, 0.4, window=2),))
    assert found == [(0, 4, "a", 0.4), (95, 100, "a", 0.4)]


def test_other_labels_overlap_only_where_entities_may() -> None:
    parts = ((entity(32, 36, 0.9, "b"),), (entity(34, 38, 0.6, window=1),), ())
    assert entities(*parts) == [(32, 36, "b", 0.9)]
    assert entities(*parts, flat=False) == [(32, 36, "b", 0.9), (34, 38, "a", 0.6)]


def test_entities_of_one_window_never_exclude_each_other() -> None:
    nested = (entity(31, 38, 0.7), entity(32, 34, 0.9))
    assert len(entities(nested, (), (), flat=False)) == 2


def relation(head: Entity, tail: Entity, score: float) -> Relation:
    return Relation(head, tail, "r", score)


def test_relation_of_two_windows_is_one() -> None:
    found = merge(
        Extraction(relations=(relation(entity(31, 33), entity(36, 38), 0.6),)),
        Extraction(
            relations=(
                relation(entity(31, 33, window=1), entity(36, 38, window=1), 0.8),
                relation(entity(50, 52, window=1), entity(36, 38, window=1), 0.9),
            )
        ),
        Extraction(),
    )
    assert [(one.head.start, one.tail.start, one.score) for one in found.relations] == [
        (50, 36, 0.9),
        (31, 36, 0.8),
    ]


def test_relation_with_an_entity_at_an_edge_gives_way() -> None:
    found = merge(
        Extraction(relations=(relation(entity(31, 33), entity(37, 40), 0.9),)),
        Extraction(relations=(relation(entity(31, 33, window=1), entity(37, 45, window=1), 0.4),)),
        Extraction(),
    )
    assert [(one.tail.start, one.tail.end) for one in found.relations] == [(37, 45)]


def test_relations_are_compared_only_with_those_of_overlapping_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = 0
    overlaps = merging._overlaps

    def counted(relation: Relation, places: NDArray[np.int64]) -> bool:
        nonlocal compared
        compared += len(places)
        return overlaps(relation, places)

    monkeypatch.setattr(merging, "_overlaps", counted)
    windows = [Span(start, start + 40) for start in range(0, 3000, 30)]
    cut, whole = (
        Relation(Entity(0, 3, "a", 0.5, "x"), Entity(12, 14, "a", 0.5, "x"), "r", 0.5),
        Relation(Entity(15, 18, "a", 0.5, "x"), Entity(20, 22, "a", 0.5, "x"), "r", 0.5),
    )
    found = [Extraction(relations=(cut, whole)) for _ in windows]
    kept = merged("x" * 3010, windows, found, MergeRules(), never_cancelled).relations
    assert len(kept) == 200
    assert compared == 198  # about two for each of the 99 windows that have a cut one


def test_cut_relation_gives_way_to_one_of_any_overlapping_window() -> None:
    windows = [Span(0, 40), Span(20, 45), Span(32, 80)]
    cut = Relation(Entity(34, 36, "a", 0.5, "x"), Entity(38, 40, "a", 0.5, "x"), "r", 0.9)
    whole = Relation(Entity(2, 4, "a", 0.5, "x"), Entity(6, 16, "a", 0.5, "x"), "r", 0.4)
    found = [Extraction(relations=(cut,)), Extraction(), Extraction(relations=(whole,))]
    (kept,) = merged(TEXT, windows, found, MergeRules(), never_cancelled).relations
    assert (kept.tail.start, kept.tail.end) == (38, 48)


def test_merging_is_cancelled_between_results() -> None:
    heads = [Entity(start, 40, "a", 0.5, "x") for start in range(31, 39)]
    tails = [Entity(start, end, "a", 0.5, "x") for end in range(31, 41) for start in range(21, end)]
    relations = tuple(Relation(head, tail, "r", 0.5) for head in heads for tail in tails)
    assert len(relations) > 1000
    entities = tuple(one.head for one in relations)
    calls = 0

    def check_cancelled() -> None:
        nonlocal calls
        calls += 1

    for one in (Extraction(relations=relations), Extraction(entities=entities)):
        calls = 0
        merged(TEXT, SPANS, [one, Extraction(), Extraction()], MergeRules(), check_cancelled)
        assert calls >= 2 * len(relations) // 256  # they are placed, and then compared


def structure(*places: tuple[int, int], window: int = 0) -> Structure:
    shift = SPANS[window].start
    fields = {
        f"f{number}": Value(TEXT[start:end], 0.5, start - shift, end - shift)
        for number, (start, end) in enumerate(places)
    }
    return Structure("s", fields)


def test_structure_of_two_windows_is_one_and_a_cut_one_gives_way() -> None:
    found = merge(
        Extraction(structures=(structure((31, 33), (35, 37)), structure((34, 35), (38, 40)))),
        Extraction(
            structures=(
                structure((31, 33), (35, 37), window=1),
                structure((34, 35), (38, 44), window=1),
            )
        ),
        Extraction(structures=(structure((80, 82), window=2),)),
    )
    places = [[(value.start, value.end) for _, value in one.values()] for one in found.structures]
    assert places == [[(31, 33), (35, 37)], [(34, 35), (38, 44)], [(80, 82)]]


def test_labels_are_the_best_of_windows_or_their_mean() -> None:
    parts = [
        Extraction(
            labels=(LabelScore("x", one), LabelScore("y", 1 - one)),
            classifications=(
                Classification("q", (LabelScore("x", one), LabelScore("y", 1 - one))),
            ),
        )
        for one in (0.9, 0.2, 0.4)
    ]
    best = merge(*parts, rules=MergeRules(exclusive_questions={"q": False}))
    assert best.labels == (LabelScore("x", 0.9), LabelScore("y", 0.8))
    assert best.classifications[0].labels == best.labels
    mean = merge(*parts, rules=MergeRules(exclusive=True, exclusive_questions={"q": True}))
    assert [(one.label, round(one.score, 6)) for one in mean.labels] == [("x", 0.5), ("y", 0.5)]
    assert mean.classifications[0].labels == mean.labels


def test_answer_that_was_cut_in_a_window_is_cut() -> None:
    assert merge(Extraction(), Extraction(truncated=True), Extraction()).truncated
    assert not merge(Extraction(), Extraction(), Extraction()).truncated


def test_best_scores_are_those_of_each_documents_windows() -> None:
    scores = np.array([1, 5, 2, -3, -1], np.float32)
    assert best_scores(scores, [1, 2, 2]).tolist() == [1, 5, -1]
