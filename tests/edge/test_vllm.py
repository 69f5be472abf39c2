"""vLLM's /score, /classify and /pooling, from bytes to calls and from replies to bytes, without
sockets.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from shoal.transport.methods import ENCODE, EXTRACT, GET_MODEL, SCORE
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from services.edge.dialects import vllm
from services.edge.messages.base import Answer, HttpError, MeshCall, Received
from services.edge.messages.names import AliasNames, AliasTarget
from tests.edge.parts import MODEL, Script, card, dense, edge, ragged, scores, sparse, vectors

NAMES = AliasNames(
    {
        "embed": AliasTarget("org/embedder"),
        "rerank": AliasTarget("org/ranker"),
        "predict": AliasTarget("org/classifier"),
        "docs": AliasTarget("docs-search"),
    }
)
CARD = models_pb2.GetModelResponse(model=card(labels=["bad", "good", "odd"]))


def ask(what: Callable[[Received], MeshCall], **body: Any) -> MeshCall:
    return what(
        Received(
            json.dumps({"model": MODEL, **body}).encode(),
            NAMES,
            request_id="r",
            received_at=1_700_000_000,
        )
    )


def content_of(answer: Answer | MeshCall) -> Any:
    assert isinstance(answer, Answer)
    return json.loads(answer.body if isinstance(answer.body, bytes) else b"".join(answer.body))


def asked(answer: Answer | MeshCall) -> MeshCall:
    assert isinstance(answer, MeshCall)
    return answer


def found(**labels: float) -> pb.Extraction:
    best = sorted(labels.items(), key=lambda one: -one[1])
    return pb.Extraction(labels=[pb.LabelScore(label=label, score=score) for label, score in best])


def extracted(*results: pb.Extraction) -> pb.ExtractResponse:
    return pb.ExtractResponse(results=results, usage=pb.Usage(input_tokens=4))


@pytest.mark.parametrize(
    "sides",
    [
        {"text_1": "q", "text_2": ["a", "b"]},
        {"text_1": ["q"], "text_2": ["a", "b"]},
        {"data_1": "q", "data_2": ["a", "b"]},
        {"queries": "q", "documents": ["a", "b"]},
        {"queries": "q", "items": ["a", "b"]},
    ],
)
def test_one_text_against_several(sides: dict[str, Any]) -> None:
    question = ask(vllm.score, **sides)
    assert question.method is SCORE
    message: Any = question.message
    assert (message.query.text, [one.text for one in message.documents]) == ("q", ["a", "b"])
    assert message.scale == pb.SCORE_SCALE_UNSPECIFIED
    answer = content_of(question.convert(scores(-0.25, 0.5)))
    assert answer == {
        "id": "score-r",
        "object": "list",
        "created": 1_700_000_000,
        "model": MODEL,
        "data": [
            {"index": 0, "object": "score", "score": -0.25},
            {"index": 1, "object": "score", "score": 0.5},
        ],
        "usage": {"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0},
    }
    msgspec.convert(answer, vllm.PairScores)
    right = list(sides)[1]
    assert question.renamed("documents[1].text") == f"{right}[1]"
    assert question.renamed("query.text is empty") == f"{next(iter(sides))} is empty"


def test_pairs_are_asked_for_by_their_first_text() -> None:
    question = ask(vllm.score, text_1=["q", "p", "q"], text_2=["a", "b", "c"])
    first: Any = question.message
    assert (first.query.text, [one.text for one in first.documents]) == ("q", ["a", "c"])
    assert question.renamed("documents[1].text") == "text_2"
    second = asked(question.convert(scores(0.1, 0.3)))
    message: Any = second.message
    assert (message.query.text, [one.text for one in message.documents]) == ("p", ["b"])
    answer = content_of(second.convert(scores(0.2)))
    assert [one["score"] for one in answer["data"]] == [0.1, 0.2, 0.3]
    assert answer["usage"]["total_tokens"] == 18


def test_logits_and_the_alias() -> None:
    message: Any = ask(vllm.score, model=None, text_1="q", text_2="a", use_activation=False).message
    assert (message.scale, message.model) == (pb.SCORE_SCALE_LOGIT, "org/ranker")


@pytest.mark.parametrize(
    ("what", "body", "field"),
    [
        (vllm.score, {"text_1": "q"}, "text_2"),
        (vllm.score, {}, "text_1"),
        (vllm.score, {"text_1": "q", "text_2": []}, "text_2"),
        (vllm.score, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        (vllm.score, {"text_1": [str(n) for n in range(65)], "text_2": ["a"] * 65}, "text_1"),
        (
            vllm.score,
            {"text_1": "q", "text_2": "a", "truncate_prompt_tokens": 5},
            "truncate_prompt_tokens",
        ),
        (vllm.score, {"text_1": "q", "text_2": "a", "chat_template": "x"}, "chat_template"),
        (vllm.score, {"text_1": 1, "text_2": "a"}, "text_1"),
        (vllm.classify, {}, "input"),
        (vllm.classify, {"input": "a", "messages": [{}]}, "messages"),
        (vllm.classify, {"input": "a", "activation": False}, "activation"),
        (vllm.classify, {"input": "a", "raw_scores": True}, "raw_scores"),
        (vllm.pooling, {"input": [[1, 2]]}, "input"),
        (vllm.pooling, {"input": "a", "task": "token_classify"}, "task"),
        (vllm.pooling, {"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        (vllm.pooling, {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        (vllm.pooling, {"input": "a", "endianness": "big"}, "endianness"),
        (vllm.pooling, {"input": "a", "add_special_tokens": False}, "add_special_tokens"),
        (vllm.pooling, {"input": "a", "task": "classify", "softmax": False}, "softmax"),
    ],
)
def test_unsupported_request_is_refused_with_its_field(
    what: Callable[[Received], MeshCall], body: Any, field: str
) -> None:
    with pytest.raises(HttpError) as caught:
        ask(what, **body)
    assert (caught.value.status, caught.value.field) == (400, field)


def test_probabilities_in_the_order_of_the_models_labels() -> None:
    question = ask(vllm.classify, input=["a", "b"])
    assert question.method is EXTRACT
    next_one = asked(
        question.convert(
            extracted(found(good=0.5, bad=0.25, odd=0.125), found(bad=0.75, good=0.25, odd=0))
        )
    )
    assert next_one.method is GET_MODEL
    answer = content_of(next_one.convert(CARD))
    assert answer["data"] == [
        {"index": 0, "label": "good", "probs": [0.25, 0.5, 0.125], "num_classes": 3},
        {"index": 1, "label": "bad", "probs": [0.75, 0.25, 0.0], "num_classes": 3},
    ]
    msgspec.convert(answer, vllm.Classified)
    assert question.renamed("items[1].text is empty") == "input[1] is empty"


@pytest.mark.parametrize("call", [vllm.classify, vllm.pooling])
def test_labels_are_of_the_model_that_answered(call: Callable[[Received], MeshCall]) -> None:
    question = ask(call, model="docs", input="a", task="classify")
    reply = extracted(found(good=1.0))
    assert asked(question.convert(reply)).message.model == "docs-search"  # type: ignore[attr-defined]
    reply.alias.model = "org/moved"
    assert asked(question.convert(reply)).message.model == "org/moved"  # type: ignore[attr-defined]


def test_labels_of_the_request_are_the_order() -> None:
    question = ask(vllm.classify, input="a", labels=["x", "y"])
    message: Any = question.message
    assert list(message.classify.labels) == ["x", "y"]
    assert content_of(question.convert(extracted(found(y=0.5, x=0.25))))["data"][0]["probs"] == [
        0.25,
        0.5,
    ]


def test_infinity_reads_labels_with_scores() -> None:
    answer = content_of(
        ask(vllm.classify, input=["a"], raw_scores=False).convert(
            extracted(found(good=0.5, bad=0.25))
        )
    )
    assert answer["object"] == "classify"
    assert answer["data"] == [[{"label": "good", "score": 0.5}, {"label": "bad", "score": 0.25}]]
    msgspec.convert(answer, vllm.InfinityClassified)


def test_pooling_gives_vectors() -> None:
    rows = vectors(2)
    question = ask(vllm.pooling, input=["a", "b"])
    assert question.method is ENCODE
    answer = content_of(
        question.convert(pb.EncodeResponse(dense=dense(rows), usage=pb.Usage(input_tokens=3)))
    )
    assert np.array_equal(np.array([one["data"] for one in answer["data"]], np.float32), rows)
    assert [one["object"] for one in answer["data"]] == ["pooling"] * 2
    msgspec.convert(answer, vllm.Pooled)
    encoded = content_of(
        ask(vllm.pooling, input="a", encoding_format="base64").convert(
            pb.EncodeResponse(dense=dense(rows[:1]))
        )
    )
    assert base64.b64decode(encoded["data"][0]["data"]) == rows[0].tobytes()


def test_pooling_options() -> None:
    message: Any = ask(
        vllm.pooling,
        model=None,
        input="a",
        task="token_embed",
        dimensions=4,
        normalize=False,
        role="query",
    ).message
    assert list(message.representations) == [pb.REPRESENTATION_MULTI_VECTOR]
    assert (message.model, message.dimensions, message.normalize, message.role) == (
        "org/embedder",
        4,
        False,
        pb.ROLE_QUERY,
    )


def test_pooling_gives_vectors_of_tokens() -> None:
    rows = vectors(2), vectors(3)
    answer = content_of(
        ask(vllm.pooling, input=["a", "b"]).convert(pb.EncodeResponse(multi_vector=ragged(*rows)))
    )
    assert [len(one["data"]) for one in answer["data"]] == [2, 3]
    assert np.array_equal(np.array(answer["data"][1]["data"], np.float32), rows[1])
    with pytest.raises(HttpError, match="sparse"):
        ask(vllm.pooling, input="a").convert(pb.EncodeResponse(sparse=sparse({1: 0.5})))


def test_pooling_gives_probabilities_of_a_classifier() -> None:
    question = ask(vllm.pooling, input="a")
    second = question.fallback(HttpError("TASK_NOT_SUPPORTED", "no vectors"))
    assert question.fallback(HttpError("INVALID_INPUT", "else")) is None
    assert second is not None
    third = asked(second.convert(extracted(found(good=0.5, bad=0.25, odd=0.125))))
    assert content_of(third.convert(CARD))["data"] == [
        {"index": 0, "object": "pooling", "data": [0.25, 0.5, 0.125]}
    ]
    assert (
        ask(vllm.pooling, model=None, input="a", task="classify").message.model == "org/classifier"  # type: ignore[attr-defined]
    )


async def test_over_http() -> None:
    script = Script(
        models=[card(labels=["bad", "good"])],
        extract=lambda request: extracted(found(good=0.5, bad=0.25)),
    )
    async with edge(script) as http:
        for path in ("/score", "/v1/score"):
            reply = await http.post(
                path, {"model": MODEL, "text_1": "q", "text_2": ["a", "b"]}, x_request_id="id"
            )
            assert (reply.status, reply.json["id"], len(reply.json["data"])) == (200, "score-id", 2)
        reply = await http.post("/classify", {"model": MODEL, "input": "a"})
        assert (reply.status, reply.json["data"][0]["probs"]) == (200, [0.25, 0.5])
        assert (await http.post("/pooling", {"model": MODEL, "input": "a"})).status == 200
        reply = await http.post("/score", {"model": "gpt-4o", "text_1": "q", "text_2": "a"})
        assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
