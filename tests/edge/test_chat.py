"""APIs of generative models: OpenAI's chat completions and Ollama's chat and generate, as bytes and
over sockets.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import pytest
from shoal.transport.methods import EXTRACT, EXTRACT_STREAM
from shoal.v1 import inference_pb2 as pb

from libs.errors import InvalidInput, QueueFull, WorkerLost
from services.edge.dialects.generation import chat, completions, ollama_chat
from services.edge.messages.base import Answer, HttpError, MeshCall, Received, StreamedCall
from services.edge.messages.names import AliasNames, AliasTarget
from tests.edge.parts import MODEL, Http, Script, edge, head
from tests.edge.test_server import until

NAMES = AliasNames({"writer": AliasTarget(MODEL, adapter="org/adapter")})
PNG = "data:image/png;base64," + base64.b64encode(b"an image").decode()
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def ask(body: Any, what: Callable[[Received], MeshCall | StreamedCall] = chat.chat) -> Any:
    return what(Received(json.dumps(body).encode(), NAMES, request_id="r1"))


def refused(
    body: Any, what: Callable[[Received], MeshCall | StreamedCall] = chat.chat
) -> HttpError:
    with pytest.raises(HttpError) as caught:
        ask(body, what)
    return caught.value


def delta(text: str, *, restarted: bool = False) -> pb.ExtractStreamResponse:
    return pb.ExtractStreamResponse(deltas=[pb.ExtractDelta(text=text, restarted=restarted)])


def whole(text: str, reason: pb.FinishReason = pb.FINISH_REASON_STOP) -> pb.ExtractResponse:
    timings = pb.Timings(total_seconds=0.25, queue_seconds=0.125, forward_seconds=0.0625)
    usage = pb.Usage(input_tokens=7, output_tokens=5)
    return pb.ExtractResponse(
        results=[pb.Extraction(text=text, finish_reason=reason)], usage=usage, timings=timings
    )


def last(text: str, reason: pb.FinishReason = pb.FINISH_REASON_STOP) -> pb.ExtractStreamResponse:
    return pb.ExtractStreamResponse(response=whole(text, reason))


def events(data: bytes) -> list[Any]:
    """Return the events' contents, and [DONE] as text."""
    assert data.endswith(b"\n\n") or not data
    parts = [part.removeprefix("data: ") for part in data.decode().split("\n\n")[:-1]]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


def said(found: Sequence[Any]) -> str:
    return "".join(
        one["choices"][0]["delta"].get("content", "")
        for one in found
        if one != "[DONE]" and one["choices"]
    )


def lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


