"""SIE's API: Shoal's verbs in JSON and msgpack, without sockets."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from shoal.errors import TaskNotSupported
from shoal.transport.methods import EXTRACT, GET_MODEL
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from services.edge.dialects import openai, sie
from services.edge.messages.base import (
    MSGPACK,
    Answer,
    HttpError,
    MeshCall,
    Received,
    with_truncation_header,
)
from services.edge.messages.names import AliasNames
from tests.edge.parts import MODEL, card, dense, ragged, scores, sparse, vectors

NAMES = AliasNames({})
Ask = Callable[[Received], MeshCall]


def ask(what: Ask, body: Any, *, packed: bool = False, model: str = MODEL) -> MeshCall:
    if packed:
        return what(
            Received(
                msgspec.msgpack.encode(body),
                NAMES,
                model,
                "application/msgpack",
                "application/msgpack",
            )
        )
    return what(Received(json.dumps(body).encode(), NAMES, model, "application/json", "*/*"))


def content_of(answer: Answer | MeshCall) -> Any:
    assert isinstance(answer, Answer)
    body = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
    return (
        unpacked(msgspec.msgpack.decode(body)) if answer.media_type == MSGPACK else json.loads(body)
    )


def unpacked(content: Any) -> Any:
    """Decode arrays like msgpack-numpy."""
    if isinstance(content, dict) and b"nd" in content:
        return np.frombuffer(content[b"data"], np.dtype(content[b"type"])).reshape(
            content[b"shape"]
        )
    if isinstance(content, dict):
        return {key: unpacked(value) for key, value in content.items()}
    return [unpacked(value) for value in content] if isinstance(content, list) else content


def forms(count: int) -> pb.EncodeResponse:
    return pb.EncodeResponse(
        dense=dense(vectors(count)),
        sparse=sparse(*({index: 0.5} for index in range(count))),
        multi_vector=ragged(*(vectors(index + 1, 4) for index in range(count))),
        timings=pb.Timings(total_seconds=0.5),
        usage=pb.Usage(input_tokens=3),
        model_revision="r1",
    )


@pytest.mark.parametrize("packed", [False, True])
def test_encode_in_all_forms(packed: bool) -> None:
    body = {
        "items": [{"text": "a"}, {"text": "b", "id": "x"}],
        "params": {"output_types": ["dense", "sparse", "multivector"]},
    }
    question = ask(sie.encode, body, packed=packed)
    message: Any = question.message
    assert list(message.representations) == [1, 2, 3]
    assert message.role == pb.ROLE_DOCUMENT
    answer = question.convert(forms(2))
    found = content_of(answer)
    first, second = found["items"]
    assert (second["id"], "id" in first, found["model"], found["timing"]["total_ms"]) == (
        "x",
        False,
        MODEL,
        500,
    )
    assert np.array_equal(np.array(second["dense"]["values"], np.float32), vectors(2)[1])
    assert (first["dense"]["dims"], first["dense"]["dtype"]) == (8, "float32")
    assert (
        list(second["sparse"]["indices"]),
        list(second["sparse"]["values"]),
        second["sparse"]["dims"],
    ) == ([1], [0.5], 100)
    assert (second["multivector"]["num_tokens"], second["multivector"]["token_dims"]) == (2, 4)
    assert np.array(second["multivector"]["values"]).shape == (2, 4)
    assert isinstance(answer, Answer)
    assert dict(answer.headers)[b"x-sie-model-revision"] == b"r1"
    if packed:
        assert isinstance(first["dense"]["values"], np.ndarray)
        assert first["sparse"]["indices"].dtype == np.int32


def test_msgpack_equals_that_of_msgpack_numpy() -> None:
    answer = ask(sie.encode, {"items": [{"text": "a"}]}, packed=True).convert(
        pb.EncodeResponse(dense=dense(vectors(1)))
    )
    assert isinstance(answer, Answer)
    assert isinstance(answer.body, bytes)
    values = msgspec.msgpack.decode(answer.body)["items"][0]["dense"]["values"]
    assert values == {
        b"nd": True,
        b"type": "<f4",
        b"kind": b"",
        b"shape": [8],
        b"data": vectors(1).tobytes(),
    }


def test_large_json_in_pieces_equals_the_whole_answer() -> None:
    rows = vectors(200, 512)
    body = {"items": [{"text": "a", "id": index} for index in range(200)]}
    answer = ask(sie.encode, body).convert(pb.EncodeResponse(dense=dense(rows)))
    assert isinstance(answer, Answer)
    assert not isinstance(answer.body, bytes)
    found = content_of(answer)
    assert np.array_equal(
        np.array([item["dense"]["values"] for item in found["items"]], np.float32), rows
    )
    assert [item["id"] for item in found["items"]] == list(range(200))
    assert found["usage"] == {"input_tokens": 0}


def test_encode_options() -> None:
    options = {
        "is_query": True,
        "normalize": False,
        "lora_id": "org/a",
        "overflow_policy": "error",
        "profile": "default",
        "new": 3,
    }
    params = {"output_dtype": "float16", "instruction": "find", "options": options}
    message: Any = ask(
        sie.encode,
        {"items": [{"text": "a"}], "params": params, "pool": "l4"},
        model=f"{MODEL}:default",
    ).message
    assert (message.model, message.role, message.normalize, message.adapter) == (
        MODEL,
        pb.ROLE_QUERY,
        False,
        "org/a",
    )
    assert (message.truncation, message.instruction, message.pool) == (
        pb.TRUNCATION_NONE,
        "find",
        "l4",
    )


def test_images() -> None:
    for packed, data in ((True, b"png"), (False, base64.b64encode(b"png").decode())):
        question = ask(
            sie.encode, {"items": [{"images": [{"data": data, "format": "png"}]}]}, packed=packed
        )
        assert question.message.items[0].image.data == b"png"  # type: ignore[attr-defined]


@pytest.mark.parametrize("packed", [False, True])
def test_score(packed: bool) -> None:
    body = {"query": {"text": "q"}, "items": [{"text": "a"}, {"text": "b", "id": "x"}]}
    question = ask(sie.score, body, packed=packed)
    found = content_of(question.convert(scores(0.25, 0.5)))
    assert found["scores"] == [
        {"item_id": "x", "score": 0.5, "rank": 0},
        {"item_id": "item-0", "score": 0.25, "rank": 1},
    ]
    assert question.renamed("documents[1].text is empty") == "items[1].text is empty"


def extracted(body: Any, *tasks: models_pb2.Task, packed: bool = False) -> MeshCall:
    question = ask(sie.extract, body, packed=packed)
    assert question.method == GET_MODEL
    found = question.convert(
        models_pb2.GetModelResponse(model=card(tasks=tasks, representations=[]))
    )
    assert isinstance(found, MeshCall)
    assert found.method == EXTRACT
    return found


def test_card_determines_the_task() -> None:
    body = {
        "items": [{"text": "Ada in London", "id": 7}],
        "params": {"labels": ["person"], "options": {"threshold": 0.5}},
    }
    message: Any = extracted(body, models_pb2.TASK_ENTITIES).message
    assert message.entities == pb.EntitiesTask(labels=["person"], threshold=0.5)
    assert extracted(body, models_pb2.TASK_CLASSIFY).message.classify.labels == ["person"]  # type: ignore[attr-defined]
    assert extracted(body, models_pb2.TASK_RELATIONS).message.relations.labels == ["person"]  # type: ignore[attr-defined]
    body["params"]["options"] = {"relation_labels": ["born in"]}  # type: ignore[index]
    relations: Any = extracted(body, models_pb2.TASK_RELATIONS).message
    assert (relations.relations.labels, relations.relations.entity_labels) == (
        ["born in"],
        ["person"],
    )
    body["params"]["options"] = {"classification_type": "multi-label"}  # type: ignore[index]
    assert extracted(body, models_pb2.TASK_CLASSIFY).message.classify.multi_label is True  # type: ignore[attr-defined]


def test_caller_selects_one_of_several_tasks() -> None:
    kinds = (models_pb2.TASK_ENTITIES, models_pb2.TASK_CLASSIFY, models_pb2.TASK_RELATIONS)
    for task in ("entities", "classify", "relations"):
        body = {
            "items": [{"text": "a"}],
            "params": {"labels": ["person"], "options": {"task": task}},
        }
        assert extracted(body, *kinds).message.WhichOneof("task") == task


def test_document_reaches_the_mesh_with_its_pages() -> None:
    pdf, encoded = b"%PDF-1.7", base64.b64encode(b"%PDF-1.7").decode()
    for item in (
        {"document": encoded},
        {"document": {"data": encoded, "format": "pdf", "first_page": 2, "last_page": 3}},
    ):
        message: Any = ask(sie.encode, {"items": [item]}).message
        document = message.items[0].parts[0].document
        assert document.data == pdf
        assert (document.first_page, document.last_page) == (
            (2, 3) if isinstance(item["document"], dict) else (0, 0)
        )
    message = ask(sie.encode, {"items": [{"document": pdf}]}, packed=True).message
    assert message.items[0].parts[0].document.data == pdf
    renamed = ask(sie.encode, {"items": [{"document": encoded}]}).renamed
    assert (
        renamed("items[0].parts[0].document.data is no PDF") == "items[0].document.data is no PDF"
    )


def test_document_in_chunks_has_pages_and_texts() -> None:
    """The edge does not know the text of a document, so it asks the mesh for those of chunks."""
    document = base64.b64encode(b"%PDF-1.7").decode()
    body: Any = {
        "items": [{"document": document, "context": "Report. "}, {"text": "cd"}],
        "params": {"chunking": {"return_text": True}},
    }
    question = ask(sie.encode, body)
    message: Any = question.message
    assert message.chunking.return_text
    assert message.items[0].context == "Report. "
    chunks = pb.Chunks(
        offsets=[0, 2, 3],
        starts=[0, 4, 0],
        ends=[2, 6, 2],
        tokens=[3, 3, 3],
        pages=[1, 2, 0],
        texts=["ab", "ef", "cd"],
    )
    reply = pb.EncodeResponse(dense=dense(vectors(3)), chunks=chunks)
    found = content_of(question.convert(reply))["items"]
    assert [[(chunk["text"], chunk.get("page")) for chunk in item["chunks"]] for item in found] == [
        [("ab", 1), ("ef", 2)],
        [("cd", None)],
    ]
    del body["params"]["chunking"]["return_text"]
    question = ask(sie.encode, body)
    message = question.message
    assert not message.chunking.return_text
    chunks.ClearField("texts")
    reply = pb.EncodeResponse(dense=dense(vectors(3)), chunks=chunks)
    found = content_of(question.convert(reply))["items"]
    assert [["text" in chunk for chunk in item["chunks"]] for item in found] == [
        [False, False],
        [False],
    ]
    texts: Any = ask(
        sie.encode, {"items": [{"text": "ab"}], "params": {"chunking": {"return_text": True}}}
    ).message
    assert not texts.chunking.return_text, "the edge has the texts of all items"


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("docx", b"%PDF-1.7", "but data has another format"),
        ("text/html", b"# Markdown", "but data has another format"),
        ("application/msword", b"%PDF-1.7", "must be one of pdf, docx, xlsx, pptx, epub, html"),
        ("HTML", b"<!doctype html><p>a", None),
        ("text/markdown", b"# Markdown", None),
    ],
)
def test_declared_format_of_a_document_is_checked(
    name: str, data: bytes, problem: str | None
) -> None:
    body = {"items": [{"document": {"data": base64.b64encode(data).decode(), "format": name}}]}
    if problem is None:
        message: Any = ask(sie.encode, body).message
        assert message.items[0].parts[0].document.data == data
    else:
        with pytest.raises(HttpError) as caught:
            ask(sie.encode, body)
        assert problem in caught.value.message
        assert caught.value.field == "items[0].document.format"


def test_text_of_a_document_is_read_over_http() -> None:
    """A model that reads pages returns their text, and any other model for documents their text
    layer.
    """
    body: Any = {"items": [{"document": base64.b64encode(b"%PDF-1.7").decode()}]}
    message: Any = extracted(body, models_pb2.TASK_TEXT).message
    assert message.text.kind == pb.TextTask.KIND_OCR
    assert (
        extracted(body, models_pb2.TASK_TEXT, models_pb2.TASK_ENTITIES).message.WhichOneof("task")
        == "entities"
    )
    question = extracted(body | {"params": {"options": {"task": "text"}}}, models_pb2.TASK_ENCODE)
    assert question.message.WhichOneof("task") == "text"
    pages = [pb.PageText(page=1, text="Ada", is_text_layer=True)]
    found = content_of(question.convert(pb.ExtractResponse(results=[pb.Extraction(pages=pages)])))
    assert found["items"][0]["pages"] == [{"page": 1, "text": "Ada", "is_text_layer": True}]


@pytest.mark.parametrize("value", [{"a": [1]}, "text", 3, [1]])
def test_unsupported_field_is_named_for_any_value(value: Any) -> None:
    """The parser's own message would be "expected null" for every value."""
    for item, field in (({"audio": value}, "audio"), ({"video": value}, "video")):
        with pytest.raises(HttpError, match=f"{field} is not supported") as caught:
            ask(sie.encode, {"items": [{"text": "a"} | item]})
        assert caught.value.field == f"items[0].{field}"
    with pytest.raises(HttpError, match=r"params.options.muvera is not supported"):
        ask(sie.encode, {"items": [{"text": "a"}], "params": {"options": {"muvera": value}}})
    body = json.dumps({"model": MODEL, "input": "a", "messages": value}).encode()
    with pytest.raises(HttpError, match="messages are not supported: send input"):
        openai.embeddings(Received(body, AliasNames({})))


