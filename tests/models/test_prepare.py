"""`prepare` refuses and cuts input with clear messages, and is thread-safe."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import pytest

from libs.errors import InputTooLong, InvalidInput, ShoalError, TaskNotSupported
from libs.models import ClassifyWork, EncodeWork, EntitiesWork, PackedModel, ScoreWork, Work
from libs.models.text.tokenising.text import Spans

LONG = "copying distribution and modification " * 20


@pytest.mark.parametrize(
    ("work", "error", "field"),
    [
        (EntitiesWork(["a"]), TaskNotSupported, "entities"),
        (
            EncodeWork(["a"], representations=("dense", "multi_vector")),
            TaskNotSupported,
            "representations[1]",
        ),
        (EncodeWork(["a"], representations=("sparse",)), TaskNotSupported, "representations[0]"),
        (EncodeWork(["a"], dimensions=65), InvalidInput, "dimensions"),
        (EncodeWork(["a", LONG], truncation="none"), InputTooLong, "items[1].text"),
        (ScoreWork("a", ["a", "b", LONG], truncation="none"), InputTooLong, "documents[2].text"),
        (ScoreWork(LONG, ["a"], truncation="none"), InputTooLong, "query.text"),
        (ClassifyWork(["a"]), InvalidInput, "classify.labels"),
        (
            ClassifyWork(["a"], labels=("x",), hypothesis="about"),
            InvalidInput,
            "classify.hypothesis",
        ),
        (
            ClassifyWork(["a"], labels=("x", LONG), truncation="none"),
            InputTooLong,
            "classify.labels[1]",
        ),
    ],
)
def test_embedder_refuses(
    embedder: PackedModel, work: Work, error: type[ShoalError], field: str
) -> None:
    with pytest.raises(error) as caught:
        embedder.prepare(work)
    assert type(caught.value) is error
    assert caught.value.field == field


def test_dimensions_up_to_the_models_own_are_taken(embedder: PackedModel) -> None:
    assert embedder.card.dimensions == 64
    assert embedder.prepare(EncodeWork(["a"], dimensions=64)).tokens == 3


def test_too_long_says_by_how_much(embedder: PackedModel) -> None:
    tokens = len(embedder.prepare(EncodeWork([LONG])).sequences[0].ids)
    assert tokens == embedder.max_tokens == 16
    with pytest.raises(
        InputTooLong, match=r"^items\[0\]\.text has \d+ tokens.*the model's maximum is 16"
    ):
        embedder.prepare(EncodeWork([LONG], truncation="none"))


def test_reranker_refuses(reranker: PackedModel) -> None:
    assert reranker.card.tasks == ("score",)
    for work in (EncodeWork(["a"]), ClassifyWork(["a"]), EntitiesWork(["a"])):
        with pytest.raises(TaskNotSupported, match="its tasks: score"):
            reranker.prepare(work)
    with pytest.raises(InputTooLong) as caught:
        reranker.prepare(ScoreWork("query", ["short", LONG], truncation="none"))
    assert caught.value.field == "documents[1].text"
    with pytest.raises(InputTooLong) as caught:
        reranker.prepare(ScoreWork(LONG, ["short"], truncation="end"))
    assert caught.value.field == "query.text"


@pytest.mark.parametrize("task", ["classify", "entities"])
def test_unknown_labels_are_refused_with_the_known_ones(
    classifier: PackedModel, tagger: PackedModel, task: str
) -> None:
    works: dict[str, Work] = {
        "classify": ClassifyWork(["a"], labels=("law", "order")),
        "entities": EntitiesWork(["a"], labels=("PER", "B-LOC")),
    }
    model = classifier if task == "classify" else tagger
    with pytest.raises(InvalidInput, match=", ".join(model.card.labels)) as caught:
        model.prepare(works[task])
    assert caught.value.field == f"{task}.labels[1]"


def test_cutting_keeps_the_end_that_was_asked_for(embedder: PackedModel) -> None:
    text = " ".join(["rights"] * 30 + ["freedom"] * 30)
    start, end = (
        embedder.prepare(EncodeWork([text], truncation=side)).sequences[0].ids
        for side in ("start", "end")
    )
    assert len(start) == len(end) == 16
    assert start[0] == end[0]
    assert start[-1] == end[-1]
    assert not np.intersect1d(start[1:-1], end[1:-1]).size


def test_instruction_replaces_the_prompt(embedder: PackedModel) -> None:
    plain, role, instructed = (
        embedder.prepare(work).sequences[0].ids.tolist()
        for work in (
            EncodeWork(["query: a"]),
            EncodeWork(["a"], role="query"),
            EncodeWork(["a"], role="query", instruction="to: "),
        )
    )
    assert plain == role
    assert instructed == embedder.prepare(EncodeWork(["to: a"])).sequences[0].ids.tolist()


def test_special_tokens_in_a_text_are_text(embedder: PackedModel) -> None:
    """Cutting counts the tokenizer's frame, not what looks like it."""
    ids = embedder.prepare(EncodeWork(["[SEP] [CLS] " * 20])).sequences[0].ids
    assert len(ids) == 16
    assert ids[0] == ids[2] == ids[4]
    assert ids[-1] == ids[1] == ids[3]


def test_threads_do_not_disturb_each_other(embedder: PackedModel) -> None:
    works = [
        EncodeWork([f"number {n} " * n], truncation="start" if n % 2 else "end")
        for n in range(1, 60)
    ]
    alone = [embedder.prepare(work).sequences[0].ids.tolist() for work in works]
    with ThreadPoolExecutor(8) as pool:
        together = [
            item.sequences[0].ids.tolist() for item in pool.map(embedder.prepare, works * 5)
        ]
    assert together == alone * 5


def test_tokens_are_counted_exactly(embedder: PackedModel, tagger: PackedModel) -> None:
    prepared = embedder.prepare(ClassifyWork(["a", LONG], labels=("a", "b")))
    assert prepared.tokens == 3 + 16 + 3 + 3
    spans = cast("list[Spans]", tagger.prepare(EntitiesWork(["a b c", LONG])).notes)
    assert [len(item.rows) for item in spans] == [3, 22]
