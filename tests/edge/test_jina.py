"""Jina's additions to OpenAI's fields: a vector per token, and labels; from bytes to calls and from
replies to bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from shoal.transport.methods import EXTRACT
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import tensor_pb2

from services.edge.dialects import jina
from services.edge.dialects.openai import EmbeddingsAnswer, embeddings
from services.edge.messages.base import Answer, HttpError, MeshCall, Received
from services.edge.messages.names import AliasNames, AliasTarget
from tests.edge.parts import MODEL, ragged, vectors

NAMES = AliasNames(
    {
        "predict": AliasTarget("org/classifier", adapter="org/a"),
        "small": AliasTarget(MODEL, "query", 4),
    }
)


def ask(what: Callable[[Received], MeshCall], **body: Any) -> MeshCall:
    return what(Received(json.dumps({"model": MODEL, **body}).encode(), NAMES))


def content_of(answer: Answer | MeshCall) -> Any:
    assert isinstance(answer, Answer)
    return json.loads(answer.body if isinstance(answer.body, bytes) else b"".join(answer.body))


def reply(*rows: np.ndarray) -> pb.EncodeResponse:
    return pb.EncodeResponse(multi_vector=ragged(*rows), usage=pb.Usage(input_tokens=7))


def test_multi_vectors_on_both_paths() -> None:
    rows = vectors(2), vectors(3)
    path = ask(jina.multi_vector, input=["a", "b"], input_type="query")
    field = ask(embeddings, input=["a", "b"], input_type="query", return_multivector=True)
    assert path.message == field.message
    message: Any = path.message
    assert (list(message.representations), message.role) == (
        [pb.REPRESENTATION_MULTI_VECTOR],
        pb.ROLE_QUERY,
    )
    found = content_of(path.convert(reply(*rows)))
    assert [(one["object"], one["index"]) for one in found["data"]] == [
        ("embeddings", 0),
        ("embeddings", 1),
    ]
    for one, wanted in zip(found["data"], rows, strict=True):
        assert np.array_equal(np.array(one["embeddings"], np.float32), wanted)
    assert (found["model"], found["object"], found["usage"]["total_tokens"]) == (MODEL, "list", 7)
    msgspec.convert(found, EmbeddingsAnswer)
    assert (
        content_of(ask(embeddings, input="a", return_multivector=False).convert(dense_reply()))[
            "data"
        ][0]["object"]
        == "embedding"
    )


def dense_reply() -> pb.EncodeResponse:
    rows = vectors(1)
    return pb.EncodeResponse(
        dense=tensor_pb2.Tensor(
            data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=rows.shape, data=rows.tobytes()
        )
    )


def test_kinds_of_multi_vectors() -> None:
    rows = vectors(3, 16)
    for said in ({"embedding_type": "base64"}, {"encoding_format": "base64"}):
        question = ask(jina.multi_vector, input="a", **said)
        found = content_of(question.convert(reply(rows)))["data"][0]["embeddings"]
        assert np.array_equal([np.frombuffer(base64.b64decode(row), "<f4") for row in found], rows)
    question = ask(jina.multi_vector, input="a", embedding_type="ubinary")
    assert question.message.data_type == tensor_pb2.DATA_TYPE_UNSPECIFIED  # type: ignore[attr-defined]
    assert np.array_equal(
        content_of(question.convert(reply(rows)))["data"][0]["embeddings"],
        np.packbits(rows > 0, axis=1),
    )
    signed = content_of(
        ask(jina.multi_vector, input="a", embedding_type="binary").convert(reply(rows))
    )["data"][0]["embeddings"]
    assert np.array_equal(
        np.unpackbits((np.array(signed) + 128).astype(np.uint8), axis=1), rows > 0
    )


def test_large_answer_is_sent_in_pieces() -> None:
    rows = vectors(1000, 128)
    answer = ask(jina.multi_vector, input=["a", "b"]).convert(reply(rows, rows))
    assert isinstance(answer, Answer)
    assert not isinstance(answer.body, bytes)
    pieces = list(answer.body)
    assert max(map(len, pieces)) < 1 << 20
    assert [len(one["embeddings"]) for one in json.loads(b"".join(pieces))["data"]] == [1000, 1000]


def test_multi_vectors_are_not_cut_by_an_alias() -> None:
    message: Any = ask(jina.multi_vector, model="small", input="a").message
    assert (message.model, message.role, message.dimensions) == (MODEL, pb.ROLE_QUERY, 0)
    assert ask(jina.multi_vector, input="a", dimensions=64).message.dimensions == 64  # type: ignore[attr-defined]
    assert ask(jina.multi_vector, input="a").renamed("representations[0]") == "return_multivector"


def test_classify() -> None:
    question = ask(jina.classify, input=["a", {"text": "b"}], labels=["yes", "no"])
    message: Any = question.message
    assert question.method == EXTRACT
    assert message.classify == pb.ClassifyTask(labels=["yes", "no"], among_labels=True)
    assert [item.text for item in message.items] == ["a", "b"]
    labels = [pb.LabelScore(label="yes", score=0.75), pb.LabelScore(label="no", score=0.25)]
    extraction = pb.Extraction(labels=labels)
    found = content_of(
        question.convert(
            pb.ExtractResponse(results=[extraction, extraction], usage=pb.Usage(input_tokens=7))
        )
    )
    msgspec.convert(found, jina.JinaClassifyAnswer)
    assert found["usage"]["total_tokens"] == 7
    assert found["data"][1] == {
        "object": "classification",
        "index": 1,
        "prediction": "yes",
        "score": 0.75,
        "predictions": [{"label": "yes", "score": 0.75}, {"label": "no", "score": 0.25}],
    }
    assert question.renamed("classify.labels[1] is empty") == "labels[1] is empty"
    assert question.renamed("items[1].text is empty") == "input[1] is empty"
    message = ask(jina.classify, model=None, input=["a"]).message
    assert (message.model, message.adapter) == ("org/classifier", "org/a")


def test_late_chunking_joins_the_inputs() -> None:
    texts = ["Berlin is a city.", "It has rivers. ", "日本語。", "次の文。"]
    question = ask(embeddings, input=texts, late_chunking=True)
    message: Any = question.message
    (item,) = message.items
    assert item.text == "Berlin is a city. It has rivers. 日本語。次の文。"
    assert [item.text[span.start : span.end] for span in item.spans] == texts
    assert (message.chunking.method, message.chunking.late) == (pb.Chunking.METHOD_SPANS, True)
    assert question.renamed("items[0].spans[2] is wrong") == "input[2] is wrong"
    assert question.renamed("items[0].text has too much") == "input has too much"


@pytest.mark.parametrize(
    ("what", "body", "field"),
    [
        (jina.multi_vector, {}, "input"),
        (jina.multi_vector, {"input": [[1, 2]]}, "input"),
        (
            jina.multi_vector,
            {"input": "a", "embedding_type": ["float", "base64"]},
            "embedding_type",
        ),
        (jina.multi_vector, {"input": "a", "embedding_type": "uint8"}, "embedding_type"),
        (jina.multi_vector, {"input": "a", "input_type": "question"}, "input_type"),
        (jina.multi_vector, {"input": "a", "dimensions": 0}, "dimensions"),
        (jina.multi_vector, {"input": "a", "late_chunking": True}, "late_chunking"),
        (jina.classify, {"labels": ["a"]}, "input"),
        (jina.classify, {"input": "a", "labels": ["a"]}, "input"),
        (jina.classify, {"input": [{}], "labels": ["a"]}, "input[0]"),
        (jina.classify, {"input": [{"image": "http://a/b"}], "labels": ["a"]}, "input[0].image"),
        (jina.classify, {"input": ["a"], "labels": "a"}, "labels"),
        (jina.classify, {"input": ["a"], "classifier_id": "c"}, "classifier_id"),
    ],
)
def test_unsupported_request_is_refused_with_its_field(
    what: Callable[[Received], MeshCall], body: Any, field: str
) -> None:
    with pytest.raises(HttpError) as caught:
        ask(what, **body)
    assert (caught.value.status, caught.value.field) == (400, field)
