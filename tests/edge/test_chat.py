"""Wires of models that write: OpenAI's chat completions and Ollama's chat and generate, as bytes and over sockets."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import pytest
from shoal.transport.methods import EXTRACT, EXTRACT_STREAM, GET_MODEL
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from libs.errors import InvalidInput, QueueFull, WorkerLost
from services.edge.dialects import ollama
from services.edge.dialects.writing import chat, ollama_chat
from services.edge.messages.base import Answer, Problem, Question, Received, Stream
from services.edge.messages.names import Names, Target
from tests.edge.parts import MODEL, Http, Script, card, edge, head
from tests.edge.test_server import until

NAMES = Names({"writer": Target(MODEL, adapter="org/adapter")})
PNG = "data:image/png;base64," + base64.b64encode(b"a picture").decode()
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def ask(body: Any, what: Callable[[Received], Question | Stream] = chat.chat) -> Any:
    return what(Received(json.dumps(body).encode(), NAMES, request_id="r1"))


def refused(body: Any, what: Callable[[Received], Question | Stream] = chat.chat) -> Problem:
    with pytest.raises(Problem) as caught:
        ask(body, what)
    return caught.value


def delta(text: str, *, restarted: bool = False) -> pb.ExtractStreamResponse:
    return pb.ExtractStreamResponse(deltas=[pb.ExtractDelta(text=text, restarted=restarted)])


def whole(text: str, reason: pb.FinishReason = pb.FINISH_REASON_STOP) -> pb.ExtractResponse:
    timings = pb.Timings(total_seconds=0.25, queue_seconds=0.125, forward_seconds=0.0625)
    usage = pb.Usage(input_tokens=7, output_tokens=5)
    return pb.ExtractResponse(results=[pb.Extraction(text=text, finish_reason=reason)], usage=usage, timings=timings)


def last(text: str, reason: pb.FinishReason = pb.FINISH_REASON_STOP) -> pb.ExtractStreamResponse:
    return pb.ExtractStreamResponse(response=whole(text, reason))


def events(data: bytes) -> list[Any]:
    """The events' contents; [DONE] as it stands."""
    assert data.endswith(b"\n\n") or not data
    parts = [part.removeprefix("data: ") for part in data.decode().split("\n\n")[:-1]]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


def said(found: Sequence[Any]) -> str:
    return "".join(one["choices"][0]["delta"].get("content", "") for one in found if one != "[DONE]" and one["choices"])


def lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


