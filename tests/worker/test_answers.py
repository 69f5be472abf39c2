"""Shares of labels, from logits alone."""

from __future__ import annotations

import numpy as np
import pytest

from libs.catalog.card import Card, Problem
from libs.models.interface.work import ClassifyWork
from libs.models.text.processing.answers import class_labels

CLASSES = ("sport", "law", "weather")
LOGITS = np.log(np.array([1, 3, 4], np.float32))


def shares(
    labels: tuple[str, ...], *, problem: Problem = "single_label", among: bool = False
) -> dict[str, float]:
    card = Card(
        "org/name",
        "r",
        "bert",
        "sequence_labels",
        ("classify",),
        (),
        512,
        classes=CLASSES,
        problem=problem,
    )
    work = ClassifyWork(["text"], labels, among_labels=among)
    return {item.label: item.score for item in class_labels(work, card, LOGITS)}


def test_shares_of_a_label_subset_are_of_all_or_of_the_subset() -> None:
    assert shares(()) == pytest.approx({"weather": 0.5, "law": 0.375, "sport": 0.125})
    assert shares(("sport", "law")) == pytest.approx({"law": 0.375, "sport": 0.125})
    assert shares(("sport", "law"), among=True) == pytest.approx({"law": 0.75, "sport": 0.25})
    assert shares((), among=True) == shares(())
    assert shares(("law",), among=True) == {"law": 1.0}


def test_multi_label_classes_have_no_shares() -> None:
    each = {"sport": 0.5, "law": 0.75}
    for among in (False, True):
        assert shares(("sport", "law"), problem="multi_label", among=among) == pytest.approx(each)
