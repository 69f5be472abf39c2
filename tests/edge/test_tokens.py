"""`/tokenize`, `/decode` and `/detokenize` in the forms of TEI, vLLM and Cohere."""

from __future__ import annotations

from typing import Any

import pytest

from libs.errors import InputTooLong, InvalidInput
from libs.serving.watched import Watched
from services.edge.messages.names import AliasNames
from tests.edge.parts import MODEL, Script, edge
from tests.edge.test_tei_grpc import NAMES

TEXT = "é 漢👍!"
TEI = [
    {"id": 1, "text": "<s>", "special": True, "start": None, "stop": None},
    {"id": 0xE9, "text": "é", "special": False, "start": 0, "stop": 2},
    {"id": 32, "text": " ", "special": False, "start": 2, "stop": 3},
    {"id": 0x6F22, "text": "漢", "special": False, "start": 3, "stop": 6},
    {"id": 0x1F44D, "text": "👍", "special": False, "start": 6, "stop": 10},
    {"id": 33, "text": "!", "special": False, "start": 10, "stop": 11},
    {"id": 2, "text": "</s>", "special": True, "start": None, "stop": None},
]


async def test_tei_tokenizes_one_or_several_texts_with_byte_offsets() -> None:
    script = Script()
    async with edge(script, aliases=Watched.fixed(NAMES)) as http:
        reply = await http.post(f"/tei/{MODEL}/tokenize", {"inputs": TEXT})
        assert (reply.status, reply.json) == (200, [TEI])
        assert (reply.headers["x-compute-characters"], reply.headers["x-compute-tokens"]) == (
            "5",
            "7",
        )
        assert script.requests[-1].model == MODEL
        reply = await http.post(
            "/tokenize", {"inputs": ["ab", TEXT], "add_special_tokens": False, "prompt_name": None}
        )
        assert reply.json[1] == TEI[1:-1]
        assert [token["text"] for token in reply.json[0]] == ["a", "b"]
        assert not script.requests[-1].return_tokens, "only special tokens have their names"


async def test_many_tokens_are_sent_in_pieces() -> None:
    async with edge(Script(), aliases=Watched.fixed(NAMES)) as http:
        texts = ["x" * 900] * 40
        reply = await http.post("/tokenize", {"inputs": texts})
        assert [len(tokens) for tokens in reply.json] == [902] * 40


async def test_tei_decodes_one_list_of_ids_or_several() -> None:
    script = Script()
    async with edge(script, aliases=Watched.fixed(NAMES)) as http:
        reply = await http.post("/decode", {"ids": [1, 97, 98, 2]})
        assert (reply.status, reply.json, script.requests[-1].skip_special_tokens) == (
            200,
            ["ab"],
            True,
        )
        reply = await http.post(
            f"/tei/{MODEL}/decode", {"ids": [[97], [0x1F44D]], "skip_special_tokens": False}
        )
        assert (reply.json, script.requests[-1].skip_special_tokens) == (["a", "👍"], False)


async def test_vllm_tokenizes_a_prompt_on_the_same_path() -> None:
    script = Script()
    async with edge(script, aliases=Watched.fixed(NAMES)) as http:
        reply = await http.post("/tokenize", {"model": MODEL, "prompt": "ab"})
        assert reply.json == {
            "count": 4,
            "max_model_len": 512,
            "tokens": [1, 97, 98, 2],
            "token_strs": None,
        }
        body = {
            "model": MODEL,
            "prompt": "ab",
            "add_special_tokens": False,
            "return_token_strs": True,
        }
        reply = await http.post("/tokenize", body)
        assert reply.json == {
            "count": 2,
            "max_model_len": 512,
            "tokens": [97, 98],
            "token_strs": ["_a", "_b"],
        }
        reply = await http.post("/tokenize", {"prompt": 'a text about "inputs"'})
        assert (reply.status, reply.json["count"]) == (200, 23)
        reply = await http.post("/detokenize", {"model": MODEL, "tokens": [1, 97, 98, 2]})
        assert (reply.json, script.requests[-1].skip_special_tokens) == ({"prompt": "ab"}, False)


async def test_cohere_tokenizes_without_special_tokens() -> None:
    async with edge(Script(), aliases=Watched.fixed(NAMES)) as http:
        reply = await http.post("/v1/tokenize", {"model": MODEL, "text": "aé"})
        assert (reply.json["tokens"], reply.json["token_strings"]) == ([97, 0xE9], ["a", "é"])
        reply = await http.post("/v1/detokenize", {"model": MODEL, "tokens": [97, 0xE9]})
        assert (reply.json["text"], reply.json["meta"]["api_version"]["version"]) == ("aé", "1")


@pytest.mark.parametrize(
    ("path", "body", "reported"),
    [
        ("/tokenize", {}, "inputs is required"),
        ("/tokenize", {"inputs": 3}, "inputs"),
        ("/tokenize", {"inputs": "a", "prompt_name": "query"}, "prompt_name"),
        ("/tokenize", {"inputs": ["a"] * 10_001}, "10,000"),
        ("/decode", {"ids": [[1], 2]}, "ids"),
        ("/decode", {"ids": [[1], [2, -1]]}, "ids[1][1]"),
        ("/decode", {"ids": [1 << 32]}, "ids[0]"),
        ("/decode", {"ids": [1] * 131_073}, "131,072"),
    ],
)
async def test_invalid_tei_requests_are_refused_in_its_form(
    path: str, body: dict[str, Any], reported: str
) -> None:
    async with edge(Script(), aliases=Watched.fixed(NAMES)) as http:
        reply = await http.post(path, body)
        assert (reply.status, reply.json["error_type"]) == (422, "Validation"), reply.json
        assert reported in reply.json["error"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/tokenize", {"model": MODEL, "prompt": ["a"]}, "prompt"),
        ("/tokenize", {"model": "no model", "prompt": "a"}, "model"),
        ("/detokenize", {"model": MODEL, "tokens": [1, -2]}, "tokens[1]"),
        ("/detokenize", {"model": MODEL}, "tokens"),
    ],
)
async def test_invalid_vllm_requests_are_refused_in_its_form(
    path: str, body: dict[str, Any], field: str
) -> None:
    async with edge(Script(), aliases=Watched.fixed(AliasNames({}))) as http:
        reply = await http.post(path, body)
        assert 400 <= reply.status < 500
        assert reply.json["error"]["param"] == field, reply.json


async def test_mesh_errors_name_the_callers_fields() -> None:
    async def too_long() -> None:
        raise InputTooLong("texts[1] has 999 tokens", field="texts[1]")

    async def unknown() -> None:
        raise InvalidInput("sequences[1].ids[2] is 7", field="sequences[1].ids[2]")

    async with edge(Script(act=too_long), aliases=Watched.fixed(NAMES)) as http:
        reply = await http.post("/tokenize", {"inputs": ["a", "b"]})
        assert (reply.status, reply.json["error"]) == (422, "inputs[1] has 999 tokens")
        reply = await http.post("/tokenize", {"prompt": "a"})
        assert (reply.status, reply.json["error"]["param"]) == (400, "prompt")
    async with edge(Script(act=unknown), aliases=Watched.fixed(NAMES)) as http:
        reply = await http.post("/decode", {"ids": [[1], [2, 3, 7]]})
        assert (reply.status, reply.json["error"]) == (422, "ids[1][2] is 7")
        reply = await http.post("/decode", {"ids": [1, 2, 7]})
        assert reply.json["error"] == "ids[2] is 7"
