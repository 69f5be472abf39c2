"""Lines of inputs and of results, without a storage."""

from __future__ import annotations

import json
import tracemalloc

import msgspec
import pytest

from services.edge.batches import lines
from services.edge.batches.objects import InputPlan, LineChunk
from services.edge.intake.served import Executed
from tests.edge.batches.parts import EMBEDDINGS, line


def plan(content: bytes, endpoint: str = EMBEDDINGS, max_requests: int = 1000) -> InputPlan:
    found, offset = [], 0
    for text in content.split(b"\n"):
        found.append((offset, text))
        offset += len(text) + 1
    return lines.divide(found, endpoint, max_requests=max_requests, max_line_bytes=4 << 20)


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b'{"a":' * 2000, "invalid_json_line", None),
        (line("a", "b", custom_id=None), "invalid_request", "custom_id"),
        (line("a", "b", custom_id=7), "invalid_request", "custom_id"),
        (line("", "b"), "invalid_request", "custom_id"),
        (line("x" * 600, "b"), "invalid_request", "custom_id"),
        (line("first", "b"), "duplicate_custom_id", "custom_id"),
        (line("a", "b", method="GET"), "invalid_method", "method"),
        (line("a", "b", url="/v1/rerank"), "invalid_url", "url"),
        (line("a", "b", url="http://127.0.0.1/v1/embeddings"), "invalid_url", "url"),
        (line("a", "b", body=[]), "invalid_request", "body"),
        (line("a", "b", body=None), "invalid_request", "body"),
        (line("a", "b", body={"model": 1}), "invalid_request", "body.model"),
        (line("a", "b", body={"model": []}), "invalid_request", "body.model"),
        (line("a", "b", custom_id=[[]] * 9), "invalid_request", "custom_id"),
        (line("a", "b", body={"stream": True}), "streaming_unsupported", "body.stream"),
        (line("a", "x" * (5 << 20)), "request_too_large", None),
    ],
)
def test_bad_line_fails_the_batch_with_its_number(bad: bytes, code: str, param: str) -> None:
    with pytest.raises(lines.Invalid) as caught:
        plan(line("first", "a") + b"\n" + bad.rstrip(b"\n") + b"\n" + line("last", "c"))
    (error,) = caught.value.errors
    assert (error.code, error.param, error.line) == (code, param, 3)
    assert error.message


def test_error_has_the_beginning_of_an_id() -> None:
    with pytest.raises(lines.Invalid) as caught:
        plan(line("\udbff\udfff" * 500, "a") * 2)
    assert 100 < len(caught.value.errors[0].message) < 200


def test_errors_of_a_file_are_bounded() -> None:
    with pytest.raises(lines.Invalid) as caught:
        plan(b"{\n" * 500)
    assert len(caught.value.errors) == lines.MAX_ERRORS


def test_large_values_of_a_line_are_not_decoded() -> None:
    large = b"[" + b"[]," * 300_000 + b"[]]"
    tracemalloc.start()
    try:
        for name in (b"custom_id", b"method", b"other"):
            with pytest.raises(lines.LineFault):
                lines.parse(b'{"%b":%b}' % (name, large), EMBEDDINGS)
        assert tracemalloc.get_traced_memory()[1] < 5 * len(large)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", [b"", b"\n\n", b"   \n"])
def test_empty_file_fails(content: bytes) -> None:
    with pytest.raises(lines.Invalid) as caught:
        plan(content)
    assert caught.value.errors[0].code == "empty_file"


def test_number_of_requests_is_bounded() -> None:
    content = b"".join(line(str(number), "a") for number in range(11))
    assert plan(content, max_requests=11).requests == 11
    with pytest.raises(lines.Invalid) as caught:
        plan(content, max_requests=10)
    assert caught.value.errors[0].code == "too_many_requests"


def test_number_of_models_is_bounded() -> None:
    content = [
        line(str(number), "", body={"model": f"org/model-{number % 17}"}) for number in range(50)
    ]
    assert plan(b"".join(content[:16])).model == ""
    with pytest.raises(lines.Invalid) as caught:
        plan(b"".join(content))
    (error,) = caught.value.errors
    assert (error.code, error.param) == ("too_many_models", "body.model")
    assert "16 models" in error.message


def test_long_model_is_cut() -> None:
    assert plan(line("a", "", body={"model": "m" * 10_000})).model == "m" * 256


def test_number_of_blank_lines_is_bounded() -> None:
    content = b"\n" * 10 + line("a", "b")
    assert plan(content.rstrip(), max_requests=10).requests == 1
    with pytest.raises(lines.Invalid) as caught:
        plan(b" \n" + content, max_requests=10)
    (error,) = caught.value.errors
    assert (error.code, error.line) == ("too_many_requests", 11)


def test_division_can_be_stopped() -> None:
    seen = 0

    def is_stopped() -> bool:
        nonlocal seen
        seen += 1
        return seen > 3

    with pytest.raises(lines.DivisionStopped):
        lines.divide(
            ((number, b"") for number in range(1 << 60)),
            EMBEDDINGS,
            max_requests=1000,
            max_line_bytes=1000,
            is_stopped=is_stopped,
        )
    assert seen == 4


