"""Generated text over HTTP through a whole mesh: streamed as events, cancelled, and continued after
its worker dies.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import shoal
import transformers

from services.edge.app import running
from services.edge.settings import Settings
from tests.edge.parts import Http, head
from tests.edge.test_server import until
from tests.generation.chat_templates import GEMMA
from tests.generation.served import reference, write, write_ending
from tests.generation.test_tools import write_caller
from tests.support.cluster import Cluster, lasting_port

pytestmark = pytest.mark.filterwarnings("ignore")

CHAT, SUMMARY, ENDS, GEMMA_CHAT = (
    "random/qwen3-chat",
    "random/t5-writes",
    "random/qwen3-ends",
    "random/llama-as-gemma",
)
TEXT = "a text that is to be made shorter"
CHAT_PATH = "/v1/chat/completions"
CALLS = "random/qwen3-calls"
PLACES = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PLACES}}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("writers")
    write("qwen3", root / CHAT)
    write("llama", root / GEMMA_CHAT)
    (root / GEMMA_CHAT / "chat_template.jinja").write_text(GEMMA)
    write("t5", root / SUMMARY)
    write_ending("qwen3", root / ENDS)
    write_caller(root / CALLS)
    return root


@pytest.fixture(scope="module")
def mesh(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("mesh"), models=str(models)) as cluster:
        yield cluster


@asynccontextmanager
async def edge(*routers: str) -> AsyncIterator[Http]:
    async with running(
        Settings(edge_id="edge", address="127.0.0.1:0", routers=routers, deadline_seconds=600.0)
    ) as address:
        yield Http(address)


def body(model: str, most: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": TEXT}]
    return {"model": model, "messages": messages, "max_tokens": most, **more}


def events(data: bytes) -> list[Any]:
    return [
        json.loads(part)
        for part in data.decode().replace("data: ", "").split("\n\n")
        if part and part != "[DONE]"
    ]


def said(found: list[Any]) -> str:
    return "".join(one["choices"][0]["delta"].get("content", "") for one in found if one["choices"])


async def test_sampled_answers_are_determined_by_seeds(mesh: Cluster) -> None:
    async with edge(*mesh.addresses) as http:
        asked = body(CHAT, 30, temperature=1.1, top_p=0.9, seed=5)
        one = (await http.post(CHAT_PATH, asked)).json["choices"][0]["message"]["content"]
        several = (
            await http.post(CHAT_PATH, {**asked, "n": 3, "logprobs": True, "top_logprobs": 1})
        ).json
        texts = [choice["message"]["content"] for choice in several["choices"]]
        assert (texts[0], len(set(texts)), several["usage"]["completion_tokens"]) == (one, 3, 90)
        assert all(len(choice["logprobs"]["content"]) <= 30 for choice in several["choices"])
        streamed = events((await http.post(CHAT_PATH, {**asked, "n": 3, "stream": True})).body)
        for index, text in enumerate(texts):
            assert said([one for one in streamed if one["choices"][0]["index"] == index]) == text
        options = {"temperature": 1.1, "top_p": 0.9, "seed": 5, "num_predict": 30}
        ollama = (await http.post("/api/chat", body(CHAT, 30, stream=False, options=options))).json
        assert ollama["message"]["content"] == one
        stop = one[10:14]
        cut = (await http.post(CHAT_PATH, {**asked, "stop": [stop]})).json["choices"][0]
        assert (cut["message"]["content"], cut["finish_reason"]) == (
            one[: one.index(stop)].strip(),
            "stop",
        )
        for change, field in (
            ({"temperature": 11}, "temperature"),
            ({"stop": ["a"] * 17}, "stop"),
            ({"logit_bias": {"1": 1}}, "logit_bias"),
        ):
            reply = await http.post(CHAT_PATH, {**asked, **change})
            assert (reply.status, reply.json["error"]["param"]) == (400, field)


async def test_prompts_are_completed_without_a_template(mesh: Cluster) -> None:
    async with (
        shoal.AsyncClient(mesh.address, timeout=120) as client,
        edge(*mesh.addresses) as http,
    ):
        found = await client.extract(
            CHAT, [TEXT, "another"], shoal.ReadText(max_tokens=16, raw_prompt=True)
        )
        framed = await client.extract(CHAT, [TEXT], shoal.ReadText(max_tokens=16))
        assert framed[0].text != found[0].text.strip()
        reply = (
            await http.post("/v1/completions", {"model": CHAT, "prompt": [TEXT, "another"]})
        ).json
        assert [choice["text"] for choice in reply["choices"]] == [one.text for one in found]
        streamed = events(
            (
                await http.post("/v1/completions", {"model": CHAT, "prompt": TEXT, "stream": True})
            ).body
        )
        assert "".join(one["choices"][0]["text"] for one in streamed) == found[0].text


async def test_functions_are_called_and_their_results_answered(mesh: Cluster) -> None:
    async with edge(*mesh.addresses) as http:
        asked = body(
            CALLS,
            200,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=1,
            seed=1,
        )
        (choice,) = (await http.post(CHAT_PATH, asked)).json["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (
            choice["finish_reason"],
            choice["message"]["content"],
            call["function"]["name"],
        ) == ("tool_calls", None, "weather")
        assert json.loads(call["function"]["arguments"])["place"] in ("here", "there")
        streamed = events((await http.post(CHAT_PATH, {**asked, "stream": True})).body)
        parts = [
            part for one in streamed for part in one["choices"][0]["delta"].get("tool_calls", ())
        ]
        assert (
            "".join(part["function"]["arguments"] for part in parts)
            == call["function"]["arguments"]
        )
        assert said(streamed) == ""
        for returned in ("sun", "", "\n"):  # a function may return nothing
            result = {"role": "tool", "tool_call_id": call["id"], "content": returned}
            messages = [*asked["messages"], choice["message"], result]
            answered = body(CALLS, 20, tools=TOOLS, messages=messages)
            answer = (await http.post(CHAT_PATH, answered)).json
            assert answer["usage"]["completion_tokens"] > 0
            answered["messages"] += [
                {"role": "assistant", "content": "so"},
                *body(CALLS, 1)["messages"],
            ]
            answer = (await http.post(CHAT_PATH, answered)).json
            assert answer["usage"]["completion_tokens"] > 0
        refused = await http.post(CHAT_PATH, body(CHAT, 20, tools=TOOLS))
        assert (refused.status, refused.json["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(("model", "most"), [(CHAT, 40), (SUMMARY, 600)])
async def test_text_equals_that_of_extract(model: str, most: int, mesh: Cluster) -> None:
    task = shoal.ReadText(instruction="Be short.", max_tokens=most)
    async with (
        shoal.AsyncClient(mesh.address, timeout=120) as client,
        edge(*mesh.addresses) as http,
    ):
        found = await client.extract(model, [TEXT], task)
        whole = (await http.post(CHAT_PATH, body(model, most))).json
        assert whole["choices"][0]["message"]["content"] == found[0].text
        assert whole["usage"]["completion_tokens"] == found.usage.output_tokens
        reply = await http.post(
            CHAT_PATH, body(model, most, stream=True, stream_options={"include_usage": True})
        )
        reported = events(reply.body)
        assert said(reported) == found[0].text
        assert reported[-1]["usage"] == whole["usage"]
        assert reported[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
        lines = (
            await http.post("/api/chat", body(model, most, options={"num_predict": most}))
        ).body.splitlines()
        assert "".join(json.loads(line)["message"]["content"] for line in lines) == found[0].text


async def test_conversation_matches_transformers(mesh: Cluster, models: Path) -> None:
    before = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "an answer"},
    ]
    asked = body(CHAT, 40)
    asked["messages"][1:1] = before
    theirs = transformers.AutoModelForCausalLM.from_pretrained(models / CHAT)
    wanted = reference(
        theirs,
        models / CHAT,
        TEXT,
        40,
        "Be short.",
        [(one["role"], one["content"]) for one in before],
    )
    async with edge(*mesh.addresses) as http:
        whole = (await http.post(CHAT_PATH, asked)).json
        assert whole["choices"][0]["message"]["content"] == wanted
        assert (
            whole["usage"]["prompt_tokens"]
            > (await http.post(CHAT_PATH, body(CHAT, 40))).json["usage"]["prompt_tokens"]
        )
        assert said(events((await http.post(CHAT_PATH, {**asked, "stream": True})).body)) == wanted
        reply = await http.post(
            "/api/chat", {**asked, "stream": False, "options": {"num_predict": 40}}
        )
        assert reply.json["message"]["content"] == wanted
        thoughtless = {**body(CHAT, 20), "chat_template_kwargs": {"enable_thinking": False}}
        found = (await http.post(CHAT_PATH, thoughtless)).json
        wanted = reference(theirs, models / CHAT, TEXT, 20, "Be short.", enable_thinking=False)
        assert found["choices"][0]["message"]["content"] == wanted
        assert wanted != reference(theirs, models / CHAT, TEXT, 20, "Be short.")
        reply = await http.post(
            CHAT_PATH, {**asked, "chat_template_kwargs": {"enable_thinkin": False}}
        )
        assert (reply.status, reply.json["error"]["param"]) == (400, "chat_template_kwargs")
        assert "it uses enable_thinking" in reply.json["error"]["message"]
        for content, place in ((" ", 2), ("", 2)):
            before[1]["content"] = content
            reply = await http.post(CHAT_PATH, asked)
            assert (reply.status, reply.json["error"]["param"]) == (
                400,
                f"messages[{place}].content",
            )
        before[1]["content"] = "an answer"
        reply = await http.post(CHAT_PATH, {**asked, "model": SUMMARY})
        assert (reply.status, reply.json["error"]["param"]) == (400, "messages")


async def test_role_order_refused_by_the_template_is_an_error(mesh: Cluster) -> None:
    before = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    async with edge(*mesh.addresses) as http:
        reply = await http.post(
            CHAT_PATH, {"model": GEMMA_CHAT, "messages": before, "stream": True}
        )
        assert (reply.status, reply.json["error"]["param"]) == (400, "messages")
        assert "Conversation roles must alternate" in reply.json["error"]["message"]
        before.insert(1, {"role": "assistant", "content": "c"})
        reply = await http.post(
            CHAT_PATH, {"model": GEMMA_CHAT, "messages": before, "max_tokens": 5}
        )
        assert reply.status == 200


async def test_schema_is_enforced_over_http(mesh: Cluster) -> None:
    schema = {
        "type": "object",
        "properties": {"paid": {"type": "boolean"}},
        "required": ["paid"],
        "additionalProperties": False,
    }

    def asked(wanted: dict[str, Any], **more: Any) -> dict[str, Any]:
        return body(
            ENDS,
            90,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "it", "schema": wanted},
            },
            **more,
        )

    async with edge(*mesh.addresses) as http:
        (choice,) = (await http.post(CHAT_PATH, asked(schema))).json["choices"]
        assert choice["finish_reason"] == "stop"
        assert isinstance(json.loads(choice["message"]["content"])["paid"], bool)
        reported = events((await http.post(CHAT_PATH, asked(schema, stream=True))).body)
        assert said(reported) == choice["message"]["content"]
        reply = await http.post(CHAT_PATH, asked({"type": "array"}))
        assert (reply.status, reply.json["error"]["param"]) == (
            400,
            "response_format.json_schema.schema",
        )


async def test_models_that_do_not_generate_are_refused(mesh: Cluster) -> None:
    async with edge(*mesh.addresses) as http:
        reply = await http.post(CHAT_PATH, body("nobody/has-this", 5, stream=True))
        assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
        messages = [{"role": "user", "content": "  "}]
        reply = await http.post(CHAT_PATH, {"model": SUMMARY, "messages": messages, "stream": True})
        assert (reply.status, reply.json["error"]["param"]) == (400, "messages[0].content")


async def test_client_disconnect_frees_its_memory(models: Path, tmp_path: Path) -> None:
    address = f"127.0.0.1:{lasting_port()}"
    with Cluster(
        tmp_path, models=str(models), each={"worker-0": {"SHOAL_METRICS_ADDRESS": address}}
    ) as cluster:
        async with edge(cluster.address) as http:

            async def claimed() -> float:
                text = (await Http(address).get("/metrics")).body.decode()
                rows = [
                    row for row in text.splitlines() if row.startswith("shoal_key_value_bytes{")
                ]
                return sum(float(row.rpartition(" ")[2]) for row in rows)

            reader, writer = await http.open()
            data = json.dumps(body(SUMMARY, 4000, stream=True)).encode()
            writer.write(head("POST", CHAT_PATH, {"content-length": str(len(data))}) + data)
            assert b"200" in await reader.readline()
            await until(claimed, 120)
            writer.close()

            async def is_returned() -> bool:
                return not await claimed()

            await until(is_returned, 120)


async def test_killed_worker_is_invisible_to_the_client(models: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, models=str(models)) as cluster:
        async with edge(cluster.address) as http:
            alone = (await http.post(CHAT_PATH, body(SUMMARY, 1500))).json["choices"][0]["message"][
                "content"
            ]
            reader, writer = await http.open()
            data = json.dumps(body(SUMMARY, 1500, stream=True)).encode()
            writer.write(head("POST", CHAT_PATH, {"content-length": str(len(data))}) + data)
            await reader.readuntil(b"\r\n\r\n")
            found = await reader.readexactly(int(await reader.readline(), 16))
            await asyncio.to_thread(cluster.kill, cluster.workers[0])
            await asyncio.to_thread(cluster.start, cluster.workers[0])
            await reader.readline()
            while size := int(await reader.readline(), 16):
                found += await reader.readexactly(size)
                await reader.readline()
            writer.close()
            assert found.endswith(b"data: [DONE]\n\n")
            assert len(said(events(found))) == len(alone)
            assert said(events(found)) == alone