def test_unsupported_task_is_an_error_of_the_model_field() -> None:
    """The gRPC error names the task's field, which HTTP requests lack."""
    question = ask(sie.encode, {"items": [{"text": "a"}]})
    for field in ("text", "entities", "classify", "relations", "regions", "structure", "model"):
        problem = HttpError.from_error(
            TaskNotSupported(f"org/a has no task {field}", field=field), question
        )
        assert (problem.field, problem.status) == ("model", 400)


def test_regions() -> None:
    """The task follows from the card, from the caller's field, and for an unknown model from
    images.
    """
    body: Any = {
        "items": [{"images": [{"data": b"png"}]}],
        "params": {"labels": ["cat"], "options": {"threshold": 0.5}},
    }
    wanted = pb.RegionsTask(labels=["cat"], threshold=0.5)
    question = extracted(body, models_pb2.TASK_REGIONS, packed=True)
    assert question.message.regions == wanted  # type: ignore[attr-defined]
    assert question.renamed("regions.labels[1] is empty") == "params.labels[1] is empty"
    body["params"]["options"]["task"] = "regions"
    assert (
        extracted(  # type: ignore[attr-defined]
            body, models_pb2.TASK_CLASSIFY, models_pb2.TASK_REGIONS, packed=True
        ).message.regions
        == wanted
    )
    assert (
        extracted(body, models_pb2.TASK_CLASSIFY, packed=True).message.WhichOneof("task")
        == "regions"
    )
    del body["params"]["options"]["task"]
    unknown = ask(sie.extract, body, packed=True).fallback(HttpError("MODEL_NOT_FOUND", ""))
    assert unknown is not None
    assert unknown.message.regions == wanted  # type: ignore[attr-defined]


