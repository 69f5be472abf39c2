"""TEI's HTTP API, from bytes to calls and from replies to bytes, without sockets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from shoal.transport.methods import ENCODE, EXTRACT, GET_MODEL, SCORE
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from services.edge.dialects import huggingface, tei
from services.edge.dialects import rerank as reranking
from services.edge.messages.base import Answer, HttpError, MeshCall, Received
from services.edge.messages.names import AliasNames, AliasTarget
from tests.edge.parts import MODEL, card, dense, ragged, scores, sparse, vectors

NAMES = AliasNames(
    {
        "embed": AliasTarget("org/embedder"),
        "rerank": AliasTarget("org/ranker"),
        "predict": AliasTarget("org/classifier"),
    }
)


def ask(what: Callable[[Received], MeshCall], body: Any, model: str = MODEL) -> MeshCall:
    return what(Received(json.dumps(body).encode(), NAMES, model))


def content_of(answer: Answer | MeshCall) -> Any:
    assert isinstance(answer, Answer)
    return json.loads(answer.body if isinstance(answer.body, bytes) else b"".join(answer.body))


def test_embed_is_a_list_of_lists_also_for_one_text() -> None:
    rows = vectors(1)
    question = ask(tei.embed, {"inputs": "a"})
    message: Any = question.message
    assert (message.normalize, message.truncation, message.model) == (
        True,
        pb.TRUNCATION_UNSPECIFIED,
        MODEL,
    )
    answer = question.convert(
        pb.EncodeResponse(
            dense=dense(rows), timings=pb.Timings(total_seconds=0.25, queue_seconds=0.1)
        )
    )
    assert np.array_equal(np.array(content_of(answer), np.float32), rows)
    assert isinstance(answer, Answer)
    assert dict(answer.headers)[b"x-total-time"] == b"250"
    assert dict(answer.headers)[b"x-queue-time"] == b"100"
    assert dict(answer.headers)[b"x-compute-characters"] == b"1"


def test_embed_options() -> None:
    message: Any = ask(
        tei.embed,
        {
            "inputs": ["a"],
            "normalize": False,
            "truncate": True,
            "truncation_direction": "left",
            "prompt_name": "query",
            "dimensions": 4,
        },
    ).message
    assert (message.normalize, message.truncation, message.role, message.dimensions) == (
        False,
        pb.TRUNCATION_START,
        pb.ROLE_QUERY,
        4,
    )
    assert (
        ask(tei.embed, {"inputs": "a", "truncate": False}).message.truncation == pb.TRUNCATION_NONE  # type: ignore[attr-defined]
    )


def test_embed_sparse_and_all() -> None:
    question = ask(tei.embed_sparse, {"inputs": ["a", "b"]})
    reply = pb.EncodeResponse(sparse=sparse({3: 0.5, 7: 1.5}, {}))
    assert content_of(question.convert(reply)) == [
        [{"index": 3, "value": 0.5}, {"index": 7, "value": 1.5}],
        [],
    ]
    rows = vectors(2), vectors(3)
    found = content_of(
        ask(tei.embed_all, {"inputs": ["a", "b"]}).convert(
            pb.EncodeResponse(multi_vector=ragged(*rows))
        )
    )
    assert [len(item) for item in found] == [2, 3]
    assert np.array_equal(np.array(found[1], np.float32), rows[1])


def test_rerank_has_texts_instead_of_documents() -> None:
    question = ask(reranking.rerank, {"query": "q", "texts": ["a", "b"], "return_text": True}, "")
    assert question.dialect is tei.TEI
    assert (question.method, question.message.model) == (SCORE, "org/ranker")  # type: ignore[attr-defined]
    assert content_of(question.convert(scores(0.25, 0.5))) == [
        {"index": 1, "score": 0.5, "text": "b"},
        {"index": 0, "score": 0.25, "text": "a"},
    ]
    raw: Any = ask(tei.rerank, {"query": "q", "texts": ["a"], "raw_scores": True}).message
    assert raw.scale == pb.SCORE_SCALE_LOGIT
    with pytest.raises(HttpError) as caught:
        ask(reranking.rerank, {"query": 3, "texts": ["a"]}, "")
    assert caught.value.dialect is tei.TEI


def classes(*texts: str) -> pb.ExtractResponse:
    labels = [pb.LabelScore(label="yes", score=0.75), pb.LabelScore(label="no", score=0.25)]
    return pb.ExtractResponse(results=[pb.Extraction(labels=labels) for _ in texts])


def test_predict_one_and_a_batch() -> None:
    one = ask(tei.predict, {"inputs": "a"})
    assert one.method == EXTRACT
    assert content_of(one.convert(classes("a"))) == [
        {"score": 0.75, "label": "yes"},
        {"score": 0.25, "label": "no"},
    ]
    batch = ask(tei.predict, {"inputs": [["a"], ["b"]]})
    assert len(content_of(batch.convert(classes("a", "b")))) == 2
    hub = ask(tei.predict, {"inputs": "a", "parameters": {"top_k": 1}})
    assert content_of(hub.convert(classes("a"))) == [[{"score": 0.75, "label": "yes"}]]


def test_predict_pairs() -> None:
    pair = ask(tei.predict, {"inputs": ["a", "b"]})
    assert pair.method == SCORE
    assert content_of(pair.convert(scores(0.5))) == [{"score": 0.5, "label": "LABEL_0"}]
    pairs = ask(tei.predict, {"inputs": [["a", "b"], ["a", "c"]]})
    assert [item.text for item in pairs.message.documents] == ["b", "c"]  # type: ignore[attr-defined]
    assert len(content_of(pairs.convert(scores(0.5, 0.25)))) == 2


def test_similarity() -> None:
    question = ask(
        tei.similarity,
        {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}, "parameters": {}},
    )
    rows = np.array([[1, 0], [0.6, 0.8], [0, 1]], np.float32)
    assert np.allclose(content_of(question.convert(pb.EncodeResponse(dense=dense(rows)))), [0.6, 0])
    assert question.renamed("items[0].text") == "inputs.source_sentence"
    assert question.renamed("items[2].text") == "inputs.sentences"


def test_base_url_uses_the_models_task() -> None:
    question = ask(huggingface.by_task, {"inputs": "a"})
    assert question.method == GET_MODEL
    embedder = models_pb2.GetModelResponse(model=card())
    assert question.convert(embedder).method == ENCODE  # type: ignore[union-attr]
    classifier = models_pb2.GetModelResponse(
        model=card(tasks=[models_pb2.TASK_CLASSIFY], representations=[])
    )
    assert question.convert(classifier).method == EXTRACT  # type: ignore[union-attr]
    unknown = question.fallback(HttpError("MODEL_NOT_FOUND", ""))
    assert unknown is not None
    assert unknown.method == ENCODE
    assert ask(huggingface.by_task, {"query": "a", "texts": ["b"]}).method == SCORE
    assert (
        ask(huggingface.by_task, {"inputs": {"source_sentence": "a", "sentences": ["b"]}}).method
        == ENCODE
    )


def test_info() -> None:
    question = tei.info(Received(b"", NAMES))
    found = content_of(
        question.convert(
            models_pb2.GetModelResponse(model=card(data_type="bfloat16", revision="r"))
        )
    )
    assert (
        found["model_id"],
        found["model_dtype"],
        found["model_sha"],
        found["max_input_length"],
    ) == (
        "org/embedder",
        "bfloat16",
        "r",
        256,
    )


def test_openais_form_below_a_prefix_uses_the_paths_model() -> None:
    question = ask(tei.embeddings, {"model": "whatever", "input": "a"})
    assert question.message.model == MODEL  # type: ignore[attr-defined]
    with pytest.raises(HttpError, match="not JSON"):
        tei.embeddings(Received(b"{", NAMES, MODEL))


@pytest.mark.parametrize(
    ("what", "body", "field"),
    [
        (tei.embed, {"inputs": [1, 2]}, "inputs"),
        (tei.embed, {"inputs": 3}, "inputs"),
        (tei.embed, {}, "inputs"),
        (tei.embed, {"inputs": "a", "prompt_name": "title"}, "prompt_name"),
        (tei.embed, {"inputs": "a", "truncation_direction": "up"}, "truncation_direction"),
        (tei.embed, {"inputs": "a", "dimensions": 0}, "dimensions"),
        (tei.embed, {"inputs": "a", "encoding_format": "base64"}, "encoding_format"),
        (tei.embed_sparse, {"inputs": None}, "inputs"),
        (tei.rerank, {"query": "a"}, "texts"),
        (tei.rerank, {"query": "a", "texts": [1]}, "texts[0]"),
        (tei.predict, {"inputs": ["a", "b", "c"]}, "inputs"),
        (tei.predict, {"inputs": [["a", "b"], ["c", "d"]]}, "inputs"),
        (tei.predict, {"inputs": []}, "inputs"),
        (tei.predict, {"inputs": [[]]}, "inputs"),
        (tei.predict, {"inputs": "a", "raw_scores": True}, "raw_scores"),
        (
            tei.predict,
            {"inputs": "a", "parameters": {"function_to_apply": "none"}},
            "parameters.function_to_apply",
        ),
        (tei.similarity, {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences"),
        (tei.similarity, {"inputs": {"source_sentence": "a"}}, "inputs.sentences"),
        (huggingface.by_task, [], ""),
    ],
)
def test_unsupported_request_is_refused_with_its_field(
    what: Callable[[Received], MeshCall], body: Any, field: str
) -> None:
    with pytest.raises(HttpError) as caught:
        ask(what, body)
    assert caught.value.field == field
    assert tei.error(caught.value).status in (400, 422)


@pytest.mark.parametrize(
    ("reason", "message", "status", "kind"),
    [
        ("INVALID_INPUT", "no", 422, "Validation"),
        ("INVALID_INPUT", "inputs is empty", 400, "Empty"),
        ("INPUT_TOO_LONG", "no", 422, "Validation"),
        ("TASK_NOT_SUPPORTED", "no", 424, "Backend"),
        ("MODEL_LOAD_FAILED", "no", 424, "Backend"),
        ("MODEL_UNREACHABLE", "no", 424, "Backend"),
        ("QUEUE_FULL", "no", 429, "Overloaded"),
        ("NO_CAPACITY", "no", 503, "Unhealthy"),
        ("TOO_LARGE", "no", 413, "Validation"),
    ],
)
def test_errors_are_flat_and_have_teis_names(
    reason: str, message: str, status: int, kind: str
) -> None:
    answer = tei.error(HttpError(reason, message))
    assert answer.status == status
    assert content_of(answer) == {"error": message, "error_type": kind}