class TestRequests:
    def test_messages_become_an_item_and_an_instruction(self) -> None:
        body = {
            "model": "writer",
            "messages": [
                {
                    "role": "developer",
                    "content": [{"type": "text", "text": "Be short."}, {"type": "text", "text": "Write English."}],
                },
                {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            ],
            "max_tokens": 9,
            "temperature": 0.7,
            "top_p": 0.9,
            "seed": 3,
            "stop": [],
            "frequency_penalty": 0,
            "repetition_penalty": 1.0,
            "modalities": ["text"],
            "user": "somebody",
            "priority": "bulk",
        }
        question = ask(body)
        assert question.method is EXTRACT
        assert question.message == pb.ExtractRequest(
            model=MODEL,
            items=[pb.Item(text="one\n\ntwo")],
            text=pb.TextTask(instruction="Be short.\n\nWrite English.", max_tokens=9),
            adapter="org/adapter",
            priority=pb.PRIORITY_BULK,
        )

    def test_images_and_texts_are_parts_in_their_order(self) -> None:
        content = [{"type": "image_url", "image_url": {"url": PNG}}, {"type": "text", "text": "What is it?"}]
        question = ask({**HELLO, "messages": [{"role": "user", "content": content}], "max_completion_tokens": 5, "max_tokens": 9})
        parts = [pb.Part(image=pb.Image(data=b"a picture")), pb.Part(text="What is it?")]
        assert question.message == pb.ExtractRequest(model=MODEL, items=[pb.Item(parts=parts)], text=pb.TextTask(max_tokens=5))
        assert question.renamed("items[0].parts[0].image.data is no image") == "messages[0].content[0].image_url is no image"
        assert question.renamed("items[0].parts[1].text") == "messages[0].content[1].text"

    def test_system_messages_after_the_first_are_turns(self) -> None:
        roles = ("system", "developer", "user", "system", "user")
        question = ask({**HELLO, "messages": [{"role": role, "content": f"{place}"} for place, role in enumerate(roles)]})
        kinds = (pb.Turn.ROLE_SYSTEM, pb.Turn.ROLE_USER, pb.Turn.ROLE_SYSTEM)
        turns = [pb.Turn(role=role, text=f"{place}") for place, role in enumerate(kinds, 1)]
        task = pb.TextTask(instruction="0", turns=turns)
        assert question.message == pb.ExtractRequest(model=MODEL, items=[pb.Item(text="4")], text=task)
        assert question.renamed("text.turns[2].text is empty") == "messages[3].content is empty"

    def test_values_for_the_template(self) -> None:
        question = ask({**HELLO, "chat_template_kwargs": {"enable_thinking": False, "budget": 3}})
        assert question.message.text.template_values == '{"enable_thinking":false,"budget":3}'
        assert question.renamed("text.template_values") == "chat_template_kwargs"

    def test_what_was_said_before_is_turns(self) -> None:
        messages = [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Who was Ada?"},
            {"role": "assistant", "content": "A mathematician.", "refusal": None, "tool_calls": None, "annotations": []},
            {"role": "user", "content": [{"type": "text", "text": "Of what"}, {"type": "text", "text": "time?"}]},
            {"role": "user", "content": "And where?"},
        ]
        question = ask({**HELLO, "messages": messages})
        turns = [
            pb.Turn(role=pb.Turn.ROLE_USER, text="Who was Ada?"),
            pb.Turn(role=pb.Turn.ROLE_ASSISTANT, text="A mathematician."),
            pb.Turn(role=pb.Turn.ROLE_USER, text="Of what\n\ntime?"),
        ]
        task = pb.TextTask(instruction="Be short.", turns=turns)
        assert question.message == pb.ExtractRequest(model=MODEL, items=[pb.Item(text="And where?")], text=task)
        assert question.renamed("text.turns[1].text is empty") == "messages[2].content is empty"
        assert question.renamed("text.turns[2].role") == "messages[3].content[1].text"
        assert question.renamed("text.turns") == "messages"
        assert question.renamed("items[0].text") == "messages[4].content"

    def test_images_are_in_the_last_message(self) -> None:
        content = [{"type": "image_url", "image_url": PNG}, {"type": "text", "text": "And this one?"}]
        said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}]
        question = ask({**HELLO, "messages": [*said, {"role": "user", "content": content}]})
        assert [part.WhichOneof("content") for part in question.message.items[0].parts] == ["image", "text"]
        assert len(question.message.text.turns) == 2

    def test_a_schema(self) -> None:
        response_format = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": SCHEMA}}
        question = ask({**HELLO, "response_format": response_format})
        assert json.loads(question.message.text.json_schema) == SCHEMA
        assert question.renamed("text.json_schema: no") == "response_format.json_schema.schema: no"
        assert ask({**HELLO, "response_format": {"type": "text"}}).message.text.json_schema == ""
        assert refused({**HELLO, "response_format": {"type": "json_object"}}).field == "response_format"

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "system", "content": "a"}]}, "messages"),
            ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages[1].role"),
            ({"messages": [{"role": "assistant", "content": "b"}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "messages[1].role"),
            ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
            (
                {
                    "messages": [
                        {"role": "user", "content": "a"},
                        {"role": "tool", "content": "b"},
                        {"role": "user", "content": "c"},
                    ]
                },
                "messages[1].role",
            ),
            (
                {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}, {"role": "user", "content": "c"}]},
                "messages[0].tool_calls",
            ),
            (
                {"messages": [{"role": "assistant", "content": "a", "function_call": {}}, {"role": "user", "content": []}]},
                "messages[1]",
            ),
            (
                {
                    "messages": [
                        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": PNG}]},
                        {"role": "assistant", "content": "b"},
                        {"role": "user", "content": "c"},
                    ]
                },
                "messages[0].content[1].image_url",
            ),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}]}]},
                "messages[0].content[0].image_url",
            ),
            (
                {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": PNG}]}]},
                "messages[0].content[0].image_url",
            ),
            (
                {
                    "messages": [
                        {"role": "system", "content": "a"},
                        {"role": "user", "content": [{"type": "image_url", "image_url": PNG}]},
                    ]
                },
                "messages[0].content",
            ),
            ({"n": 2}, "n"),
            ({"stop": "x"}, "stop"),
            ({"tools": [{}]}, "tools"),
            ({"functions": [{}]}, "functions"),
            ({"logprobs": True}, "logprobs"),
            ({"logit_bias": {"1": 2}}, "logit_bias"),
            ({"presence_penalty": 0.5}, "presence_penalty"),
            ({"frequency_penalty": -0.5}, "frequency_penalty"),
            ({"repetition_penalty": 1.5}, "repetition_penalty"),
            ({"best_of": 2}, "best_of"),
            ({"guided_json": {"type": "object"}}, "guided_json"),
            ({"add_generation_prompt": False}, "add_generation_prompt"),
            ({"reasoning_effort": "low"}, "reasoning_effort"),
            ({"modalities": ["text", "audio"]}, "modalities"),
            ({"stop_token_ids": [1]}, "stop_token_ids"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 5000}, "max_tokens"),
            ({"max_completion_tokens": -1}, "max_completion_tokens"),
            ({"model": "no slash"}, "model"),
        ],
    )
    def test_what_cannot_be_served_is_refused_by_its_field(self, change: dict[str, Any], field: str) -> None:
        body = json.dumps({**HELLO, **change}).encode()
        with pytest.raises(Problem) as caught:
            chat.chat(Received(body, NAMES))
        assert (caught.value.status, caught.value.field) == (404 if field == "model" else 400, field)


