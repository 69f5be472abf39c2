"""`Prepared.cut_texts` names every text of which tokens were cut, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libs.models import ClassifyWork, EncodeWork, EntitiesWork, PackedModel, ScoreWork, Work
from libs.models.interface.work import Truncation

LONG = "copying distribution and modification " * 20


@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize(
    ("name", "work", "cut"),
    [
        ("embedder", EncodeWork(["a", LONG, LONG]), {"items[1].text", "items[2].text"}),
        ("embedder", EncodeWork(["a", LONG], role="query"), {"items[1].text"}),
        ("embedder", ScoreWork(LONG, ["a", LONG]), {"query.text", "documents[1].text"}),
        ("embedder", ClassifyWork(["a"], labels=("x", LONG)), {"classify.labels[1]"}),
        ("reranker", ScoreWork("copying", ["a", LONG]), {"documents[1].text"}),
        ("classifier", ClassifyWork([LONG * 40, "a"]), {"items[0].text"}),
        ("tagger", EntitiesWork(["a", LONG * 40]), {"items[1].text"}),
    ],
)
def test_cut_texts_are_named(
    name: str, work: Work, cut: set[str], side: Truncation, request: pytest.FixtureRequest
) -> None:
    model: PackedModel = request.getfixturevalue(name)
    prepared = model.prepare(_truncated(work, side))
    assert prepared.cut_texts == cut


def test_text_of_the_longest_length_is_not_named(embedder: PackedModel) -> None:
    text = " ".join(["a"] * (embedder.max_tokens - 2))
    prepared = embedder.prepare(EncodeWork([text, f"{text} a"]))
    assert [one.tokens for one in prepared.sequences] == [embedder.max_tokens] * 2
    assert prepared.cut_texts == {"items[1].text"}


def _truncated(work: Work, side: Truncation) -> Work:
    assert isinstance(work, EncodeWork | ScoreWork | ClassifyWork | EntitiesWork)
    return replace(work, truncation=side)