@pytest.mark.parametrize("packed", [False, True])
def test_schemas(packed: bool) -> None:
    schema = {
        "entities": ["person"],
        "structures": {"ship": {"fields": [{"name": "name", "dtype": "str"}, {"name": "crew"}]}},
    }
    body: Any = {
        "items": [{"text": "Ada"}],
        "params": {"output_schema": schema, "options": {"threshold": 0.25}},
    }
    question = extracted(body, models_pb2.TASK_STRUCTURE, packed=packed)
    fields = [
        pb.SchemaField(name="name", kind=pb.SchemaField.KIND_STRING),
        pb.SchemaField(name="crew", kind=pb.SchemaField.KIND_LIST),
    ]
    assert question.message.structure == pb.StructureTask(  # type: ignore[attr-defined]
        entities=[pb.SchemaLabel(label="person")],
        structures=[pb.SchemaStructure(name="ship", fields=fields)],
        threshold=0.25,
    )
    assert (
        question.renamed("structure.entities[0].label is empty")
        == "params.output_schema.entities[0].label is empty"
    )
    value = pb.StructureValue(text="Ada", score=0.5, start=0, end=3)
    found = [
        pb.StructureField(name="name"),
        pb.StructureField(name="crew", values=[value], list=True),
    ]
    reply = pb.ExtractResponse(
        results=[
            pb.Extraction(
                classifications=[
                    pb.Classification(name="tone", labels=[pb.LabelScore(label="calm", score=0.5)])
                ],
                structures=[pb.Structure(name="ship", fields=found)],
            )
        ]
    )
    [item] = content_of(extracted(body, models_pb2.TASK_STRUCTURE).convert(reply))["items"]
    assert item["classifications"] == [{"task": "tone", "label": "calm", "score": 0.5}]
    assert item["data"] == {
        "ship": [{"name": None, "crew": [{"text": "Ada", "score": 0.5, "start": 0, "end": 3}]}]
    }
    for wrong in ({"output_schema": {"other": 1}}, {"options": {"task": "structure"}}):
        with pytest.raises(HttpError) as caught:
            ask(sie.extract, {"items": [{"text": "a"}], "params": wrong}, packed=packed)
        assert caught.value.field == "params.output_schema"