class TestAnswers:
    def test_a_whole_one(self) -> None:
        question = ask(HELLO)
        answer = question.answer(whole("a text", pb.FINISH_REASON_LENGTH))
        assert isinstance(answer, Answer)
        found = json.loads(answer.body if isinstance(answer.body, bytes) else b"")
        msgspec.convert(found, chat.ChatAnswer)
        assert (found["id"], found["model"]) == ("chatcmpl-r1", MODEL)
        assert found["choices"][0]["message"]["content"] == "a text"
        assert found["choices"][0]["finish_reason"] == "length"
        assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}

    def test_events(self) -> None:
        stream = ask({**HELLO, "stream": True})
        assert (stream.method, stream.media_type) == (EXTRACT_STREAM, b"text/event-stream; charset=utf-8")
        begin = events(stream.tell(delta("a")))
        assert [one["choices"][0]["delta"] for one in begin] == [{"role": "assistant", "content": ""}, {"content": "a"}]
        assert begin[0]["object"] == "chat.completion.chunk"
        assert stream.tell(pb.ExtractStreamResponse()) == b""
        end = events(stream.tell(last("a text")))
        assert said(end) == " text"
        assert [one["choices"][0]["finish_reason"] for one in end[:-1]] == [None, "stop"]
        assert end[-1] == "[DONE]"

    def test_usage_comes_last_if_it_is_asked_for(self) -> None:
        stream = ask({**HELLO, "stream": True, "stream_options": {"include_usage": True}})
        found = events(stream.tell(last("a text")))
        assert (found[-2]["choices"], found[-2]["usage"]["total_tokens"]) == ([], 12)
        assert all(one["usage"] is None for one in found[:-2])

    def test_a_text_that_is_written_again_is_told_once(self) -> None:
        stream = ask({**HELLO, "stream": True})
        found = [*events(stream.tell(delta("one two"))), *events(stream.tell(delta("one", restarted=True)))]
        found += [*events(stream.tell(delta(" two three"))), *events(stream.tell(last("one two three.")))]
        assert said(found) == "one two three."

    @pytest.mark.parametrize("after", [delta("another", restarted=True), last("another"), last("one")])
    def test_another_text_than_was_told_is_a_failure(self, after: pb.ExtractStreamResponse) -> None:
        stream = ask({**HELLO, "stream": True})
        stream.tell(delta("one two"))
        with pytest.raises(Problem) as caught:
            stream.tell(after)
        assert caught.value.reason == "WORKER_LOST"
        (error,) = events(stream.fail(caught.value))
        assert "lost" in error["error"]["message"]


