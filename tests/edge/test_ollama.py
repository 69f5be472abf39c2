"""Ollama's API, from bytes to calls and from replies to bytes, without sockets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from shoal.transport.methods import ENCODE, GET_MODEL, LIST_MODELS
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from services.edge.dialects import ollama
from services.edge.messages.base import Answer, HttpError, MeshCall, Received
from services.edge.messages.names import AliasNames, AliasTarget
from tests.edge.parts import MODEL, Script, card, dense, edge, vectors

NAMES = AliasNames(
    {"nomic-embed-text": AliasTarget(MODEL, "document", 4), "e5:latest": AliasTarget("org/e5")}
)


def ask(what: Callable[[Received], MeshCall], body: Any = None) -> MeshCall:
    return what(Received(json.dumps(body).encode() if body is not None else b"", NAMES))


def content_of(answer: Answer | MeshCall) -> Any:
    assert isinstance(answer, Answer)
    return json.loads(answer.body if isinstance(answer.body, bytes) else b"".join(answer.body))


def test_embed() -> None:
    rows = vectors(2)
    question = ask(
        ollama.embed,
        {"model": MODEL, "input": ["a", "b"], "keep_alive": "5m", "options": {"num_ctx": 8}},
    )
    assert question.message == pb.EncodeRequest(
        model=MODEL,
        items=[pb.Item(text="a"), pb.Item(text="b")],
        representations=[pb.REPRESENTATION_DENSE],
        normalize=True,
    )
    timings = pb.Timings(total_seconds=0.25, queue_seconds=0.125)
    found = content_of(
        question.convert(
            pb.EncodeResponse(dense=dense(rows), usage=pb.Usage(input_tokens=7), timings=timings)
        )
    )
    assert np.array_equal(np.array(found["embeddings"], np.float32), rows)
    assert (found["model"], found["prompt_eval_count"]) == (MODEL, 7)
    assert (found["total_duration"], found["load_duration"]) == (250_000_000, 125_000_000)
    msgspec.convert(found, ollama.OllamaEmbedAnswer)
    large = question.convert(pb.EncodeResponse(dense=dense(vectors(300, 1024))))
    assert isinstance(large, Answer)
    assert not isinstance(large.body, bytes)
    assert len(content_of(large)["embeddings"]) == 300


def test_options_and_names() -> None:
    message: Any = ask(
        ollama.embed, {"model": f"{MODEL}:latest", "input": "a", "truncate": False, "dimensions": 8}
    ).message
    assert (message.model, message.truncation, message.dimensions) == (MODEL, pb.TRUNCATION_NONE, 8)
    message = ask(ollama.embed, {"model": "nomic-embed-text:latest", "input": "a"}).message
    assert (message.model, message.role, message.dimensions) == (MODEL, pb.ROLE_DOCUMENT, 4)
    assert ask(ollama.embed, {"model": "e5:latest", "input": "a"}).message.model == "org/e5"  # type: ignore[attr-defined]
    assert (
        ask(ollama.embed, {"model": f"{MODEL}:query", "input": "a"}).message.role == pb.ROLE_QUERY  # type: ignore[attr-defined]
    )


def test_embeddings_has_one_text() -> None:
    question = ask(ollama.embeddings, {"model": MODEL, "prompt": "a"})
    assert (question.method, [item.text for item in question.message.items]) == (ENCODE, ["a"])  # type: ignore[attr-defined]
    assert not question.message.HasField("normalize")
    rows = vectors(1)
    found = content_of(question.convert(pb.EncodeResponse(dense=dense(rows))))
    assert np.array_equal(np.array(found["embedding"], np.float32), rows[0])
    assert question.renamed("items[0].text is empty") == "prompt is empty"


@pytest.mark.parametrize("given", ["", [], None])
def test_empty_input_reports_whether_the_model_is_known(given: Any) -> None:
    body = {"model": MODEL, "input": given} if given is not None else {"model": MODEL}
    question = ask(ollama.embed, body)
    assert question.method == GET_MODEL
    assert content_of(question.convert(models_pb2.GetModelResponse()))["embeddings"] == []
    assert content_of(
        ask(ollama.embeddings, {"model": MODEL}).convert(models_pb2.GetModelResponse())
    ) == {"embedding": []}


def test_tags_and_ps() -> None:
    cold = models_pb2.Model(model="org/cold", state=models_pb2.MODEL_STATE_COLD)
    warm = card(
        family="bert",
        data_type="float32",
        bytes=90,
        revision="r",
        created_unix_seconds=1_700_000_000,
    )
    reply = models_pb2.ListModelsResponse(models=[warm, cold])
    question = ask(ollama.tags)
    assert question.method == LIST_MODELS
    found = content_of(question.convert(reply))
    msgspec.convert(found, ollama.OllamaModels)
    assert [one["model"] for one in found["models"]] == [
        "e5:latest",
        "nomic-embed-text",
        "org/cold",
        MODEL,
    ]
    one = found["models"][3]
    assert (one["modified_at"], found["models"][2]["modified_at"]) == (
        "2023-11-14T22:13:20Z",
        ollama.LONG_AGO,
    )
    assert (
        one["size"],
        one["digest"],
        one["details"]["family"],
        one["details"]["quantization_level"],
    ) == (
        90,
        "r",
        "bert",
        "float32",
    )
    loaded = content_of(ask(ollama.resident).convert(reply))
    msgspec.convert(loaded, ollama.OllamaModels)
    assert [(one["name"], one["size_vram"], one["context_length"]) for one in loaded["models"]] == [
        (MODEL, 90, 256)
    ]


@pytest.mark.parametrize("key", ["model", "name"])
def test_show(key: str) -> None:
    question = ask(ollama.show, {key: f"{MODEL}:latest"})
    assert (question.method, question.message.model) == (GET_MODEL, MODEL)  # type: ignore[attr-defined]
    found = content_of(question.convert(models_pb2.GetModelResponse(model=card(family="bert"))))
    msgspec.convert(found, ollama.OllamaShown)
    assert found["capabilities"] == ["embedding"]
    assert (
        found["model_info"]["bert.context_length"],
        found["model_info"]["bert.embedding_length"],
    ) == (256, 8)
    ranker = card(tasks=[models_pb2.TASK_SCORE], representations=[], dimensions=0)
    assert (
        content_of(question.convert(models_pb2.GetModelResponse(model=ranker)))["capabilities"]
        == []
    )


@pytest.mark.parametrize(
    ("what", "body", "status", "field"),
    [
        (ollama.embed, {}, 400, "model"),
        (ollama.embed, {"model": MODEL, "input": 3}, 400, "input"),
        (ollama.embed, {"model": MODEL, "input": ["a", 3]}, 400, "input[1]"),
        (ollama.embed, {"model": MODEL, "input": "a", "dimensions": 0}, 400, "dimensions"),
        (ollama.embed, {"model": MODEL, "input": "a", "truncate": "END"}, 400, "truncate"),
        (ollama.embed, {"model": "all-minilm", "input": "a"}, 404, "model"),
        (ollama.embed, {"model": ":latest", "input": "a"}, 404, "model"),
        (ollama.embeddings, {"model": MODEL, "prompt": ["a"]}, 400, "prompt"),
        (ollama.show, {}, 404, "model"),
    ],
)
def test_unsupported_request_is_refused_with_its_field(
    what: Callable[[Received], MeshCall], body: Any, status: int, field: str
) -> None:
    with pytest.raises(HttpError) as caught:
        ask(what, body)
    assert (caught.value.status, caught.value.field) == (status, field)


@pytest.mark.parametrize(
    ("reason", "status"), [("INVALID_INPUT", 400), ("MODEL_NOT_FOUND", 404), ("QUEUE_FULL", 429)]
)
def test_errors_are_text(reason: str, status: int) -> None:
    answer = ollama.error(HttpError(reason, "why"))
    assert (answer.status, content_of(answer)) == (status, {"error": "why"})
    assert (b"retry-after" in dict(answer.headers)) == (status == 429)


async def test_pull_reports_whether_a_model_exists() -> None:
    failed = models_pb2.Model(
        model="org/failed", state=models_pb2.MODEL_STATE_FAILED, last_error="no config.json"
    )
    async with edge(Script(models=[card(), failed])) as http:
        reply = await http.post("/api/pull", {"model": f"{MODEL}:latest"})
        assert (reply.status, reply.headers["content-type"]) == (200, "application/x-ndjson")
        assert reply.body == b'{"status":"success"}\n'
        assert (await http.post("/api/pull", {"name": MODEL, "stream": False})).json == {
            "status": "success"
        }
        reply = await http.post("/api/pull", {"model": "org/unknown"})
        assert (reply.status, reply.json) == (404, {"error": "no worker knows org/unknown"})
        reply = await http.post("/api/pull", {"model": "org/failed"})
        assert (reply.status, reply.json) == (404, {"error": "no config.json"})
        reply = await http.post("/api/push", {"model": MODEL})
        assert (reply.status, list(reply.json)) == (404, ["error"])
        assert isinstance(reply.json["error"], str)


async def test_rerank_in_the_form_of_cohere() -> None:
    async with edge(Script(models=[card()])) as http:
        body = {"model": f"{MODEL}:latest", "query": "fish", "documents": ["a", "b"], "top_n": 1}
        found = (await http.post("/api/rerank", body)).json
        assert (
            found["results"]
            == (await http.post("/v1/rerank", body | {"model": MODEL})).json["results"]
        )
        assert len(found["results"]) == 1
        reply = await http.post("/api/rerank", {"query": "fish", "documents": ["a"]})
        assert isinstance(reply.json["error"], str)


async def test_over_http() -> None:
    async with edge(Script(models=[card()])) as http:
        assert (await http.get("/")).body == b"Ollama is running"
        assert (await http.send("HEAD", "/", b"", {})).status == 200
        assert (await http.get("/api/version")).json == {"version": ollama.VERSION}
        assert (await http.get("/api/tags")).json["models"][0]["name"] == MODEL
        reply = await http.post("/api/show", {"model": "org/unknown"})
        assert (reply.status, reply.json) == (404, {"error": "no worker knows org/unknown"})
        reply = await http.send("GET", "/api/embed", b"", {})
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
