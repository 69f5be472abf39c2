"""Randomly generated bodies: each dialect returns a call or a 4xx error in its form. Also full
queues.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from shoal.v1 import inference_pb2 as pb

from libs.errors import QueueFull
from services.edge.dialects import cohere, huggingface, jina, ollama, openai
from services.edge.dialects.tei import TEI
from services.edge.messages.base import Answer, Dialect, HttpError, MeshCall, Received
from services.edge.messages.names import AliasNames, AliasTarget
from services.edge.routes import RouteTable
from tests.edge.parts import MODEL, Script, card, edge

BODIES = 300
JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 1 << 31, 1 << 70, 0.5, 1e300, "", "a", "\x00", "é" * 300, "data:,",
    "http://a/b", [], [None], ["a", 3], [[1, 2]], [["a"]], {}, {"text": "a"}, {"a": [{}]}, [{}],
    "NONE", "float", ["float", "int8"], "search_query",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    ask: Callable[[Received], MeshCall | Answer]
    dialect: Dialect
    body: Mapping[str, Any]


CASES = (
    Case(
        cohere.embed_v2,
        cohere.COHERE,
        {
            "model": MODEL,
            "texts": ["a"],
            "input_type": "search_query",
            "embedding_types": ["float"],
            "truncate": "END",
        },
    ),
    Case(
        cohere.embed_v1,
        cohere.COHERE,
        {"model": MODEL, "inputs": [{"content": [{"type": "text", "text": "a"}]}]},
    ),
    Case(
        jina.classify,
        cohere.COHERE,
        {"model": MODEL, "inputs": ["a"], "examples": [{"text": "b", "label": "c"}]},
    ),
    Case(
        jina.classify,
        openai.OPENAI,
        {"model": MODEL, "input": ["a", {"text": "b"}], "labels": ["c"]},
    ),
    Case(
        jina.multi_vector,
        openai.OPENAI,
        {"model": MODEL, "input": ["a"], "embedding_type": "float", "task": "retrieval.query"},
    ),
    Case(
        huggingface.by_task,
        TEI,
        {"inputs": "a", "parameters": {"candidate_labels": ["b"], "multi_label": True}},
    ),
    Case(
        huggingface.text_classification,
        TEI,
        {"inputs": ["a"], "parameters": {"top_k": 1, "function_to_apply": "softmax"}},
    ),
    Case(
        huggingface.zero_shot,
        TEI,
        {"inputs": ["a"], "parameters": {"candidate_labels": "b,c", "hypothesis_template": "{}"}},
    ),
    Case(
        huggingface.token_classification,
        TEI,
        {"inputs": ["a"], "parameters": {"aggregation_strategy": "max", "stride": 0}},
    ),
    Case(
        ollama.embed,
        ollama.OLLAMA,
        {"model": MODEL, "input": ["a"], "truncate": True, "dimensions": 8, "options": {"a": 1}},
    ),
    Case(ollama.embeddings, ollama.OLLAMA, {"model": MODEL, "prompt": "a"}),
    Case(ollama.show, ollama.OLLAMA, {"model": MODEL, "name": "a"}),
)

IMAGE = "data:image/png;base64,iVBORw=="


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": IMAGE}),
        ("/v1/embeddings", {"input": [IMAGE]}),
        ("/v1/embeddings", {"input": [{"text": IMAGE}]}),
        (
            "/v2/embed",
            {"texts": [IMAGE], "input_type": "search_document", "embedding_types": ["float"]},
        ),
        ("/v1/embed", {"texts": [IMAGE], "input_type": "search_document"}),
        ("/v1/rerank", {"query": "a", "documents": [IMAGE]}),
        ("/v1/rerank", {"query": IMAGE, "documents": ["a"]}),
        ("/api/embed", {"input": [IMAGE]}),
        ("/api/embed", {"input": IMAGE}),
        ("/api/embeddings", {"prompt": IMAGE}),
        (f"/v1/encode/{MODEL}", {"items": [{"text": IMAGE}]}),
        (f"/v1/score/{MODEL}", {"query": {"text": "a"}, "items": [{"text": IMAGE}]}),
        ("/embed", {"inputs": IMAGE}),
        ("/embed", {"inputs": [IMAGE]}),
        ("/embed_sparse", {"inputs": IMAGE}),
        ("/rerank", {"query": "a", "texts": [IMAGE]}),
        ("/predict", {"inputs": IMAGE}),
        ("/score", {"text_1": "a", "text_2": [IMAGE]}),
        ("/pooling", {"input": [IMAGE], "task": "embed"}),
    ],
)
def test_base64_image_text_becomes_an_image(path: str, body: dict[str, Any]) -> None:
    route, model = RouteTable().find("POST", path)
    names = AliasNames({alias: AliasTarget(MODEL) for alias in ("embed", "rerank", "predict")})
    question = route.ask(Received(json.dumps({"model": MODEL, **body}).encode(), names, model))
    assert isinstance(question, MeshCall)
    message: Any = question.message
    items = (
        [message.query, *message.documents]
        if isinstance(message, pb.ScoreRequest)
        else message.items
    )
    assert sum(item.image.data == b"\x89PNG" for item in items) == 1
    assert not any(IMAGE in item.text for item in items)


@pytest.mark.parametrize(
    "path",
    ["items[0].image", "items[0].image.data", "items[0].text", "items[0].parts[0].document.data"],
)
def test_errors_of_files_in_texts_use_the_callers_field(path: str) -> None:
    for given, field in (("a", "input"), (["a"], "input[0]")):
        question = openai.embeddings(
            Received(json.dumps({"model": MODEL, "input": given}).encode(), AliasNames({}))
        )
        assert question.renamed(path) == field
        assert question.renamed(f"{path} is empty") == f"{field} is empty"


@pytest.mark.parametrize("number", range(len(CASES)))
def test_random_body(number: int) -> None:
    case, random = CASES[number], Random(number)
    names = AliasNames({"embed": AliasTarget(MODEL), "predict": AliasTarget(MODEL)})
    outcomes: set[type] = set()
    for _ in range(BODIES):
        body = json.dumps(changed(random, case.body)).encode()
        if random.random() < 0.2:
            body = broken(random, body)
        try:
            asked = case.ask(Received(body, names, MODEL))
        except HttpError as problem:
            described = (problem.dialect or case.dialect).error(problem)
            assert 400 <= described.status < 500
            assert isinstance(described.body, bytes)
            assert isinstance(json.loads(described.body), dict)
            outcomes.add(HttpError)
        else:
            assert isinstance(asked, MeshCall)
            asked.message.SerializeToString()
            outcomes.add(MeshCall)
    assert outcomes == {HttpError, MeshCall}


def changed(random: Random, value: Any) -> Any:
    """Return the value with junk in one or two places."""
    if not isinstance(value, Mapping | list) or not value or random.random() < 0.1:
        return random.choice(JUNK)
    content = dict(value) if isinstance(value, Mapping) else dict(enumerate(value))
    for key in random.sample(list(content), min(len(content), random.choice((1, 1, 2)))):
        if random.random() < 0.15:
            del content[key]
        else:
            content[key] = changed(random, content[key])
    return content if isinstance(value, Mapping) else list(content.values())


def broken(random: Random, body: bytes) -> bytes:
    """Return the body with some bytes changed or removed."""
    content = bytearray(body)
    for _ in range(random.choice((1, 3))):
        content[random.randrange(len(content))] = random.randrange(256)
    return bytes(
        content[: random.randrange(len(content) + 1)] if random.random() < 0.3 else content
    )


@pytest.mark.parametrize(
    ("path", "body", "described"),
    [
        ("/v2/embed", {"model": MODEL, "texts": ["a"]}, {"message": "full"}),
        ("/v1/classify", {"model": MODEL, "inputs": ["a"]}, {"message": "full"}),
        (f"/models/{MODEL}", {"inputs": "a"}, {"error": "full", "error_type": "Overloaded"}),
        ("/api/embed", {"model": MODEL, "input": "a"}, {"error": "full"}),
        (
            "/v1/multi-vector",
            {"model": MODEL, "input": "a"},
            {
                "error": {
                    "message": "full",
                    "type": "rate_limit_error",
                    "param": None,
                    "code": "rate_limit_exceeded",
                },
                "message": "full",
                "detail": "full",
            },
        ),
    ],
)
async def test_full_queue_returns_a_retry_time(path: str, body: Any, described: Any) -> None:
    async def act() -> None:
        raise QueueFull("full", retry_after=1.5)

    async with edge(Script(act=act, models=[card()])) as http:
        reply = await http.post(path, body)
    assert (reply.status, reply.json) == (429, described)
    assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("2", "1500")
    assert "x-should-retry" not in reply.headers


def test_pdf_in_a_conversation_is_refused_with_an_alternative_path() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:application/pdf;base64,JVBERi0xLjc="}}
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": [part]}]}).encode()
    route, _ = RouteTable().find("POST", "/v1/chat/completions")
    with pytest.raises(HttpError, match=r"POST /v1/extract/\{model\} with the task text"):
        route.ask(Received(body, AliasNames({})))