class TestOllama:
    def test_chat(self) -> None:
        image = base64.b64encode(b"a picture").decode()
        body = {"model": f"{MODEL}:latest", "messages": [{"role": "user", "content": "hello", "images": [image]}]}
        stream = ask({**body, "options": {"num_predict": 5, "temperature": 1}, "format": SCHEMA}, ollama_chat.chat)
        parts = [pb.Part(image=pb.Image(data=b"a picture")), pb.Part(text="hello")]
        task = pb.TextTask(max_tokens=5, json_schema=json.dumps(SCHEMA, separators=(",", ":")))
        assert stream.message == pb.ExtractRequest(model=MODEL, items=[pb.Item(parts=parts)], text=task)
        assert stream.renamed("items[0].parts[0]") == "messages[0].images[0]"
        found = [*lines(stream.tell(delta("a"))), *lines(stream.tell(last("a text")))]
        assert "".join(one["message"]["content"] for one in found) == "a text"
        assert [one["done"] for one in found] == [False, False, True]
        assert (found[-1]["done_reason"], found[-1]["prompt_eval_count"], found[-1]["eval_count"]) == ("stop", 7, 5)
        assert (found[-1]["total_duration"], found[-1]["load_duration"]) == (250_000_000, 125_000_000)
        for one in found:
            msgspec.convert(one, ollama_chat.OllamaWritten)

    def test_what_was_said_before_is_turns(self) -> None:
        said = [{"role": "system", "content": "short"}, {"role": "user", "content": "one"}]
        said += [{"role": "assistant", "content": "two", "thinking": "hm"}, {"role": "user", "content": "three"}]
        stream = ask({"model": MODEL, "messages": said}, ollama_chat.chat)
        turns = [pb.Turn(role=pb.Turn.ROLE_USER, text="one"), pb.Turn(role=pb.Turn.ROLE_ASSISTANT, text="two")]
        task = pb.TextTask(instruction="short", turns=turns)
        assert stream.message == pb.ExtractRequest(model=MODEL, items=[pb.Item(text="three")], text=task)
        assert stream.renamed("text.turns[1].text") == "messages[2].content"

    def test_generate(self) -> None:
        stream = ask({"model": MODEL, "prompt": "hello", "system": "short", "options": {"num_predict": -1}}, ollama_chat.generate)
        assert stream.message == pb.ExtractRequest(
            model=MODEL, items=[pb.Item(text="hello")], text=pb.TextTask(instruction="short")
        )
        (first,) = lines(stream.tell(delta("a")))
        assert (first["response"], first["done"]) == ("a", False)
        question = ask({"model": MODEL, "prompt": "hello", "stream": False}, ollama_chat.generate)
        found = json.loads(question.answer(whole("a text", pb.FINISH_REASON_LENGTH)).body)
        assert (found["response"], found["done"], found["done_reason"]) == ("a text", True, "length")
        assert lines(stream.fail(Problem("WORKER_LOST", "gone"))) == [{"error": "gone"}]

    def test_characters_that_end_lines_elsewhere_are_escaped(self) -> None:
        text = "a\u2028b\u2029c\x85d\r\ne"
        stream = ask({"model": MODEL, "prompt": "hello"}, ollama_chat.generate)
        (line,) = stream.tell(delta(text)).decode().splitlines()
        assert json.loads(line)["response"] == text
        events_of = ask({**HELLO, "stream": True})
        assert said(events(events_of.tell(delta(text)))) == text

    def test_nothing_asked_says_whether_the_model_is_known(self) -> None:
        for body, what in (({"model": MODEL}, ollama_chat.generate), ({"model": MODEL, "messages": []}, ollama_chat.chat)):
            question = ask(body, what)
            assert question.method is GET_MODEL
            assert json.loads(question.answer(models_pb2.GetModelResponse()).body)["done_reason"] == "load"

    def test_models_that_write_can_complete(self) -> None:
        shown = ollama.show(Received(json.dumps({"model": MODEL}).encode(), NAMES))
        reply = models_pb2.GetModelResponse(model=card(tasks=[models_pb2.TASK_TEXT], dimensions=0))
        answer = shown.answer(reply)
        assert isinstance(answer, Answer)
        assert isinstance(answer.body, bytes)
        assert json.loads(answer.body)["capabilities"] == ["completion"]

    @pytest.mark.parametrize(
        ("body", "what", "field"),
        [
            ({"prompt": "a", "raw": True}, ollama_chat.generate, "raw"),
            ({"prompt": "a", "suffix": "b"}, ollama_chat.generate, "suffix"),
            ({"prompt": "a", "context": [1]}, ollama_chat.generate, "context"),
            ({"prompt": "a", "think": False}, ollama_chat.generate, "think"),
            ({"prompt": "a", "options": {"repeat_penalty": 1.1}}, ollama_chat.generate, "options.repeat_penalty"),
            ({"prompt": "a", "options": {"presence_penalty": 0.5}}, ollama_chat.generate, "options.presence_penalty"),
            ({"prompt": "a", "format": "json"}, ollama_chat.generate, "format"),
            ({"prompt": "a", "options": {"stop": ["x"]}}, ollama_chat.generate, "options.stop"),
            ({"prompt": "a", "options": {"num_predict": 5000}}, ollama_chat.generate, "options.num_predict"),
            ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, ollama_chat.chat, "tools"),
            ({"messages": [{"role": "assistant", "content": "a"}]}, ollama_chat.chat, "messages[0].role"),
            ({"messages": [{"role": "tool", "content": "a"}]}, ollama_chat.chat, "messages[0].role"),
            ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, ollama_chat.chat, "messages[0].tool_calls"),
            (
                {"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}, {"role": "user", "content": "b"}]},
                ollama_chat.chat,
                "messages[0].images[0]",
            ),
            ({"messages": [{"role": "user", "content": "a", "images": ["!"]}]}, ollama_chat.chat, "messages[0].images[0]"),
        ],
    )
    def test_refusals(self, body: dict[str, Any], what: Callable[[Received], Question | Stream], field: str) -> None:
        assert refused({"model": MODEL, **body}, what).field == field