def test_stages_are_in_the_server_timing_header() -> None:
    timings = pb.Timings(
        queue_seconds=0.002,
        prepare_seconds=0.0004,
        wait_seconds=0.001,
        forward_seconds=0.0625,
        total_seconds=0.07,
    )
    question = ask(sie.score, {"query": {"text": "q"}, "items": [{"text": "a"}]})
    reply = scores(0.5)
    reply.timings.CopyFrom(timings)
    answer = question.convert(reply)
    assert not isinstance(answer, MeshCall)
    expected = (
        b"queue;dur=2.000, prepare;dur=0.400, wait;dur=1.000, forward;dur=62.500, "
        b"finish;dur=0.000, total;dur=70.000"
    )
    assert dict(answer.headers)[b"server-timing"] == expected


def test_unknown_model_is_called_anyway() -> None:
    question = ask(sie.extract, {"items": [{"text": "a"}], "params": {"labels": ["person"]}})
    found = question.fallback(HttpError("MODEL_NOT_FOUND", ""))
    assert found is not None
    assert found.message.WhichOneof("task") == "entities"
    assert question.fallback(HttpError("UNAUTHENTICATED", "")) is None


def test_extractions() -> None:
    ada = pb.Entity(start=0, end=3, label="person", score=0.5, text="Ada")
    reply = pb.ExtractResponse(
        results=[
            pb.Extraction(
                entities=[ada],
                labels=[pb.LabelScore(label="a", score=0.25)],
                relations=[pb.Relation(head=ada, tail=ada, label="is", score=0.5)],
                regions=[pb.Region(left=1, top=2, right=3, bottom=4, label="cat", score=0.75)],
            )
        ]
    )
    found = content_of(
        extracted({"items": [{"text": "Ada", "id": 7}]}, models_pb2.TASK_ENTITIES).convert(reply)
    )
    assert found["items"] == [
        {
            "id": 7,
            "entities": [{"text": "Ada", "label": "person", "score": 0.5, "start": 0, "end": 3}],
            "relations": [{"head": "Ada", "tail": "Ada", "relation": "is", "score": 0.5}],
            "classifications": [{"label": "a", "score": 0.25}],
            "objects": [{"label": "cat", "score": 0.75, "bbox": [1.0, 2.0, 3.0, 4.0]}],
        }
    ]