class TestRequests:
    def test_messages_become_an_item_and_an_instruction(self) -> None:
        body = {
            "model": "writer",
            "messages": [
                {
                    "role": "developer",
                    "content": [
                        {"type": "text", "text": "Be short."},
                        {"type": "text", "text": "Write English."},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                },
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
            items=[pb.Item(text="one\n\ntwo", seed=3)],
            text=pb.TextTask(
                instruction="Be short.\n\nWrite English.",
                max_tokens=9,
                sampling=pb.Sampling(
                    temperature=0.7, top_p=0.9, frequency_penalty=0, repetition_penalty=1
                ),
            ),
            adapter="org/adapter",
            priority=pb.PRIORITY_BULK,
        )

    def test_images_and_texts_are_parts_in_their_order(self) -> None:
        content = [
            {"type": "image_url", "image_url": {"url": PNG}},
            {"type": "text", "text": "What is it?"},
        ]
        question = ask(
            {
                **HELLO,
                "messages": [{"role": "user", "content": content}],
                "max_completion_tokens": 5,
                "max_tokens": 9,
            }
        )
        parts = [pb.Part(image=pb.Image(data=b"an image")), pb.Part(text="What is it?")]
        assert question.message == pb.ExtractRequest(
            model=MODEL, items=[pb.Item(parts=parts)], text=pb.TextTask(max_tokens=5)
        )
        assert (
            question.renamed("items[0].parts[0].image.data is no image")
            == "messages[0].content[0].image_url is no image"
        )
        assert question.renamed("items[0].parts[1].text") == "messages[0].content[1].text"

    def test_system_messages_after_the_first_are_turns(self) -> None:
        roles = ("system", "developer", "user", "system", "user")
        question = ask(
            {
                **HELLO,
                "messages": [
                    {"role": role, "content": f"{place}"} for place, role in enumerate(roles)
                ],
            }
        )
        kinds = (pb.Turn.ROLE_SYSTEM, pb.Turn.ROLE_USER, pb.Turn.ROLE_SYSTEM)
        turns = [pb.Turn(role=role, text=f"{place}") for place, role in enumerate(kinds, 1)]
        task = pb.TextTask(instruction="0", turns=turns)
        assert question.message == pb.ExtractRequest(
            model=MODEL, items=[pb.Item(text="4")], text=task
        )
        assert question.renamed("text.turns[2].text is empty") == "messages[3].content is empty"

    def test_values_for_the_template(self) -> None:
        question = ask({**HELLO, "chat_template_kwargs": {"enable_thinking": False, "budget": 3}})
        assert question.message.text.template_values == '{"enable_thinking":false,"budget":3}'
        assert question.renamed("text.template_values") == "chat_template_kwargs"

    def test_previous_messages_become_turns(self) -> None:
        messages = [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Who was Ada?"},
            {
                "role": "assistant",
                "content": "A mathematician.",
                "refusal": None,
                "tool_calls": None,
                "annotations": [],
            },
            {
                "role": "user",
                "content": [{"type": "text", "text": "Of what"}, {"type": "text", "text": "time?"}],
            },
            {"role": "user", "content": "And where?"},
        ]
        question = ask({**HELLO, "messages": messages})
        turns = [
            pb.Turn(role=pb.Turn.ROLE_USER, text="Who was Ada?"),
            pb.Turn(role=pb.Turn.ROLE_ASSISTANT, text="A mathematician."),
            pb.Turn(role=pb.Turn.ROLE_USER, text="Of what\n\ntime?"),
        ]
        task = pb.TextTask(instruction="Be short.", turns=turns)
        assert question.message == pb.ExtractRequest(
            model=MODEL, items=[pb.Item(text="And where?")], text=task
        )
        assert question.renamed("text.turns[1].text is empty") == "messages[2].content is empty"
        assert question.renamed("text.turns[2].role") == "messages[3].content[1].text"
        assert question.renamed("text.turns") == "messages"
        assert question.renamed("items[0].text") == "messages[4].content"

    def test_images_are_in_the_last_message(self) -> None:
        content = [
            {"type": "image_url", "image_url": PNG},
            {"type": "text", "text": "And this one?"},
        ]
        said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}]
        question = ask({**HELLO, "messages": [*said, {"role": "user", "content": content}]})
        assert [part.WhichOneof("content") for part in question.message.items[0].parts] == [
            "image",
            "text",
        ]
        assert len(question.message.text.turns) == 2

    def test_schema(self) -> None:
        response_format = {
            "type": "json_schema",
            "json_schema": {"name": "it", "strict": True, "schema": SCHEMA},
        }
        question = ask({**HELLO, "response_format": response_format})
        assert json.loads(question.message.text.json_schema) == SCHEMA
        assert question.renamed("text.json_schema: no") == "response_format.json_schema.schema: no"
        assert ask({**HELLO, "response_format": {"type": "text"}}).message.text.json_schema == ""
        asked = ask({**HELLO, "response_format": {"type": "json_object"}})
        assert json.loads(asked.message.text.json_schema) == {"type": "object"}
        assert refused({**HELLO, "response_format": {"type": "xml"}}).field == "response_format"

    def test_stop_strings_and_sampling_are_passed_on(self) -> None:
        question = ask(
            {**HELLO, "stop": "x", "top_k": -1, "min_p": 0.5, "presence_penalty": -1, "seed": -1}
        )
        task = pb.TextTask(stop=["x"], sampling=pb.Sampling(min_p=0.5, presence_penalty=-1))
        assert question.message == pb.ExtractRequest(
            model=MODEL, items=[pb.Item(text="hello", seed=(1 << 64) - 1)], text=task
        )
        assert list(ask({**HELLO, "stop": ["x", "y"]}).message.text.stop) == ["x", "y"]
        assert question.renamed("text.sampling.presence_penalty is 3") == "presence_penalty is 3"
        assert question.renamed("text.stop[2] is long") == "stop is long"

    def test_several_answers_are_items_with_consecutive_seeds(self) -> None:
        question = ask({**HELLO, "n": 3, "seed": 7})
        assert [item.seed for item in question.message.items] == [7, 8, 9]
        assert question.message.text.sampling.temperature == 1
        assert not ask({**HELLO, "n": 2}).message.items[1].HasField("seed")
        assert refused({**HELLO, "n": 2, "temperature": 0}).field == "temperature"
        assert question.renamed("items[2].text is long") == "messages[0].content is long"

    def test_tools_and_their_results(self) -> None:
        call = {
            "id": "c1",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1}'},
        }
        messages = [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]
        question = ask(
            {**HELLO, "messages": messages, "tools": TOOLS, "parallel_tool_calls": False}
        )
        turns = [
            pb.Turn(role=pb.Turn.ROLE_USER, text="1 + 1?"),
            pb.Turn(
                role=pb.Turn.ROLE_ASSISTANT,
                tool_calls=[pb.ToolCall(name="add", arguments='{"a": 1}')],
            ),
        ]
        task = question.message.text
        assert list(task.turns) == turns
        assert (task.item_role, task.single_tool_call, question.message.items[0].text) == (
            pb.Turn.ROLE_TOOL,
            True,
            "2",
        )
        assert json.loads(task.tools) == TOOLS
        assert (
            question.renamed("text.tools[0].function.name is wrong")
            == "tools[0].function.name is wrong"
        )
        assert question.renamed("text.turns[1].tool_calls[0].arguments") == "messages[1]"

    @pytest.mark.parametrize(
        ("choice", "required", "name", "has_tools"),
        [
            ("auto", False, "", True),
            ("none", False, "", False),
            ("required", True, "", True),
            ({"type": "function", "function": {"name": "add"}}, True, "add", True),
        ],
    )
    def test_choices_of_tools(
        self, choice: Any, required: bool, name: str, has_tools: bool
    ) -> None:
        task = ask({**HELLO, "tools": TOOLS, "tool_choice": choice}).message.text
        is_required = task.tool_choice == pb.TextTask.TOOL_CHOICE_REQUIRED
        assert (is_required, task.tool, bool(task.tools)) == (required, name, has_tools)

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "system", "content": "a"}]}, "messages"),
            (
                {
                    "messages": [
                        {"role": "user", "content": "a"},
                        {"role": "assistant", "content": "b"},
                    ]
                },
                "messages[1].role",
            ),
            ({"messages": [{"role": "assistant", "content": "b"}]}, "messages[0].role"),
            (
                {
                    "messages": [
                        {"role": "user", "content": "a"},
                        {"role": "system", "content": "b"},
                    ]
                },
                "messages[1].role",
            ),
            ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role"),
            (
                {
                    "messages": [
                        {"role": "user", "content": "a"},
                        {"role": "critic", "content": "b"},
                        {"role": "user", "content": "c"},
                    ]
                },
                "messages[1].role",
            ),
            (
                {
                    "messages": [
                        {"role": "assistant", "content": None, "tool_calls": [{}]},
                        {"role": "user", "content": "c"},
                    ]
                },
                "messages[0].tool_calls[0].function",
            ),
            (
                {
                    "messages": [
                        {"role": "assistant", "content": "a", "function_call": {}},
                        {"role": "user", "content": []},
                    ]
                },
                "messages[1]",
            ),
            (
                {
                    "messages": [
                        {
                            "role": "user",
                            "content": [
                                {"type": "text", "text": "a"},
                                {"type": "image_url", "image_url": PNG},
                            ],
                        },
                        {"role": "assistant", "content": "b"},
                        {"role": "user", "content": "c"},
                    ]
                },
                "messages[0].content[1].image_url",
            ),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
            (
                {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
                "messages[0].content[0]",
            ),
            (
                {
                    "messages": [
                        {
                            "role": "user",
                            "content": [
                                {"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}
                            ],
                        }
                    ]
                },
                "messages[0].content[0].image_url",
            ),
            (
                {
                    "messages": [
                        {"role": "system", "content": [{"type": "image_url", "image_url": PNG}]}
                    ]
                },
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
            ({"n": 17}, "n"),
            ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
            ({"functions": [{}]}, "functions"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"logit_bias": {"1": 2}}, "logit_bias"),
            ({"use_beam_search": True}, "use_beam_search"),
            ({"top_k": -2}, "top_k"),
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
    def test_unsupported_values_are_refused_with_their_field(
        self, change: dict[str, Any], field: str
    ) -> None:
        body = json.dumps({**HELLO, **change}).encode()
        with pytest.raises(HttpError) as caught:
            chat.chat(Received(body, NAMES))
        assert (caught.value.status, caught.value.field) == (
            404 if field == "model" else 400,
            field,
        )


class TestAnswers:
    def test_whole_one(self) -> None:
        question = ask(HELLO)
        answer = question.convert(whole("a text", pb.FINISH_REASON_LENGTH))
        assert isinstance(answer, Answer)
        found = json.loads(answer.body if isinstance(answer.body, bytes) else b"")
        msgspec.convert(found, chat.ChatAnswer)
        assert (found["id"], found["model"]) == ("chatcmpl-r1", MODEL)
        assert found["choices"][0]["message"]["content"] == "a text"
        assert found["choices"][0]["finish_reason"] == "length"
        assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}

    def test_prompt_of_several_choices_is_counted_once(self) -> None:
        reply = whole("a text")
        reply.results.extend([reply.results[0]] * 3)
        reply.usage.input_tokens *= 4
        expected = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
        prompt = {"model": MODEL, "prompt": "hello"}
        for body, read in ((HELLO, chat.chat), (prompt, completions.complete)):
            answer = ask({**body, "n": 4}, read).convert(reply)
            assert json.loads(answer.body)["usage"] == expected
            options = {"stream": True, "stream_options": {"include_usage": True}}
            stream = ask({**body, "n": 4, **options}, read)
            found = events(stream.render(pb.ExtractStreamResponse(response=reply)))
            assert found[-2]["usage"] == expected

    def test_events(self) -> None:
        stream = ask({**HELLO, "stream": True})
        assert (stream.method, stream.media_type) == (
            EXTRACT_STREAM,
            b"text/event-stream; charset=utf-8",
        )
        begin = events(stream.render(delta("a")))
        assert [one["choices"][0]["delta"] for one in begin] == [
            {"role": "assistant", "content": ""},
            {"content": "a"},
        ]
        assert begin[0]["object"] == "chat.completion.chunk"
        assert stream.render(pb.ExtractStreamResponse()) == b""
        end = events(stream.render(last("a text")))
        assert said(end) == " text"
        assert [one["choices"][0]["finish_reason"] for one in end[:-1]] == [None, "stop"]
        assert end[-1] == "[DONE]"

    def test_requested_usage_is_the_last_event(self) -> None:
        stream = ask({**HELLO, "stream": True, "stream_options": {"include_usage": True}})
        found = events(stream.render(last("a text")))
        assert (found[-2]["choices"], found[-2]["usage"]["total_tokens"]) == ([], 12)
        assert all(one["usage"] is None for one in found[:-2])

    def test_regenerated_text_is_sent_once(self) -> None:
        stream = ask({**HELLO, "stream": True})
        found = [
            *events(stream.render(delta("one two"))),
            *events(stream.render(delta("one", restarted=True))),
        ]
        found += [
            *events(stream.render(delta(" two three"))),
            *events(stream.render(last("one two three."))),
        ]
        assert said(found) == "one two three."

    @pytest.mark.parametrize(
        "after", [delta("another", restarted=True), last("another"), last("one")]
    )
    def test_different_regenerated_text_is_an_error(self, after: pb.ExtractStreamResponse) -> None:
        stream = ask({**HELLO, "stream": True})
        stream.render(delta("one two"))
        with pytest.raises(HttpError) as caught:
            stream.render(after)
        assert caught.value.reason == "WORKER_LOST"
        (error,) = events(stream.fail(caught.value))
        assert "lost" in error["error"]["message"]


def called() -> pb.ExtractResponse:
    result = pb.Extraction(text="I add.", finish_reason=pb.FINISH_REASON_STOP)
    result.tool_calls.add(name="add", arguments='{"a": 1}')
    result.tool_calls.add(name="add", arguments="{}")
    return pb.ExtractResponse(results=[result])


class TestTools:
    def test_calls_are_in_the_message(self) -> None:
        (choice,) = json.loads(ask({**HELLO, "tools": TOOLS}).convert(called()).body)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        calls = choice["message"]["tool_calls"]
        assert [call["function"] for call in calls] == [
            {"name": "add", "arguments": '{"a": 1}'},
            {"name": "add", "arguments": "{}"},
        ]
        assert len({call["id"] for call in calls}) == 2

    def test_calls_are_streamed_by_their_index(self) -> None:
        stream = ask({**HELLO, "tools": TOOLS, "stream": True})
        found = [
            *events(stream.render(delta("I a"))),
            *events(stream.render(pb.ExtractStreamResponse(response=called()))),
        ]
        deltas = [one["choices"][0]["delta"] for one in found[:-1]]
        assert "".join(each.get("content", "") for each in deltas) == "I add."
        arguments: dict[int, str] = {}
        for each in deltas:
            for call in each.get("tool_calls", ()):
                arguments[call["index"]] = (
                    arguments.get(call["index"], "") + call["function"]["arguments"]
                )
        assert arguments == {0: '{"a": 1}', 1: "{}"}
        assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"

    def test_ollamas_calls_are_objects(self) -> None:
        said = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]},
        ]
        body = {
            "model": MODEL,
            "messages": [*said, {"role": "tool", "content": "2"}],
            "tools": TOOLS,
            "stream": False,
        }
        question = ask(
            {**body, "options": {"repeat_penalty": 1.1, "seed": 3, "stop": "x"}}, ollama_chat.chat
        )
        task = question.message.text
        assert (task.item_role, list(task.stop), question.message.items[0].seed) == (
            pb.Turn.ROLE_TOOL,
            ["x"],
            3,
        )
        assert question.renamed("text.sampling.repetition_penalty") == "options.repeat_penalty"
        message = json.loads(question.convert(called()).body)["message"]
        assert message["tool_calls"][0] == {"function": {"name": "add", "arguments": {"a": 1}}}


