"""Reranking in the forms of Cohere, Jina, vLLM and Voyage. No sockets."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from shoal.v1 import inference_pb2 as pb

from services.edge.dialects.rerank import RerankAnswer, rerank, squash_scores
from services.edge.messages.base import Answer, HttpError, MeshCall, Received
from services.edge.messages.names import AliasNames, AliasTarget
from tests.edge.parts import MODEL, scores

NAMES = AliasNames({"rerank-v3.5": AliasTarget("org/ranker")})
DOCUMENTS = ["a", "b", "c"]


def ask(names: AliasNames = NAMES, **body: Any) -> MeshCall:
    content = {"model": MODEL, "query": "q", "documents": DOCUMENTS, **body}
    return rerank(Received(json.dumps(content).encode(), names, request_id="r1"))


def content_of(question: MeshCall, reply: pb.ScoreResponse | None = None) -> Any:
    answer = question.convert(reply or scores(0.1, 0.9, 0.5))
    assert isinstance(answer, Answer)
    assert isinstance(answer.body, bytes)
    return json.loads(answer.body)


def test_cohere_jina_and_vllm_read_results() -> None:
    question = ask(top_n=2)
    assert question.message == pb.ScoreRequest(
        model=MODEL,
        query=pb.Item(text="q"),
        documents=[pb.Item(text=text) for text in DOCUMENTS],
        scale=pb.SCORE_SCALE_PROBABILITY,
        top_n=2,
    )
    answer = content_of(question)
    assert [result["index"] for result in answer["results"]] == [1, 2, 0]
    assert np.float32(answer["results"][0]["relevance_score"]) == np.float32(0.9)
    assert (answer["id"], answer["model"], answer["usage"]["total_tokens"]) == ("r1", MODEL, 9)
    assert answer["meta"]["billed_units"] == {"search_units": 1}
    assert "document" not in answer["results"][0]
    msgspec.convert(answer, RerankAnswer)


def test_voyage_reads_data() -> None:
    for more in ({"top_k": 2}, {"top_k": None, "truncation": True}):
        answer = content_of(ask(**more))
        assert "results" not in answer
        assert answer["data"][0]["index"] == 1
        assert answer["usage"] == {"total_tokens": 9}
        msgspec.convert(answer, RerankAnswer)
    assert (
        content_of(ask(top_k=1, truncation=True, return_documents=True))["data"][0]["document"]
        == "b"
    )
    assert ask(top_k=2).message.top_n == 2  # type: ignore[attr-defined]
    assert ask(truncation=False).message.truncation == pb.TRUNCATION_NONE  # type: ignore[attr-defined]


def test_infinity_reads_plain_documents() -> None:
    answer = content_of(ask(raw_scores=False, return_documents=True, top_n=2))
    assert answer["object"] == "rerank"
    assert answer["results"][0] == {"index": 1, "relevance_score": 0.9, "document": "b"}
    msgspec.convert(answer, RerankAnswer)
    raw = ask(raw_scores=True)
    assert isinstance(raw.message, pb.ScoreRequest)
    assert raw.message.scale == pb.SCORE_SCALE_LOGIT
    assert raw.fallback(HttpError("INVALID_INPUT", "scale", field="scale")) is None
    assert raw.renamed("scale") == "raw_scores"


def test_documents_are_returned_on_request() -> None:
    answer = content_of(ask(return_documents=True))
    assert [result["document"] for result in answer["results"]] == [
        {"text": "b"},
        {"text": "c"},
        {"text": "a"},
    ]


def test_documents_as_maps() -> None:
    documents = [{"text": "t", "title": "T", "year": 3}, "plain"]
    question: Any = ask(documents=documents).message
    assert [item.text for item in question.documents] == ["t", "plain"]
    question = ask(documents=documents, rank_fields=["title", "year"]).message
    assert [item.text for item in question.documents] == ["title: T\nyear: 3", "plain"]


def test_default_alias_serves_requests_without_a_model() -> None:
    assert ask(AliasNames({"rerank": AliasTarget("org/r")}), model=None).message.model == "org/r"  # type: ignore[attr-defined]
    with pytest.raises(HttpError, match="alias") as caught:
        ask(model=None)
    assert caught.value.field == "model"
    assert content_of(ask(model="rerank-v3.5"))["model"] == "rerank-v3.5"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"query": 3}, "query"),
        ({"documents": "a"}, "documents"),
        ({"documents": ["a", 3]}, "documents[1]"),
        ({"documents": [{"title": "a"}]}, "documents[0].text"),
        ({"documents": [{"text": "a"}], "rank_fields": ["b"]}, "documents[0].b"),
        ({"top_n": -1}, "top_n"),
        ({"top_k": -1}, "top_k"),
        ({"top_n": "2"}, "top_n"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"priority": "soon"}, "priority"),
    ],
)
def test_unsupported_request_is_refused_with_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(HttpError) as caught:
        ask(**body)
    assert (caught.value.status, caught.value.field) == (400, field)


def test_missing_fields() -> None:
    for missing in ("query", "documents"):
        body = {"model": MODEL, "query": "q", "documents": ["a"]}
        del body[missing]
        with pytest.raises(HttpError, match="required") as caught:
            rerank(Received(json.dumps(body).encode(), NAMES))
        assert caught.value.field == missing


def test_router_fields_are_renamed_to_the_callers() -> None:
    question = ask()
    assert question.renamed("documents[3].text") == "documents[3]"
    assert question.renamed("query.text") == "query"


def test_model_without_probabilities_is_called_for_raw_scores() -> None:
    question = ask()
    assert question.fallback(HttpError("INVALID_INPUT", "", field="documents")) is None
    again = question.fallback(HttpError("INVALID_INPUT", "sums of maxima", field="scale"))
    assert again is not None
    assert again.message.scale == pb.SCORE_SCALE_UNSPECIFIED  # type: ignore[attr-defined]
    found = [
        result["relevance_score"]
        for result in content_of(again, scores(-30.0, 25.0, 24.0))["results"]
    ]
    assert 1 > found[0] > found[1] > 0.5 > found[2] > 0


def test_squashing_keeps_the_order() -> None:
    values = np.linspace(-40, 40, 1000, dtype=np.float32)
    found = squash_scores(values)
    assert (np.diff(found) > 0).all()
    assert found.min() > 0
    assert found.max() < 1


def test_query_errors_use_the_callers_name() -> None:
    question = rerank(
        Received(
            json.dumps({"model": MODEL, "query": "a", "documents": ["b"]}).encode(), AliasNames({})
        )
    )
    for path in ("query.text", "query.image", "query.image.data", "query.parts[0].document"):
        assert question.renamed(path) == "query"


def test_long_documents_are_read_in_windows() -> None:
    message = ask(truncate="windows", window_overlap=32).message
    assert isinstance(message, pb.ScoreRequest)
    assert message.truncation == pb.TRUNCATION_WINDOWS
    assert message.window_overlap == 32
    assert not ask(truncate=True).message.HasField("window_overlap")


@pytest.mark.parametrize("overlap", [-1, 1 << 31, 5_000_000_000])
def test_window_overlap_outside_its_range_is_refused(overlap: int) -> None:
    with pytest.raises(HttpError, match="window_overlap") as caught:
        ask(truncate="windows", window_overlap=overlap)
    assert caught.value.status == 400