NOTHING = pb.ExtractStreamResponse()
"""Ends a stream without an answer."""


class Written:
    """What a router writes: what a test puts in, until it puts in the answer or an error."""

    def __init__(self) -> None:
        self.coming: asyncio.Queue[pb.ExtractStreamResponse | Exception] = asyncio.Queue()

    async def write(self, request: pb.ExtractRequest) -> AsyncIterator[pb.ExtractStreamResponse]:
        while True:
            one = await self.coming.get()
            if isinstance(one, Exception):
                raise one
            if one == NOTHING:
                return
            yield one
            if one.HasField("response"):
                return

    def put(self, *coming: pb.ExtractStreamResponse | Exception) -> None:
        for one in coming:
            self.coming.put_nowait(one)


async def opened(http: Http, body: Any, path: str = "/v1/chat/completions") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await http.open()
    data = json.dumps(body).encode()
    sent = {"content-length": str(len(data)), "accept-encoding": "gzip"}
    writer.write(head("POST", path, sent) + data)
    return reader, writer


async def piece(reader: asyncio.StreamReader) -> bytes:
    """One chunk of the answer; empty: the last."""
    size = int(await reader.readline(), 16)
    data = await reader.readexactly(size)
    await reader.readline()
    return data


class TestOverSockets:
    async def test_each_delta_is_there_before_the_next_is_written(self) -> None:
        written = Written()
        async with edge(Script(write=written.write), compression="on") as http:
            reader, writer = await opened(http, {**HELLO, "stream": True})
            written.put(delta("one"))
            top = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert "200" in top
            assert "content-type: text/event-stream" in top
            assert "content-encoding" not in top
            assert "x-accel-buffering: no" in top
            found = events(await piece(reader))
            assert said(found) == "one"
            written.put(delta(" two"))
            assert said(events(await piece(reader))) == " two"
            written.put(last("one two three"))
            end = events(await piece(reader))
            assert (said(end), end[-1]) == (" three", "[DONE]")
            assert await piece(reader) == b""
            # The connection is good for the next request.
            writer.write(head("GET", "/v1/models", {}))
            assert b"200" in await reader.readline()
            writer.close()

    async def test_errors_before_the_first_delta_have_their_status(self) -> None:
        written = Written()
        async with edge(Script(write=written.write)) as http:
            written.put(InvalidInput("text.instruction is too long", field="text.instruction"))
            messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
            reply = await http.post("/v1/chat/completions", {**HELLO, "messages": messages, "stream": True})
            assert (reply.status, reply.json["error"]["param"]) == (400, "messages[0].content")
            written.put(QueueFull("come back", retry_after=3.0))
            reply = await http.post("/v1/chat/completions", {**HELLO, "stream": True})
            assert (reply.status, reply.headers["retry-after"]) == (429, "3")
            reply = await http.post("/v1/chat/completions", {**HELLO, "stream": True}, x_request_timeout="0.2")
            assert reply.status in (400, 504)

    async def test_errors_after_it_end_the_answer_as_an_event(self) -> None:
        written = Written()
        async with edge(Script(write=written.write)) as http:
            written.put(delta("one"), WorkerLost("its worker was lost"))
            reply = await http.post("/v1/chat/completions", {**HELLO, "stream": True})
            found = events(reply.body)
            assert (reply.status, said(found[:-1])) == (200, "one")
            assert found[-1]["error"]["type"] == "server_error"
            written.put(delta("one"), NOTHING)
            reply = await http.post("/v1/chat/completions", {**HELLO, "stream": True})
            assert "before it was whole" in events(reply.body)[-1]["error"]["message"]
            written.put(delta("one"), delta("two", restarted=True))
            reply = await http.post("/api/generate", {"model": MODEL, "prompt": "a"})
            assert reply.headers["content-type"] == "application/x-ndjson"
            assert "another text" in lines(reply.body)[-1]["error"]

    async def test_a_client_that_leaves_cancels_the_call(self) -> None:
        written, script = Written(), Script()
        script.write = written.write
        async with edge(script) as http:
            reader, writer = await opened(http, {**HELLO, "stream": True})
            written.put(delta("one"))
            await reader.readuntil(b"\r\n\r\n")
            assert await piece(reader)
            writer.close()
            await until(lambda: script.cancelled == 1)
            # And one that leaves before the first delta.
            reader, writer = await opened(http, {**HELLO, "stream": True})
            await until(lambda: len(script.requests) == 2)
            writer.close()
            await until(lambda: script.cancelled == 2)

    async def test_a_client_that_does_not_read_makes_the_router_wait(self) -> None:
        taken = 0

        async def much(request: pb.ExtractRequest) -> AsyncIterator[pb.ExtractStreamResponse]:
            nonlocal taken
            while True:
                taken += 1
                yield delta("x" * 64 * 1024)

        async with edge(Script(write=much)) as http:
            _, writer = await opened(http, {**HELLO, "stream": True})
            before, same = -1, 0

            def is_waiting() -> bool:
                nonlocal before, same
                before, same = taken, same + 1 if taken == before else 0
                return same >= 30

            await until(is_waiting)
            assert taken < 1000
            writer.close()

    async def test_whole_answers(self) -> None:
        async with edge(Script(extract=lambda request: whole("a text"))) as http:
            reply = await http.post("/v1/chat/completions", HELLO)
            assert reply.json["choices"][0]["message"] == {"role": "assistant", "content": "a text"}
            reply = await http.post("/api/chat", {**HELLO, "stream": False})
            assert reply.json["message"]["content"] == "a text"
