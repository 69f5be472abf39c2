"""The file of aliases, and the edge's settings."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from libs.errors import InvalidInput
from libs.serving.watched import Watched
from services.edge.aliases import read_aliases, watch_aliases
from services.edge.messages.names import AliasNames, AliasTarget
from services.edge.settings import Settings
from tests.edge.parts import MODEL, Script, card, dense, edge, vectors

FILE = """
aliases:
  text-embedding-3-small: {model: org/model, role: query, dimensions: 4}
  rerank: org/ranker
  docs: {alias: docs-search, role: document}
"""


def test_aliases_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "aliases.yaml"
    path.write_text(FILE)
    assert read_aliases(path).aliases == {
        "text-embedding-3-small": AliasTarget("org/model", "query", 4),
        "rerank": AliasTarget("org/ranker"),
        "docs": AliasTarget("docs-search", "document"),
    }


def test_valid_and_invalid_names() -> None:
    names = AliasNames({"e5": AliasTarget("org/e5", "document", 3)})
    assert names.find("org/model") == AliasTarget("org/model")
    assert names.find("org/model@v1") == AliasTarget("org/model@v1")
    assert names.find("e5:query") == AliasTarget("org/e5", "query", 3)
    for unknown in ("", "gpt-4", "a/b/c", "../etc", "org/model:fast", ":query", "e5:"):
        assert names.find(unknown) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a", "one key"),
        ("other: {}", "one key"),
        ("aliases: [a]", "one key"),
        ("aliases: {a: {model: b}}", "org/name"),
        ("aliases: {a: {alias: o/m}}", "a.alias"),
        ("aliases: {a: {alias: [b]}}", "a.alias"),
        ("aliases: {a: {alias: b, model: o/m}}", "a.alias"),
        ("aliases: {a: {model: o/m, role: both}}", "a.role"),
        ("aliases: {a: {model: o/m, dimensions: -1}}", "a.dimensions"),
        ("aliases: {a: {model: o/m, dimensions: true}}", "a.dimensions"),
        ("aliases: {a: {model: o/m, adapter: a b}}", "a.adapter"),
        ("aliases: {a: {model: o/m, colour: x}}", "a map with"),
        ("aliases: {'a b': o/m}", "not a valid name"),
        ("aliases: {a: 3}", "a map with"),
        ("a: [", "not YAML"),
    ],
)
def test_invalid_aliases_are_reported_with_file_and_key(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "aliases.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=words) as caught:
        read_aliases(path)
    assert str(path) in caught.value.message
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_aliases(tmp_path / "missing")


async def test_running_edge_reloads_changed_aliases(tmp_path: Path) -> None:
    path = tmp_path / "aliases.yaml"
    path.write_text(FILE)
    script = Script()
    async with edge(script, aliases=watch_aliases(path)) as http:
        body = {"model": "text-embedding-3-small", "input": "a"}
        assert (await http.post("/v1/embeddings", body)).json["model"] == "text-embedding-3-small"
        assert (script.requests[0].model, script.requests[0].dimensions) == (MODEL, 4)
        path.write_text("aliases: {new: org/other}")
        os.utime(path, (time.time() - 5, time.time() - 5))
        end = time.monotonic() + 60
        while (await http.post("/v1/embeddings", body)).status != 404:
            assert time.monotonic() < end
        assert (await http.post("/v1/embeddings", body | {"model": "new"})).status == 200
        listed = (await http.get("/v1/models")).json
        assert [entry["id"] for entry in listed["data"]] == ["new"]


async def test_alias_of_the_mesh_is_resolved_by_the_router() -> None:
    def encode(request: pb.EncodeRequest) -> pb.EncodeResponse:
        rows = dense(vectors(len(request.items)))
        alias = pb.ResolvedAlias(model="org/new") if request.model == "docs-search" else None
        return pb.EncodeResponse(dense=rows, alias=alias)

    script = Script(encode=encode)
    names = AliasNames({"docs": AliasTarget("docs-search", "query")})
    async with edge(script, aliases=Watched.fixed(names)) as http:
        reply = await http.post("/v1/embeddings", {"model": "docs", "input": "a"})
        assert (reply.status, reply.json["model"]) == (200, "docs")
        assert reply.headers["x-shoal-model"] == "org/new"
        assert script.requests[0].role == pb.ROLE_QUERY
        reply = await http.post("/v1/embeddings", {"model": MODEL, "input": "a"})
        assert "x-shoal-model" not in reply.headers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SHOAL_EDGE_ID", "a b"),
        ("SHOAL_HTTP_ADDRESS", "8080"),
        ("SHOAL_ROUTERS", "a:1,,b:2"),
        ("SHOAL_HTTP_BODY_BYTES", "10"),
        ("SHOAL_HTTP_IN_FLIGHT_BYTES", "10"),
        ("SHOAL_HTTP_CONNECTIONS", "0"),
        ("SHOAL_HTTP_HEADER_SECONDS", "0"),
        ("SHOAL_HTTP_BODY_SECONDS", "soon"),
        ("SHOAL_HTTP_BODY_PAUSE_SECONDS", "0"),
        ("SHOAL_HTTP_IDLE_SECONDS", "-1"),
        ("SHOAL_DEADLINE_SECONDS", "0"),
        ("SHOAL_LONGEST_DEADLINE_SECONDS", "1e9"),
        ("SHOAL_GRACE_SECONDS", "-1"),
        ("SHOAL_LOG_LEVEL", "LOUD"),
        ("SHOAL_ALIASES", "/nowhere/aliases.yaml"),
        ("SHOAL_ROUTERS_CA", "/nowhere/ca.pem"),
    ],
)
def test_settings_name_the_variable(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Settings.from_env({name: value})
    assert name in caught.value.message or name == caught.value.field


def test_settings_describe_themselves() -> None:
    assert (
        Settings.from_env({"SHOAL_TOKENS": "/not/ours"}).describe()["routers"] == "127.0.0.1:50051"
    )


async def test_model_lists_omit_models_that_cannot_answer() -> None:
    """Other callers do not see one caller's misspelt name; `GET /v1/models/{id}` still reports why
    it failed.
    """
    failed, cold = models_pb2.MODEL_STATE_FAILED, models_pb2.MODEL_STATE_COLD
    broken = models_pb2.ModelPlace(worker_id="w", state=cold, last_error="no config.json")
    models = [
        models_pb2.Model(model="a/typo", state=failed, last_error="no store has it"),
        models_pb2.Model(
            model="b/broken", state=cold, last_error="no config.json", places=[broken]
        ),
        models_pb2.Model(
            model="c/cold",
            state=cold,
            places=[broken, models_pb2.ModelPlace(worker_id="v", state=cold)],
        ),
        card(),
    ]
    names = AliasNames(
        {"alias-of-typo": AliasTarget("a/typo"), "alias-of-new": AliasTarget("new/model")}
    )
    async with edge(Script(models=models), aliases=Watched.fixed(names)) as http:
        listed = (await http.get("/v1/models")).json
        assert [entry["id"] for entry in listed["data"]] == ["c/cold", MODEL, "alias-of-new"]
        assert set(listed) == {"object", "data"}, "each model is listed once"
        tags = (await http.get("/api/tags")).json["models"]
        assert [entry["name"] for entry in tags] == ["alias-of-new", "c/cold", MODEL]
        one = (await http.get("/v1/models/a/typo")).json
        assert (one["state"], one["last_error"]) == ("failed", "no store has it")


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, "data"),
        ({"user_agent": "OpenAI/Python 3.57.0"}, "data"),
        ({"user_agent": "cohere/7.3.1"}, "models"),
        ({"user_agent": "cohere-ai/8.1.0"}, "models"),
        ({"user_agent": "python-httpx/0.28.1", "x_sie_sdk_version": "0.10.1"}, "models"),
    ],
)
async def test_each_client_gets_only_its_list(headers: dict[str, str], key: str) -> None:
    async with edge(Script(models=[card(created_unix_seconds=1_700_000_000)])) as http:
        listed = (await http.get("/v1/models", **headers)).json
    assert set(listed) == {"object", key}
    assert [(entry["id"], entry["created"]) for entry in listed[key]] == [(MODEL, 1_700_000_000)]
