"""Cohere's embed and classify, from bytes to calls and from replies to bytes, without sockets."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from shoal.transport.methods import ENCODE, EXTRACT, GET_MODEL, LIST_MODELS
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, tensor_pb2

from libs.models.text.processing.quantise import store
from services.edge.dialects import cohere, jina
from services.edge.messages.base import Answer, HttpError, MeshCall, Received
from services.edge.messages.names import AliasNames, AliasTarget
from tests.edge.parts import MODEL, card, dense, vectors

NAMES = AliasNames(
    {
        "embed": AliasTarget("org/embedder"),
        "predict": AliasTarget("org/classifier"),
        "embed-v4.0": AliasTarget(MODEL, "query", 4),
    }
)
EXAMPLES = [
    {"text": "a shark", "label": "fish"},
    {"text": "a chair", "label": "wood"},
    {"text": "trout", "label": "fish"},
]


def ask(what: Callable[[Received], MeshCall], **body: Any) -> MeshCall:
    return what(Received(json.dumps({"model": MODEL, **body}).encode(), NAMES, request_id="r1"))


def content_of(answer: Answer | MeshCall) -> Any:
    assert isinstance(answer, Answer)
    return json.loads(answer.body if isinstance(answer.body, bytes) else b"".join(answer.body))


def reply(rows: np.ndarray) -> pb.EncodeResponse:
    return pb.EncodeResponse(dense=dense(rows), usage=pb.Usage(input_tokens=7))


def classes(*rows: dict[str, float]) -> pb.ExtractResponse:
    results = [
        pb.Extraction(
            labels=[pb.LabelScore(label=label, score=score) for label, score in row.items()]
        )
        for row in rows
    ]
    return pb.ExtractResponse(results=results, usage=pb.Usage(input_tokens=7))


def test_v2_has_types_and_v1_the_vectors_themselves() -> None:
    rows = vectors(2)
    second = content_of(
        ask(cohere.embed_v2, texts=["a", "b"], input_type="search_document").convert(reply(rows))
    )
    assert np.array_equal(np.array(second["embeddings"]["float"], np.float32), rows)
    assert (second["id"], second["response_type"], second["texts"]) == (
        "r1",
        "embeddings_by_type",
        ["a", "b"],
    )
    assert second["meta"]["billed_units"] == {"input_tokens": 7}
    first = content_of(ask(cohere.embed_v1, texts=["a", "b"]).convert(reply(rows)))
    assert np.array_equal(np.array(first["embeddings"], np.float32), rows)
    assert (first["response_type"], first["texts"]) == ("embeddings_floats", ["a", "b"])
    typed = content_of(
        ask(cohere.embed_v1, texts=["a", "b"], embedding_types=["float"]).convert(reply(rows))
    )
    assert (typed["response_type"], list(typed["embeddings"])) == ("embeddings_by_type", ["float"])
    for answer in (first, second, typed):
        msgspec.convert(answer, cohere.CohereEmbedAnswer)


@pytest.mark.parametrize(
    ("word", "role"),
    [
        ("search_query", pb.ROLE_QUERY),
        ("search_document", pb.ROLE_DOCUMENT),
        ("classification", pb.ROLE_UNSPECIFIED),
        ("clustering", pb.ROLE_UNSPECIFIED),
        ("image", pb.ROLE_UNSPECIFIED),
        (None, pb.ROLE_UNSPECIFIED),
    ],
)
def test_roles(word: str | None, role: pb.Role) -> None:
    assert ask(cohere.embed_v2, texts=["a"], input_type=word).message.role == role  # type: ignore[attr-defined]


def test_options_and_aliases() -> None:
    message: Any = ask(
        cohere.embed_v2, texts=["a"], output_dimension=16, truncate="NONE", priority=3
    ).message
    assert message == pb.EncodeRequest(
        model=MODEL,
        items=[pb.Item(text="a")],
        representations=[pb.REPRESENTATION_DENSE],
        dimensions=16,
        truncation=pb.TRUNCATION_NONE,
    )
    assert (
        ask(cohere.embed_v2, texts=["a"], truncate="START").message.truncation  # type: ignore[attr-defined]
        == pb.TRUNCATION_START
    )
    message = ask(cohere.embed_v2, model="embed-v4.0", texts=["a"]).message
    assert (message.model, message.role, message.dimensions) == (MODEL, pb.ROLE_QUERY, 4)
    assert ask(cohere.embed_v1, model=None, texts=["a"]).message.model == "org/embedder"  # type: ignore[attr-defined]
    message = ask(
        cohere.embed_v2,
        texts=["a"],
        priority="bulk",
        pool="l4",
        adapter="org/a",
        instruction="find",
    ).message
    assert (message.priority, message.pool, message.adapter, message.instruction) == (
        pb.PRIORITY_BULK,
        "l4",
        "org/a",
        "find",
    )


def test_one_type_is_stored_by_the_mesh() -> None:
    rows = np.array([[1, -127, 5]], np.int8)
    tensor = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_INT8,
        shape=rows.shape,
        data=rows.tobytes(),
        scale=np.array([0.5], np.float32).tobytes(),
    )
    question = ask(cohere.embed_v2, texts=["a"], embedding_types=["int8"])
    assert question.message.data_type == tensor_pb2.DATA_TYPE_INT8  # type: ignore[attr-defined]
    assert content_of(question.convert(pb.EncodeResponse(dense=tensor)))["embeddings"] == {
        "int8": [[1, -127, 5]]
    }
    real = vectors(2, 16)
    packed = np.packbits(real > 0, axis=1)
    tensor = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_BINARY, shape=real.shape, data=packed.tobytes()
    )
    question = ask(cohere.embed_v2, texts=["a", "b"], embedding_types=["binary", "ubinary"])
    assert question.message.data_type == tensor_pb2.DATA_TYPE_BINARY  # type: ignore[attr-defined]
    found = content_of(question.convert(pb.EncodeResponse(dense=tensor)))["embeddings"]
    assert np.array_equal(found["ubinary"], packed)
    assert np.array_equal(
        np.unpackbits((np.array(found["binary"]) + 128).astype(np.uint8), axis=1), real > 0
    )


def test_several_types_equal_those_stored_by_the_mesh() -> None:
    rows = vectors(3, 16)
    rows[1] = 0
    kinds = ["float", "int8", "binary", "ubinary", "base64", "float"]
    question = ask(cohere.embed_v2, texts=["a", "b", "c"], embedding_types=kinds)
    assert question.message.data_type == tensor_pb2.DATA_TYPE_UNSPECIFIED  # type: ignore[attr-defined]
    found = content_of(question.convert(reply(rows)))["embeddings"]
    assert np.array_equal(np.array(found["float"], np.float32), rows)
    assert np.array_equal(found["int8"], store(rows, "int8").values)
    assert np.array_equal(found["ubinary"], store(rows, "binary").values)
    assert np.array_equal(np.array(found["binary"]) + 128, found["ubinary"])
    assert np.array_equal(
        [np.frombuffer(base64.b64decode(row), "<f4") for row in found["base64"]], rows
    )


@pytest.mark.parametrize("kind", ["float", "base64"])
def test_large_answer_is_sent_in_pieces(kind: str) -> None:
    rows, texts = vectors(300, 1024), [f"text {index}" for index in range(300)]
    answer = ask(cohere.embed_v2, texts=texts, embedding_types=[kind]).convert(reply(rows))
    assert isinstance(answer, Answer)
    assert not isinstance(answer.body, bytes)
    pieces = list(answer.body)
    assert max(map(len, pieces)) < 1 << 20
    found = json.loads(b"".join(pieces))
    assert found["texts"] == texts
    assert len(found["embeddings"][kind]) == 300


def test_inputs_and_images() -> None:
    picture = base64.b64encode(b"\x89PNG").decode()
    uri = f"data:image/png;base64,{picture}"
    content = [
        {"content": [{"type": "text", "text": "a"}]},
        {"content": [{"type": "image_url", "image_url": {"url": uri}}]},
    ]
    message: Any = ask(cohere.embed_v2, inputs=content).message
    assert (message.items[0].text, message.items[1].image.data) == ("a", b"\x89PNG")
    message = ask(cohere.embed_v2, images=[uri], input_type="image").message
    assert message.items[0].image.data == b"\x89PNG"
    assert (
        ask(cohere.embed_v2, inputs=content).renamed("items[0].text is empty")
        == "inputs[0].content is empty"
    )
    assert (
        ask(cohere.embed_v2, texts=["a"]).renamed("items[0].text is empty") == "texts[0] is empty"
    )
    assert ask(cohere.embed_v2, texts=["a"]).renamed("dimensions is 9") == "output_dimension is 9"


def test_classify_by_the_models_own_labels() -> None:
    question = ask(cohere.classify, inputs=["a", "b"])
    message: Any = question.message
    assert (question.method, list(message.classify.labels)) == (EXTRACT, [])
    assert not message.classify.HasField("multi_label")
    found = content_of(
        question.convert(classes({"yes": 0.75, "no": 0.25}, {"no": 0.625, "yes": 0.375}))
    )
    msgspec.convert(found, cohere.CohereClassifyAnswer)
    assert found["classifications"][1] == {
        "id": "r1-1",
        "input": "b",
        "prediction": "no",
        "predictions": ["no"],
        "confidence": 0.625,
        "confidences": [0.625],
        "labels": {"no": {"confidence": 0.625}, "yes": {"confidence": 0.375}},
        "classification_type": "single-label",
    }
    several = content_of(
        question.convert(classes({"yes": 0.875, "no": 0.75, "so": 0.25}, {"no": 0.25}))
    )["classifications"]
    assert [one["classification_type"] for one in several] == ["multi-label"] * 2
    assert [one["predictions"] for one in several] == [["yes", "no"], []]
    assert "prediction" not in several[0]


def test_classify_by_examples_compares_vectors() -> None:
    question = ask(cohere.classify, inputs=["eel", "oak"], examples=EXAMPLES)
    assert question.method == GET_MODEL
    shown: Any = question.convert(models_pb2.GetModelResponse(model=card()))
    assert (shown.method, [item.text for item in shown.message.items]) == (
        ENCODE,
        ["a shark", "a chair", "trout"],
    )
    assert shown.renamed("items[1].text is empty") == "examples[1].text is empty"
    rows = np.array([[1, 0], [0, 1], [0.6, 0.8]], np.float32)
    asked: Any = shown.convert(reply(rows))
    assert ([item.text for item in asked.message.items], asked.message.normalize) == (
        ["eel", "oak"],
        True,
    )
    assert asked.renamed("items[1].text") == "inputs[1]"
    found = content_of(asked.convert(reply(np.array([[1, 0], [0, 1]], np.float32))))
    assert found["meta"]["billed_units"] == {"input_tokens": 14}
    assert [one["prediction"] for one in found["classifications"]] == ["fish", "wood"]
    fish = np.array([1.6, 0.8]) / np.linalg.norm([1.6, 0.8])
    shares = np.exp(cohere.SOFTMAX_SCALE * np.array([fish[1], 1.0]))
    assert found["classifications"][1]["labels"]["wood"]["confidence"] == pytest.approx(
        shares[1] / shares.sum(), abs=1e-6
    )


def test_inputs_are_encoded_by_the_model_of_the_examples() -> None:
    question = ask(cohere.classify, inputs=["eel"], examples=EXAMPLES)
    shown: Any = question.convert(models_pb2.GetModelResponse(model=card()))
    first = reply(np.eye(3, dtype=np.float32))
    first.embedding_id = "0" * 16
    asked: Any = shown.convert(first)
    assert (asked.message.model, asked.message.expect_embedding_id) == (MODEL, "0" * 16)
    first.alias.model = "org/moved"
    asked = shown.convert(first)
    assert (asked.message.model, asked.message.expect_embedding_id) == ("org/moved", "0" * 16)
    second = reply(np.eye(1, 3, dtype=np.float32))
    asked.convert(second)
    assert second.alias.model == "org/moved"


def test_classify_by_examples_with_a_classifier() -> None:
    question = ask(cohere.classify, inputs=["eel"], examples=EXAMPLES, truncate="START")
    classifier = card(tasks=[models_pb2.TASK_CLASSIFY], representations=[])
    asked: Any = question.convert(models_pb2.GetModelResponse(model=classifier))
    assert (asked.method, list(asked.message.classify.labels)) == (EXTRACT, ["fish", "wood"])
    assert (asked.message.classify.multi_label, asked.message.truncation) == (
        False,
        pb.TRUNCATION_START,
    )
    assert asked.renamed("classify.labels[1]") == "examples"
    assert asked.dialect is cohere.COHERE
    unknown = question.fallback(HttpError("MODEL_NOT_FOUND", ""))
    assert unknown is not None
    assert unknown.method == ENCODE
    again = unknown.fallback(HttpError("TASK_NOT_SUPPORTED", ""))
    assert again is not None
    assert again.message == asked.message
    assert question.fallback(HttpError("QUEUE_FULL", "")) is None


def test_jinas_classify_is_distinguished_by_its_body() -> None:
    question = ask(jina.classify, inputs=["a"])
    assert question.dialect is cohere.COHERE
    with pytest.raises(HttpError) as caught:
        ask(jina.classify, inputs=[3])
    assert caught.value.dialect is cohere.COHERE
    with pytest.raises(HttpError) as caught:
        ask(jina.classify, inputs=["a"], input=3)
    assert caught.value.dialect is None
    assert ask(jina.classify, model=None, inputs=["a"]).message.model == "org/classifier"  # type: ignore[attr-defined]


def test_check_api_key() -> None:
    question = cohere.check_api_key(Received(b"", NAMES))
    assert question.method == LIST_MODELS
    assert content_of(question.convert(models_pb2.ListModelsResponse())) == {"valid": True}


@pytest.mark.parametrize(
    ("what", "body", "field"),
    [
        (cohere.embed_v2, {}, "texts"),
        (cohere.embed_v2, {"texts": ["a"], "images": ["b"]}, "images"),
        (cohere.embed_v2, {"texts": "a"}, "texts"),
        (cohere.embed_v2, {"texts": ["a", None]}, "texts[1]"),
        (cohere.embed_v2, {"texts": ["a"], "embedding_types": ["float7"]}, "embedding_types[0]"),
        (
            cohere.embed_v2,
            {"texts": ["a"], "embedding_types": ["float", "uint8"]},
            "embedding_types[1]",
        ),
        (cohere.embed_v2, {"texts": ["a"], "embedding_types": "float"}, "embedding_types"),
        (cohere.embed_v2, {"texts": ["a"], "output_dimension": 0}, "output_dimension"),
        (cohere.embed_v2, {"texts": ["a"], "max_tokens": 8}, "max_tokens"),
        (cohere.embed_v2, {"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        (cohere.embed_v2, {"texts": ["a"], "input_type": "question"}, "input_type"),
        (cohere.embed_v2, {"inputs": [{"content": []}]}, "inputs[0].content"),
        (cohere.embed_v2, {"inputs": [{"content": [{"type": "text"}]}]}, "inputs[0].content[0]"),
        (
            cohere.embed_v2,
            {"inputs": [{"content": [{"type": "sound", "text": "a"}]}]},
            "inputs[0].content[0]",
        ),
        (cohere.embed_v2, {"images": ["https://example.org/a.png"]}, "images[0]"),
        (cohere.classify, {}, "inputs"),
        (cohere.classify, {"inputs": "a"}, "inputs"),
        (cohere.classify, {"inputs": ["a"], "examples": []}, "examples"),
        (cohere.classify, {"inputs": ["a"], "examples": [{"text": "a"}]}, "examples[0].label"),
        (cohere.classify, {"inputs": ["a"], "preset": "p"}, "preset"),
        (cohere.classify, {"inputs": ["a"], "truncate": "MIDDLE"}, "truncate"),
    ],
)
def test_unsupported_request_is_refused_with_its_field(
    what: Callable[[Received], MeshCall], body: Any, field: str
) -> None:
    with pytest.raises(HttpError) as caught:
        ask(what, **body)
    assert (caught.value.status, caught.value.field) == (400, field)


def test_missing_model_without_an_alias_is_refused() -> None:
    with pytest.raises(HttpError, match="`shoal up org/name` or the alias `embed`"):
        cohere.embed_v1(Received(b'{"texts": ["a"]}', AliasNames({})))


@pytest.mark.parametrize(
    ("reason", "status", "retry"),
    [
        ("INVALID_INPUT", 400, {b"x-should-retry": b"false"}),
        ("UNAUTHENTICATED", 401, {b"www-authenticate": b"Bearer", b"x-should-retry": b"false"}),
        ("MODEL_NOT_FOUND", 404, {b"x-should-retry": b"false"}),
        ("QUEUE_FULL", 429, {b"retry-after": b"1", b"retry-after-ms": b"1000"}),
        ("NO_CAPACITY", 503, {b"retry-after": b"1", b"retry-after-ms": b"1000"}),
        ("DEADLINE_PASSED", 504, {}),
    ],
)
def test_errors(reason: str, status: int, retry: dict[bytes, bytes]) -> None:
    answer = cohere.error(HttpError(reason, "why", field="texts"))
    assert (answer.status, content_of(answer), dict(answer.headers)) == (
        status,
        {"message": "why"},
        retry,
    )