def test_truncated_results_are_marked_in_item_and_header() -> None:
    reply = pb.ExtractResponse(results=[pb.Extraction(), pb.Extraction(truncated=True)])
    question = extracted({"items": [{"text": "a"}, {"text": "b"}]}, models_pb2.TASK_ENTITIES)
    found = content_of(question.convert(reply))
    assert ["truncated" in item for item in found["items"]] == [False, True]
    noted = with_truncation_header(question.convert(reply), reply)
    assert isinstance(noted, Answer)
    assert (b"x-shoal-truncated", b"true") in noted.headers
    whole = pb.ExtractResponse(results=[pb.Extraction()] * 2)
    assert with_truncation_header(question.convert(whole), whole) == question.convert(whole)


def test_truncated_sparse_vectors_set_the_header() -> None:
    reply = forms(2)
    reply.sparse.truncated = True
    noted = with_truncation_header(Answer(b""), reply)
    assert isinstance(noted, Answer)
    assert noted.headers == ((b"x-shoal-truncated", b"true"),)


@pytest.mark.parametrize(
    ("what", "body", "field"),
    [
        (sie.encode, {}, "items"),
        (sie.encode, {"items": [{"text": 3}]}, "items[0].text"),
        (sie.encode, {"items": [{"text": "a", "id": 2**63}]}, "items[0].id"),
        (sie.encode, {"items": [{}]}, "items[0]"),
        (sie.encode, {"items": [{"audio": {"data": ""}}]}, "items[0].audio"),
        (
            sie.encode,
            {"items": [{"text": "a"}], "params": {"output_types": ["loose"]}},
            "params.output_types[0]",
        ),
        (
            sie.encode,
            {"items": [{"text": "a"}], "params": {"output_dtype": "uint8"}},
            "params.output_dtype",
        ),
        (
            sie.encode,
            {"items": [{"text": "a"}], "params": {"options": {"pooling": "max"}}},
            "params.options.pooling",
        ),
        (
            sie.encode,
            {"items": [{"text": "a"}], "params": {"options": {"muvera": {}}}},
            "params.options.muvera",
        ),
        (
            sie.encode,
            {"items": [{"text": "a"}], "params": {"options": {"profile": "fast"}}},
            "params.options.profile",
        ),
        (
            sie.encode,
            {"items": [{"text": "a"}], "params": {"options": {"dimensions": 0}}},
            "params.options.dimensions",
        ),
        (sie.score, {"items": [{"text": "a"}]}, "query"),
        (sie.score, {"query": {}, "items": []}, "query"),
        (
            sie.extract,
            {"items": [{"text": "a"}], "params": {"output_schema": {}}},
            "params.output_schema",
        ),
        (sie.extract, {"items": [{"text": "a"}], "params": {"labels": "person"}}, "params.labels"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_unsupported_request_is_refused_with_its_field(
    what: Ask, body: Any, field: str, packed: bool
) -> None:
    with pytest.raises(HttpError) as caught:
        ask(what, body, packed=packed)
    assert (caught.value.status, caught.value.field) == (400, field)


def test_invalid_msgpack_is_refused() -> None:
    for body in (
        b"\xc1",
        b"\x81",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 5000,
        msgspec.msgpack.encode([1]),
    ):
        with pytest.raises(HttpError) as caught:
            sie.encode(Received(body, NAMES, MODEL, "application/msgpack"))
        assert caught.value.status == 400


def test_unknown_profile_is_not_found() -> None:
    with pytest.raises(HttpError) as caught:
        ask(sie.encode, {"items": [{"text": "a"}]}, model=f"{MODEL}:fast")
    assert sie.error(caught.value).status == 404


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("INVALID_INPUT", 400, "INVALID_INPUT"),
        ("TASK_NOT_SUPPORTED", 400, "INVALID_INPUT"),
        ("INPUT_TOO_LONG", 400, "INPUT_TOO_LONG"),
        ("OUT_OF_MEMORY", 400, "INPUT_TOO_LONG"),
        ("MODEL_NOT_FOUND", 404, "MODEL_NOT_FOUND"),
        ("QUEUE_FULL", 503, "QUEUE_FULL"),
        ("RATE_LIMITED", 429, "RATE_LIMITED"),
        ("NO_CAPACITY", 503, "PROVISIONING"),
        ("MODEL_LOAD_FAILED", 502, "MODEL_LOAD_FAILED"),
        ("MODEL_UNREACHABLE", 424, "MODEL_NOT_FOUND"),
        ("WORKER_LOST", 500, "INFERENCE_ERROR"),
        ("DEADLINE_PASSED", 504, "TIMEOUT"),
    ],
)
def test_errors_have_sies_codes(reason: str, status: int, code: str) -> None:
    answer = sie.error(HttpError(reason, "why"))
    assert answer.status == status
    assert content_of(answer) == {"detail": {"code": code, "message": "why"}}
    assert dict(answer.headers)[b"x-sie-error-code"] == code.encode()


def test_cut_texts_are_counted_in_usage() -> None:
    question = extracted({"items": [{"text": "a"}, {"text": "b"}]}, models_pb2.TASK_ENTITIES)
    whole = pb.ExtractResponse(results=[pb.Extraction()] * 2, usage=pb.Usage(input_tokens=9))
    assert content_of(question.convert(whole))["usage"] == {"input_tokens": 9}
    whole.usage.truncated_items = 1
    assert content_of(question.convert(whole))["usage"] == {
        "input_tokens": 9,
        "truncated_items": 1,
    }


def test_long_texts_are_read_in_windows() -> None:
    options = {"overflow_policy": "windows", "window_overlap": 64}
    body = {"items": [{"text": "a"}], "params": {"options": options}}
    message = extracted(body, models_pb2.TASK_ENTITIES).message
    assert isinstance(message, pb.ExtractRequest)
    assert message.truncation == pb.TRUNCATION_WINDOWS
    assert message.window_overlap == 64
    body["params"] = {"options": {"overflow_policy": "error"}}
    message = extracted(body, models_pb2.TASK_ENTITIES).message
    assert not message.HasField("window_overlap")
    body["params"] = {"options": {"overflow_policy": "windows", "window_overlap": 5_000_000_000}}
    with pytest.raises(HttpError, match="window_overlap") as caught:
        extracted(body, models_pb2.TASK_ENTITIES)
    assert caught.value.status == 400