class TestProbabilities:
    def reply(self) -> pb.ExtractResponse:
        tops = [pb.TokenLogprob(text="a", logprob=-0.5), pb.TokenLogprob(text="\ufffd", logprob=-1)]
        result = pb.Extraction(
            text="ab", tokens=[pb.TokenLogprob(text="a", logprob=-0.5, top=tops)]
        )
        return pb.ExtractResponse(results=[result])

    def test_of_chat(self) -> None:
        question = ask({**HELLO, "logprobs": True, "top_logprobs": 2})
        assert question.message.text.top_logprobs == 2
        (token,) = json.loads(question.convert(self.reply()).body)["choices"][0]["logprobs"][
            "content"
        ]
        assert (token["token"], token["logprob"], token["bytes"]) == ("a", -0.5, [97])
        assert [top["bytes"] for top in token["top_logprobs"]] == [[97], None]
        assert ask({**HELLO, "logprobs": True}).message.text.HasField("top_logprobs")
        assert not ask(HELLO).message.text.HasField("top_logprobs")

    def test_of_completions(self) -> None:
        question = ask({"model": MODEL, "prompt": "a", "logprobs": 2}, completions.complete)
        found = json.loads(question.convert(self.reply()).body)["choices"][0]["logprobs"]
        assert (found["tokens"], found["token_logprobs"], found["text_offset"]) == (
            ["a"],
            [-0.5],
            [0],
        )


