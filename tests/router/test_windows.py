"""Texts that are read in windows are priced by all their windows, and bounded by their number."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from libs.errors import InvalidInput, TaskNotSupported
from services.router.admission.pricing import price
from services.router.admission.validation.requests import (
    check_encode,
    check_extract,
    check_score,
)
from services.router.admission.validation.tokens import check_tokenize


def card(tasks: Sequence[models_pb2.Task], **values: object) -> models_pb2.ModelCard:
    return models_pb2.ModelCard(model="a/b", tasks=tasks, max_tokens=512, **values)  # type: ignore[arg-type]


WORDS = "copying is allowed "
RERANKER = card(tasks=[models_pb2.TASK_SCORE])
TAGGER = card(tasks=[models_pb2.TASK_ENTITIES], labels=["person"])
NLI = card(
    tasks=[models_pb2.TASK_CLASSIFY],
    labels=["yes", "no"],
    open_labels=True,
)


def score(*documents: str, query: str = "q", **values: object) -> pb.ScoreRequest:
    return pb.ScoreRequest(
        model="a/b",
        query=pb.Item(text=query),
        documents=[pb.Item(text=one) for one in documents],
        truncation=pb.TRUNCATION_WINDOWS,
        **values,  # type: ignore[arg-type]
    )


def extract(*texts: str, **values: object) -> pb.ExtractRequest:
    return pb.ExtractRequest(
        model="a/b",
        items=[pb.Item(text=one) for one in texts],
        truncation=pb.TRUNCATION_WINDOWS,
        **values,  # type: ignore[arg-type]
    )


ENTITIES = {"entities": pb.EntitiesTask()}


def cost(request: pb.ScoreRequest | pb.ExtractRequest, known: models_pb2.ModelCard) -> list[int]:
    if isinstance(request, pb.ScoreRequest):
        sizes = check_score(request, known)
    else:
        sizes = check_extract(request, known)
    costs, _ = price(sizes, known, request.truncation)
    return costs


def test_text_costs_all_its_windows() -> None:
    short, long = cost(score(WORDS, WORDS * 10_000, query="q" * 400), RERANKER)
    assert short < 200
    tokens = len(WORDS) * 10_000 * 0.3
    assert tokens * 1.3 < long < tokens * 2.2  # overlap, and the query once a window
    cut = score(WORDS * 10_000)
    cut.truncation = pb.TRUNCATION_END
    assert cost(cut, RERANKER)[0] < 1000


def test_overlap_costs_the_repeated_tokens() -> None:
    none, usual, half = (
        cost(score(WORDS * 10_000, window_overlap=overlap), RERANKER)[0]
        for overlap in (0, 127, 254)
    )
    assert none < usual < half < 2.2 * none


def test_measured_tokens_of_a_byte_count_within_bounds() -> None:
    request = score(WORDS * 2000)
    for measured, bound in ((1e-4, 1 / 16), (50.0, 1.0)):
        odd, plausible = (
            card(tasks=[models_pb2.TASK_SCORE], tokens_per_byte=rate) for rate in (measured, bound)
        )
        assert check_score(request, odd) == check_score(request, plausible)
        assert cost(request, odd) == cost(request, plausible)


def test_text_of_one_window_costs_as_before() -> None:
    request = extract(WORDS, **ENTITIES)
    windowed = cost(request, TAGGER)
    request.truncation = pb.TRUNCATION_END
    assert windowed == cost(request, TAGGER)


def test_hostile_texts_are_refused_with_their_path() -> None:
    for request, path in (
        (extract("a", "x" * 5_000_000, **ENTITIES), "items[1].text"),
        (extract("a", "x" * 1_100_000, **ENTITIES), "items[1].text"),
        (score("a", "x" * 1_100_000), "documents[1].text"),
        (score("a", "x" * 900_000, query="q" * 1600), "documents[1].text"),  # tiny windows
        (score(*["x" * 900_000] * 40), "documents"),
    ):
        with pytest.raises(InvalidInput) as caught:
            cost(request, RERANKER if isinstance(request, pb.ScoreRequest) else TAGGER)
        assert caught.value.field == path


def test_each_label_that_is_paired_with_a_text_counts() -> None:
    labels = [f"label {number}" for number in range(200)]
    few = extract(WORDS * 500, classify=pb.ClassifyTask(labels=labels))
    assert cost(few, NLI)[0] > 200 * 2000
    with pytest.raises(InvalidInput, match="for each label") as caught:
        cost(extract(WORDS * 20_000, classify=pb.ClassifyTask(labels=labels)), NLI)
    assert caught.value.field == "items[0].text"


def test_windows_are_refused_where_results_cannot_be_merged() -> None:
    windows = pb.TRUNCATION_WINDOWS
    encode = pb.EncodeRequest(model="a/b", items=[pb.Item(text="a")], truncation=windows)
    with pytest.raises(InvalidInput, match="chunking") as caught:
        check_encode(encode, None)
    assert caught.value.field == "truncation"
    with pytest.raises(InvalidInput) as caught:
        check_tokenize(pb.TokenizeRequest(model="a/b", texts=["a"], truncation=windows), None)
    assert caught.value.field == "truncation"
    for task in ({"text": pb.TextTask()}, {"regions": pb.RegionsTask(labels=["cat"])}):
        with pytest.raises(InvalidInput) as caught:
            check_extract(extract("a", **task), None)
        assert caught.value.field == "truncation"
    images = card(
        tasks=[models_pb2.TASK_SCORE],
        inputs=[models_pb2.INPUT_KIND_TEXT, models_pb2.INPUT_KIND_IMAGE],
    )
    with pytest.raises(TaskNotSupported) as caught:
        check_score(score("a"), images)
    assert caught.value.field == "truncation"


def test_overlap_is_for_windows_and_bounded() -> None:
    request = score("a", window_overlap=3)
    request.truncation = pb.TRUNCATION_END
    for refused in (request, score("a", window_overlap=16_385)):
        with pytest.raises(InvalidInput) as caught:
            check_score(refused, RERANKER)
        assert caught.value.field == "window_overlap"
