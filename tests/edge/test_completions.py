"""OpenAI's completions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from shoal.v1 import inference_pb2 as pb

from services.edge.dialects.generation import completions
from tests.edge.parts import MODEL
from tests.edge.test_chat import ask, events, refused


class TestCompletions:
    def test_prompts_are_items_without_a_template(self) -> None:
        body = {
            "model": MODEL,
            "prompt": ["a", "b"],
            "n": 2,
            "seed": 1,
            "stop": ["x"],
            "temperature": 0.5,
        }
        question = ask(body, completions.complete)
        items = [pb.Item(text=text, seed=seed) for text in "ab" for seed in (1, 2)]
        task = pb.TextTask(
            max_tokens=16, raw_prompt=True, stop=["x"], sampling=pb.Sampling(temperature=0.5)
        )
        assert question.message == pb.ExtractRequest(model=MODEL, items=items, text=task)
        assert question.renamed("items[1].text is empty") == "prompt is empty"
        results = [
            pb.Extraction(text=f" {number}", finish_reason=pb.FINISH_REASON_LENGTH)
            for number in range(4)
        ]
        answer = json.loads(question.convert(pb.ExtractResponse(results=results)).body)
        assert [(one["index"], one["text"], one["finish_reason"]) for one in answer["choices"]] == [
            (number, f" {number}", "length") for number in range(4)
        ]

    def test_streams_of_several_answers(self) -> None:
        stream = ask({"model": MODEL, "prompt": ["a", "b"], "stream": True}, completions.complete)
        reported = events(
            stream.render(pb.ExtractStreamResponse(deltas=[pb.ExtractDelta(item=1, text=" x")]))
        )
        results = [pb.Extraction(text=" y"), pb.Extraction(text=" xz")]
        reported += events(
            stream.render(pb.ExtractStreamResponse(response=pb.ExtractResponse(results=results)))
        )
        texts = {0: "", 1: ""}
        for one in reported[:-1]:
            texts[one["choices"][0]["index"]] += one["choices"][0]["text"]
        assert (texts, reported[-1]) == ({0: " y", 1: " xz"}, "[DONE]")

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"prompt": [1, 2]}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"echo": True}, "echo"),
            ({"suffix": "a"}, "suffix"),
            ({"logprobs": 21}, "logprobs"),
            ({"best_of": 3}, "best_of"),
            ({"max_tokens": 5000}, "max_tokens"),
        ],
    )
    def test_refusals(self, change: dict[str, Any], field: str) -> None:
        assert (
            refused({"model": MODEL, "prompt": "a", **change}, completions.complete).field == field
        )