NOTHING = pb.ExtractStreamResponse()
"""This reply ends a stream without an answer."""


class Written:
    """A scripted generation: it yields the replies that a test puts in, up to the result or an
    error.
    """

    def __init__(self) -> None:
        self.replies: asyncio.Queue[pb.ExtractStreamResponse | Exception] = asyncio.Queue()

    async def write(self, request: pb.ExtractRequest) -> AsyncIterator[pb.ExtractStreamResponse]:
        while True:
            one = await self.replies.get()
            if isinstance(one, Exception):
                raise one
            if one == NOTHING:
                return
            yield one
            if one.HasField("response"):
                return

    def put(self, *replies: pb.ExtractStreamResponse | Exception) -> None:
        for one in replies:
            self.replies.put_nowait(one)


async def opened(
    http: Http, body: Any, path: str = "/v1/chat/completions"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await http.open()
    data = json.dumps(body).encode()
    sent = {"content-length": str(len(data)), "accept-encoding": "gzip"}
    writer.write(head("POST", path, sent) + data)
    return reader, writer


async def piece(reader: asyncio.StreamReader) -> bytes:
    """Return one chunk of the answer; empty for the last one."""
    size = int(await reader.readline(), 16)
    data = await reader.readexactly(size)
    await reader.readline()
    return data


class TestOverSockets:
    async def test_each_delta_is_sent_before_the_next_is_generated(self) -> None:
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
            # The connection can serve the next request.
            writer.write(head("GET", "/v1/models", {}))
            assert b"200" in await reader.readline()
            writer.close()

    async def test_errors_before_the_first_delta_have_their_status(self) -> None:
        written = Written()
        async with edge(Script(write=written.write)) as http:
            written.put(InvalidInput("text.instruction is too long", field="text.instruction"))
            messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
            reply = await http.post(
                "/v1/chat/completions", {**HELLO, "messages": messages, "stream": True}
            )
            assert (reply.status, reply.json["error"]["param"]) == (400, "messages[0].content")
            written.put(QueueFull("come back", retry_after=3.0))
            reply = await http.post("/v1/chat/completions", {**HELLO, "stream": True})
            assert (reply.status, reply.headers["retry-after"]) == (429, "3")
            reply = await http.post(
                "/v1/chat/completions", {**HELLO, "stream": True}, x_request_timeout="0.2"
            )
            assert reply.status in (400, 504)

    async def test_errors_after_the_first_delta_are_sent_as_an_event(self) -> None:
        written = Written()
        async with edge(Script(write=written.write)) as http:
            written.put(delta("one"), WorkerLost("its worker was lost"))
            reply = await http.post("/v1/chat/completions", {**HELLO, "stream": True})
            found = events(reply.body)
            assert (reply.status, said(found[:-1])) == (200, "one")
            assert found[-1]["error"]["type"] == "server_error"
            written.put(delta("one"), NOTHING)
            reply = await http.post("/v1/chat/completions", {**HELLO, "stream": True})
            assert "before its last reply" in events(reply.body)[-1]["error"]["message"]
            written.put(delta("one"), delta("two", restarted=True))
            reply = await http.post("/api/generate", {"model": MODEL, "prompt": "a"})
            assert reply.headers["content-type"] == "application/x-ndjson"
            assert "different text" in lines(reply.body)[-1]["error"]

    async def test_disconnect_cancels_the_call(self) -> None:
        written, script = Written(), Script()
        script.write = written.write
        async with edge(script) as http:
            reader, writer = await opened(http, {**HELLO, "stream": True})
            written.put(delta("one"))
            await reader.readuntil(b"\r\n\r\n")
            assert await piece(reader)
            writer.close()
            await until(lambda: script.cancelled == 1)
            # The same holds for a client that disconnects before the first delta.
            reader, writer = await opened(http, {**HELLO, "stream": True})
            await until(lambda: len(script.requests) == 2)
            writer.close()
            await until(lambda: script.cancelled == 2)

    async def test_slow_client_applies_backpressure_to_the_router(self) -> None:
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

    @pytest.mark.parametrize(
        ("path", "body"),
        [("/v1/chat/completions", HELLO), ("/v1/completions", {"model": MODEL, "prompt": "a"})],
    )
    async def test_created_is_the_time_of_the_request(
        self, path: str, body: dict[str, Any]
    ) -> None:
        async with edge(Script(extract=lambda request: whole("a text"))) as http:
            before = int(time.time())
            created = (await http.post(path, body)).json["created"]
        assert before <= created <= time.time()