def test_chunks_cover_all_lines_once() -> None:
    sizes = [1, 200, 100, 300, 1, 1] + [1] * 600
    content = b"\n".join(
        line(str(number), ["a"] * size).rstrip() for number, size in enumerate(sizes)
    )
    found = plan(content)
    assert found.requests == sum(chunk.requests for chunk in found.chunks) == len(sizes)
    ids = []
    for chunk in found.chunks:
        data = content[chunk.offset : chunk.offset + chunk.bytes]
        numbers = [number for number, _ in lines.split(data, chunk)]
        assert numbers == list(range(chunk.first, chunk.first + chunk.requests))
        requests = [lines.parse(text, EMBEDDINGS) for _, text in lines.split(data, chunk)]
        inputs = sum(len(json.loads(bytes(one.body))["input"]) for one in requests)
        assert inputs <= lines.CHUNK_INPUTS or chunk.requests == 1
        ids += [int(one.custom_id) for one in requests]
    assert ids == list(range(len(sizes)))
    assert msgspec.json.decode(msgspec.json.encode(found), type=InputPlan) == found


def test_line_numbers_count_blank_lines() -> None:
    content = b"\n" + line("a", "b") + b"\n \n" + line("c", "d")
    (chunk,) = plan(content).chunks
    data = content[chunk.offset : chunk.offset + chunk.bytes]
    assert [number for number, _ in lines.split(data, chunk)] == [2, 5]


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ({"input": "a"}, 1),
        ({"input": [1, 2, 3]}, 1),
        ({"input": ["a", "b"]}, 2),
        ({"input": [[1], [2], [3]]}, 3),
        ({"query": "a", "documents": ["a"] * 9}, 9),
        ({"input": ["a"], "return_multivector": True}, lines.CHUNK_INPUTS),
        ({"items": ["a"], "params": {"output_types": ["dense", "multivector"]}}, 256),
        ({"items": ["a"], "params": {"chunking": {"max_tokens": 100}}}, 256),
        ({"items": ["a"], "params": {"output_types": ["dense"], "chunking": None}}, 1),
        ({"items": ["a"], "params": None}, 1),
        ({"items": ["a"], "params": 5}, 1),
        ({"items": ["a"], "params": {"output_types": 5}}, 1),
        ({"messages": [{"role": "user", "content": "a"}]}, 1),
        ({"messages": [], "logprobs": True, "top_logprobs": 20}, 32),
        ({"messages": [], "logprobs": False}, 1),
        ({"prompt": ["a", "b"], "logprobs": 0}, 64),
        ({"prompt": "a", "logprobs": None}, 1),
    ],
)
def test_texts_of_a_request_decide_how_many_share_a_chunk(body: object, inputs: int) -> None:
    content = b"".join(line(str(number), "", body=body) for number in range(300))
    assert plan(content).chunks[0].requests == max(1, lines.CHUNK_INPUTS // inputs)


@pytest.mark.parametrize(
    ("path", "is_known"),
    [
        ("/v1/embeddings", True),
        ("/v1/chat/completions", True),
        ("/v1/rerank", True),
        ("/v1/extract/org/model", True),
        ("/v1/extract/", False),
        ("/v1/batches", False),
        ("/v1/files", False),
        ("/api/pull", False),
        ("", False),
    ],
)
def test_batches_may_name_some_paths(path: str, is_known: bool) -> None:
    assert lines.is_endpoint(path) == is_known


def test_result_has_the_answer_as_an_object() -> None:
    text = lines.result_line("batch_req_1", 'a"b', Executed(200, b'{"data":[]}'))
    assert text.endswith(b"\n")
    assert json.loads(text) == {
        "id": "batch_req_1",
        "custom_id": 'a"b',
        "response": {"status_code": 200, "request_id": "batch_req_1", "body": {"data": []}},
        "error": None,
    }


def test_result_counts_texts_that_were_cut() -> None:
    executed = Executed(200, b'{"data":[]}', truncated_inputs=2)
    found = json.loads(lines.result_line("batch_req_1", "a", executed))
    assert found["response"]["truncated_inputs"] == 2


def test_failed_result_has_status_body_and_code() -> None:
    body = b'{"error":{"code":"model_not_found","message":"no"}}'
    executed = Executed(404, body, "MODEL_NOT_FOUND", "no")
    found = json.loads(lines.result_line("batch_req_1", "a", executed))
    assert found["response"]["status_code"] == 404
    assert found["response"]["body"] == json.loads(body)
    assert found["error"] == {"code": "model_not_found", "message": "no"}
    other = Executed(400, b'{"detail":{"code":"X"}}', "INVALID_INPUT", "no")
    assert json.loads(lines.result_line("r", "a", other))["error"]["code"] == "invalid_input"


def test_part_has_its_counts_in_the_first_line() -> None:
    part = lines.make_part([b"one\n", b"two\n"], [b"three\n"], (7, 8))
    counts = lines.read_counts(part)
    assert (counts.completed, counts.failed, counts.input_tokens, counts.output_tokens) == (
        2,
        1,
        7,
        8,
    )
    first, second = counts.head_bytes, counts.head_bytes + counts.output_bytes
    assert (part[first:second], part[second:]) == (b"one\ntwo\n", b"three\n")
    for damaged in (part[:-1], b"", b"[]\n", part + b"x"):
        with pytest.raises(ValueError, match="part"):
            lines.read_counts(damaged)


def test_request_ids_are_stable_and_distinct() -> None:
    ids = {lines.request_id("batch_a", number) for number in range(100)}
    assert len(ids) == 100
    assert lines.request_id("batch_a", 1) in ids
    assert lines.request_id("batch_b", 1) not in ids


def test_split_keeps_numbers_of_a_chunk() -> None:
    assert list(lines.split(b"a\n\nb", LineChunk(7, 2, 0, 4))) == [(7, b"a"), (9, b"b")]
