"""OpenAI's dialect, from bytes to calls and from replies to bytes, without sockets."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import tensor_pb2

from services.edge.dialects.openai import EmbeddingsAnswer, embeddings, error
from services.edge.messages.base import Answer, HttpError, MeshCall, Received
from services.edge.messages.names import AliasNames, AliasTarget
from tests.edge.parts import MODEL, dense, vectors

ALIASES = AliasNames(
    {"text-embedding-3-small": AliasTarget("org/small", "query", 4, "org/adapter")}
)


def ask(**body: Any) -> MeshCall:
    return asked(json.dumps({"model": MODEL, "input": "text", **body}).encode())


def asked(body: bytes) -> MeshCall:
    return embeddings(Received(body, ALIASES))


def content(answer: Answer | MeshCall) -> Any:
    assert isinstance(answer, Answer)
    body = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
    return json.loads(body)


def reply(rows: np.ndarray) -> pb.EncodeResponse:
    return pb.EncodeResponse(dense=dense(rows), usage=pb.Usage(input_tokens=7))


def refused(**body: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        ask(**body)
    return caught.value


def test_one_text_and_many() -> None:
    assert ask(input="one").message == pb.EncodeRequest(model=MODEL, items=[pb.Item(text="one")])
    assert [item.text for item in ask(input=["a", "b"]).message.items] == ["a", "b"]  # type: ignore[attr-defined]


def test_floats_are_the_shortest_digits_of_float32() -> None:
    rows = vectors(3)
    reported = content(ask(input=["a", "b", "c"]).convert(reply(rows)))
    assert [entry["index"] for entry in reported["data"]] == [0, 1, 2]
    assert np.array_equal(
        np.array([entry["embedding"] for entry in reported["data"]], np.float32), rows
    )
    assert reported["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert reported["model"] == MODEL
    msgspec.convert(reported, EmbeddingsAnswer)


def test_base64_is_little_endian_float32() -> None:
    rows = vectors(2)
    reported = content(ask(input=["a", "b"], encoding_format="base64").convert(reply(rows)))
    found = [
        np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in reported["data"]
    ]
    assert np.array_equal(found, rows)
    msgspec.convert(reported, EmbeddingsAnswer)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_large_answer_in_pieces_equals_the_whole_answer(encoding: str) -> None:
    rows = vectors(300, 1024)
    answer = ask(input=["a"] * 300, encoding_format=encoding).convert(reply(rows))
    assert isinstance(answer, Answer)
    assert not isinstance(answer.body, bytes)
    pieces = list(answer.body)
    assert len(pieces) > 4
    reported = json.loads(b"".join(pieces))
    if encoding == "float":
        found = np.array([entry["embedding"] for entry in reported["data"]], np.float32)
    else:
        found = np.stack(
            [
                np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
                for entry in reported["data"]
            ]
        )
    assert np.array_equal(found, rows)


def test_null_is_absent() -> None:
    names = [name for name in EMBEDDINGS_FIELDS if name not in ("model", "input")]
    assert ask(**dict.fromkeys(names)).message == ask().message


EMBEDDINGS_FIELDS = (
    "model", "input", "encoding_format", "dimensions", "input_type", "task", "prompt_name",
    "role", "embedding_type", "encoding_type", "normalized", "late_chunking", "truncate",
    "truncation", "output_dimension", "output_dtype", "normalize", "add_special_tokens",
    "truncate_prompt_tokens", "embed_dtype", "endianness", "messages", "instruction", "adapter",
    "pool", "priority", "user",
)  # fmt: skip


def test_unknown_fields_and_user_are_ignored() -> None:
    assert (
        ask(user="somebody", extra={"deep": [1, {"a": None}]}, modality="text").message
        == ask().message
    )


@pytest.mark.parametrize(
    ("field", "word", "role"),
    [
        ("input_type", "query", pb.ROLE_QUERY),
        ("input_type", "search_document", pb.ROLE_DOCUMENT),
        ("input_type", "classification", pb.ROLE_UNSPECIFIED),
        ("task", "retrieval.query", pb.ROLE_QUERY),
        ("task", "retrieval.passage", pb.ROLE_DOCUMENT),
        ("prompt_name", "passage", pb.ROLE_DOCUMENT),
        ("role", "query", pb.ROLE_QUERY),
    ],
)
def test_role_words_of_all_dialects(field: str, word: str, role: pb.Role) -> None:
    assert ask(**{field: word}).message.role == role  # type: ignore[attr-defined]


@pytest.mark.parametrize("task", ["text-matching", "classification", "separation", "clustering"])
def test_other_tasks_select_the_models_adapter(task: str) -> None:
    question = ask(task=task)
    message: Any = question.message
    assert (message.adapter, message.role) == (task, pb.ROLE_UNSPECIFIED)
    assert question.fields["adapter"] == "task"
    named: Any = ask(task=task, adapter="org/a").message
    side: Any = ask(task="retrieval.query").message
    assert (named.adapter, side.adapter) == ("org/a", "")


def test_alias_fixes_model_role_dimensions_and_adapter() -> None:
    message: Any = ask(model="text-embedding-3-small").message
    assert (message.model, message.role, message.dimensions, message.adapter) == (
        "org/small",
        pb.ROLE_QUERY,
        4,
        "org/adapter",
    )
    message = ask(
        model="text-embedding-3-small", role="document", dimensions=2, adapter="org/other"
    ).message
    assert (message.role, message.dimensions, message.adapter) == (pb.ROLE_DOCUMENT, 2, "org/other")
    reported = content(ask(model="text-embedding-3-small").convert(reply(vectors(1))))
    assert reported["model"] == "text-embedding-3-small"


def test_role_suffix_of_the_models_name() -> None:
    message: Any = ask(model=f"{MODEL}:query").message
    assert (message.model, message.role) == (MODEL, pb.ROLE_QUERY)


def test_own_and_foreign_options() -> None:
    message: Any = ask(
        output_dimension=16,
        truncation=False,
        normalized=False,
        instruction="find",
        pool="l4",
        priority="bulk",
        adapter="org/a",
    ).message
    assert message == pb.EncodeRequest(
        model=MODEL,
        items=[pb.Item(text="text")],
        dimensions=16,
        truncation=pb.TRUNCATION_NONE,
        normalize=False,
        instruction="find",
        pool="l4",
        priority=pb.PRIORITY_BULK,
        adapter="org/a",
    )
    assert ask(truncate="START").message.truncation == pb.TRUNCATION_START  # type: ignore[attr-defined]


def test_bits_signed_and_unsigned() -> None:
    rows = vectors(2, 16)
    packed = np.packbits(rows > 0, axis=1)
    stored = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_BINARY, shape=rows.shape, data=packed.tobytes()
    )
    answer = pb.EncodeResponse(dense=stored)
    asked = ask(input=["a", "b"], embedding_type=["binary", "ubinary"])
    assert asked.message.data_type == tensor_pb2.DATA_TYPE_BINARY  # type: ignore[attr-defined]
    reported = content(asked.convert(answer))["data"]
    signed = np.array([entry["embeddings"]["binary"] for entry in reported])
    unsigned = np.array([entry["embeddings"]["ubinary"] for entry in reported])
    assert np.array_equal(unsigned, packed)
    assert np.array_equal(np.unpackbits((signed + 128).astype(np.uint8), axis=1), rows > 0)
    voyage = content(ask(output_dtype="ubinary", encoding_format="base64").convert(answer))["data"]
    assert base64.b64decode(voyage[0]["embedding"]) == packed[0].tobytes()


def test_int8() -> None:
    rows = np.array([[1, -127, 5]], np.int8)
    tensor = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_INT8,
        shape=rows.shape,
        data=rows.tobytes(),
        scale=np.array([0.5], np.float32).tobytes(),
    )
    reported = content(ask(output_dtype="int8").convert(pb.EncodeResponse(dense=tensor)))
    assert reported["data"][0]["embedding"] == [1, -127, 5]


def test_images_are_data_and_never_urls() -> None:
    picture = base64.b64encode(b"\x89PNG").decode()
    for given in (f"data:image/png;base64,{picture}", picture):
        message: Any = ask(input=[{"image": given}, {"text": "a"}]).message
        assert (message.items[0].image.data, message.items[1].text) == (b"\x89PNG", "a")
        message = ask(input=given, modality="image", dimensions=0).message
        assert (message.items[0].image.data, message.dimensions) == (b"\x89PNG", 0)
    for address in ("https://example.org/a.png", "file:///etc/passwd", "FTP://a/b"):
        problem = refused(input=[{"image": address}])
        assert problem.field == "input[0].image"
        assert "not fetched" in problem.message


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        (b"", "", "no body"),
        (b"{", "", "not JSON"),
        (b"\xff", "", "not JSON"),
        (b'{"model":"\xff","input":"a"}', "", "not JSON"),
        (b"[]", "", "object"),
        (b'{"model":"org/m","input":"a","x":' + b"[" * 5000 + b"]" * 5000 + b"}", "", "deep"),
        (b'{"input":"a"}', "model", "model is required"),
        (b'{"model":"org/m"}', "input", "input is required"),
        (b'{"model":3,"input":"a"}', "model", "expected str"),
        (b'{"model":"org/m","input":{}}', "input", "expected"),
        (b'{"model":"org/m","input":["a",null]}', "input[1]", "expected"),
        (b'{"model":"org/m","input":["a",[1.5]]}', "input[1][0]", "expected int"),
        (b'{"model":"org/m","input":"a","dimensions":"8"}', "dimensions", "expected int"),
    ],
)
def test_malformed_bodies_name_the_field(body: bytes, field: str, words: str) -> None:
    with pytest.raises(HttpError, match=words) as caught:
        asked(body)
    assert (caught.value.status, caught.value.field) == (400, field)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": [15339, 1917]}, "input"),
        ({"input": [[15339], [87]]}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": -1}, "dimensions"),
        ({"dimensions": 1 << 40}, "dimensions"),
        ({"output_dimension": 0}, "output_dimension"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"embedding_type": "float7"}, "embedding_type"),
        ({"embedding_type": ["float", "binary"]}, "embedding_type"),
        ({"output_dtype": "uint8"}, "output_dtype"),
        ({"input_type": "question"}, "input_type"),
        ({"role": "query", "input_type": "document"}, "role"),
        ({"task": "no such name"}, "task"),
        ({"late_chunking": True, "return_multivector": True}, "late_chunking"),
        ({"late_chunking": True, "input": ["a", ""]}, "input[1]"),
        ({"late_chunking": True, "input": [{"image": "aGVsbG8="}]}, "late_chunking"),
        ({"messages": []}, "messages"),
        ({"endianness": "big"}, "endianness"),
        ({"modality": "audio"}, "modality"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"priority": "soon"}, "priority"),
        ({"input": ["a", "\ud800"]}, ""),
        ({"input": [{"text": "a", "image": "b"}]}, "input[0]"),
        ({"input": [{"image": "not base64"}]}, "input[0].image"),
    ],
)
def test_unsupported_request_is_refused_with_its_field(body: dict[str, Any], field: str) -> None:
    problem = refused(**body)
    assert (problem.status, problem.field) == (400, field)


def test_infinitys_zero_dimensions_mean_the_models_default() -> None:
    assert ask(modality="text", dimensions=0, encoding_format="float").message == ask().message


def test_token_ids_are_refused_with_advice() -> None:
    assert "check_embedding_ctx_length=False" in refused(input=[[15339, 1917]]).message


def test_invalid_model_names_are_not_found() -> None:
    problem = refused(model="gpt-4o")
    assert (problem.status, problem.reason, problem.field) == (404, "MODEL_NOT_FOUND", "model")
    assert "an alias of the edge's file SHOAL_ALIASES" in problem.message
    assert len(refused(model="x" * 100_000).message) < 500


@pytest.mark.parametrize(
    ("given", "field", "message", "reported"),
    [
        (["a", "b"], "items[1].text", "items[1].text is empty", "input[1] is empty"),
        ("a", "items[0].text", "items[0].text is empty", "input is empty"),
        (
            ["a"],
            "items",
            "items is empty: 1..10,000 are allowed",
            "input is empty: 1..10,000 are allowed",
        ),
        (
            ["a"],
            "dimensions",
            "dimensions is 900; the model has 384",
            "dimensions is 900; the model has 384",
        ),
    ],
)
def test_router_errors_use_the_callers_names(
    given: Any, field: str, message: str, reported: str
) -> None:
    question = ask(input=given)
    assert question.renamed(message) == reported
    assert question.renamed(field) in reported


@pytest.mark.parametrize(
    ("reason", "status", "kind", "code"),
    [
        ("INVALID_INPUT", 400, "invalid_request_error", None),
        ("INPUT_TOO_LONG", 400, "invalid_request_error", "context_length_exceeded"),
        ("UNAUTHENTICATED", 401, "authentication_error", "invalid_api_key"),
        ("PERMISSION_DENIED", 403, "permission_error", None),
        ("MODEL_NOT_FOUND", 404, "invalid_request_error", "model_not_found"),
        ("TOO_LARGE", 413, "invalid_request_error", None),
        ("QUEUE_FULL", 429, "rate_limit_error", "rate_limit_exceeded"),
        ("INTERNAL", 500, "server_error", None),
        ("MODEL_LOAD_FAILED", 502, "server_error", None),
        ("MODEL_UNREACHABLE", 424, "invalid_request_error", "model_unreachable"),
        ("NO_CAPACITY", 503, "server_error", "overloaded"),
        ("DEADLINE_PASSED", 504, "server_error", "timeout"),
    ],
)
def test_errors_have_the_union_body(reason: str, status: int, kind: str, code: str | None) -> None:
    answer = error(HttpError(reason, "why", field="input"))
    reported = content(answer)
    assert answer.status == status
    assert reported["error"] == {"message": "why", "type": kind, "param": "input", "code": code}
    assert reported["message"] == reported["detail"] == "why"


def test_retry_headers() -> None:
    def headers(problem: HttpError) -> dict[bytes, bytes]:
        return dict(error(problem).headers)

    assert headers(HttpError("QUEUE_FULL", "", retry_after=1.2)) == {
        b"retry-after": b"2",
        b"retry-after-ms": b"1200",
    }
    assert headers(HttpError("NO_CAPACITY", ""))[b"retry-after"] == b"1"
    assert headers(HttpError("INVALID_INPUT", "")) == {b"x-should-retry": b"false"}
    assert headers(HttpError("WORKER_LOST", "")) == {b"x-should-retry": b"false"}
    assert headers(HttpError("UNAUTHENTICATED", ""))[b"www-authenticate"] == b"Bearer"
    assert headers(HttpError("DEADLINE_PASSED", "")) == {}


def test_model_without_dense_vectors() -> None:
    with pytest.raises(HttpError, match="no dense vectors"):
        ask().convert(pb.EncodeResponse())
