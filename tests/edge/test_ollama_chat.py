"""Ollama's chat and generate calls."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from shoal.transport.methods import GET_MODEL
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from services.edge.dialects import ollama
from services.edge.dialects.generation import ollama_chat
from services.edge.messages.base import Answer, HttpError, MeshCall, Received, StreamedCall
from tests.edge.parts import MODEL, card
from tests.edge.test_chat import (
    HELLO,
    NAMES,
    SCHEMA,
    ask,
    delta,
    events,
    last,
    lines,
    refused,
    said,
    whole,
)


class TestOllama:
    def test_chat(self) -> None:
        image = base64.b64encode(b"an image").decode()
        body = {
            "model": f"{MODEL}:latest",
            "messages": [{"role": "user", "content": "hello", "images": [image]}],
        }
        stream = ask(
            {**body, "options": {"num_predict": 5, "temperature": 1}, "format": SCHEMA},
            ollama_chat.chat,
        )
        parts = [pb.Part(image=pb.Image(data=b"an image")), pb.Part(text="hello")]
        schema = json.dumps(SCHEMA, separators=(",", ":"))
        task = pb.TextTask(max_tokens=5, json_schema=schema, sampling=pb.Sampling(temperature=1))
        assert stream.message == pb.ExtractRequest(
            model=MODEL, items=[pb.Item(parts=parts)], text=task
        )
        assert stream.renamed("items[0].parts[0]") == "messages[0].images[0]"
        found = [*lines(stream.render(delta("a"))), *lines(stream.render(last("a text")))]
        assert "".join(one["message"]["content"] for one in found) == "a text"
        assert [one["done"] for one in found] == [False, False, True]
        assert (
            found[-1]["done_reason"],
            found[-1]["prompt_eval_count"],
            found[-1]["eval_count"],
        ) == ("stop", 7, 5)
        assert (found[-1]["total_duration"], found[-1]["load_duration"]) == (
            250_000_000,
            125_000_000,
        )
        for one in found:
            msgspec.convert(one, ollama_chat.OllamaGenerated)

    def test_previous_messages_become_turns(self) -> None:
        said = [{"role": "system", "content": "short"}, {"role": "user", "content": "one"}]
        said += [
            {"role": "assistant", "content": "two", "thinking": "hm"},
            {"role": "user", "content": "three"},
        ]
        stream = ask({"model": MODEL, "messages": said}, ollama_chat.chat)
        turns = [
            pb.Turn(role=pb.Turn.ROLE_USER, text="one"),
            pb.Turn(role=pb.Turn.ROLE_ASSISTANT, text="two"),
        ]
        task = pb.TextTask(instruction="short", turns=turns)
        assert stream.message == pb.ExtractRequest(
            model=MODEL, items=[pb.Item(text="three")], text=task
        )
        assert stream.renamed("text.turns[1].text") == "messages[2].content"

    def test_generate(self) -> None:
        stream = ask(
            {"model": MODEL, "prompt": "hello", "system": "short", "options": {"num_predict": -1}},
            ollama_chat.generate,
        )
        assert stream.message == pb.ExtractRequest(
            model=MODEL, items=[pb.Item(text="hello")], text=pb.TextTask(instruction="short")
        )
        (first,) = lines(stream.render(delta("a")))
        assert (first["response"], first["done"]) == ("a", False)
        question = ask({"model": MODEL, "prompt": "hello", "stream": False}, ollama_chat.generate)
        found = json.loads(question.convert(whole("a text", pb.FINISH_REASON_LENGTH)).body)
        assert (found["response"], found["done"], found["done_reason"]) == (
            "a text",
            True,
            "length",
        )
        assert lines(stream.fail(HttpError("WORKER_LOST", "gone"))) == [{"error": "gone"}]

    def test_characters_that_end_lines_elsewhere_are_escaped(self) -> None:
        text = "a\u2028b\u2029c\x85d\r\ne"
        stream = ask({"model": MODEL, "prompt": "hello"}, ollama_chat.generate)
        (line,) = stream.render(delta(text)).decode().splitlines()
        assert json.loads(line)["response"] == text
        events_of = ask({**HELLO, "stream": True})
        assert said(events(events_of.render(delta(text)))) == text

    def test_empty_request_reports_whether_the_model_is_known(self) -> None:
        for body, what in (
            ({"model": MODEL}, ollama_chat.generate),
            ({"model": MODEL, "messages": []}, ollama_chat.chat),
        ):
            question = ask(body, what)
            assert question.method is GET_MODEL
            assert (
                json.loads(question.convert(models_pb2.GetModelResponse()).body)["done_reason"]
                == "load"
            )

    def test_generative_models_have_the_capability_completion(self) -> None:
        shown = ollama.show(Received(json.dumps({"model": MODEL}).encode(), NAMES))
        reply = models_pb2.GetModelResponse(model=card(tasks=[models_pb2.TASK_TEXT], dimensions=0))
        answer = shown.convert(reply)
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
            ({"prompt": "a", "options": {"mirostat": 2}}, ollama_chat.generate, "options.mirostat"),
            (
                {"prompt": "a", "options": {"typical_p": 0.5}},
                ollama_chat.generate,
                "options.typical_p",
            ),
            ({"prompt": "a", "format": "xml"}, ollama_chat.generate, "format"),
            (
                {"prompt": "a", "options": {"num_predict": 5000}},
                ollama_chat.generate,
                "options.num_predict",
            ),
            (
                {"messages": [{"role": "assistant", "content": "a"}]},
                ollama_chat.chat,
                "messages[0].role",
            ),
            (
                {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
                ollama_chat.chat,
                "messages[0].tool_calls[0].function",
            ),
            (
                {
                    "messages": [
                        {"role": "user", "content": "a", "images": ["AAAA"]},
                        {"role": "user", "content": "b"},
                    ]
                },
                ollama_chat.chat,
                "messages[0].images[0]",
            ),
            (
                {"messages": [{"role": "user", "content": "a", "images": ["!"]}]},
                ollama_chat.chat,
                "messages[0].images[0]",
            ),
        ],
    )
    def test_refusals(
        self, body: dict[str, Any], what: Callable[[Received], MeshCall | StreamedCall], field: str
    ) -> None:
        assert refused({"model": MODEL, **body}, what).field == field
