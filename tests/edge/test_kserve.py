"""KServe v2 over HTTP, from bytes to calls and from replies to bytes, with JSON and with binary
tensors.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from shoal.transport.methods import ENCODE, EXTRACT, GET_MODEL, SCORE
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from services.edge.dialects import kserve
from services.edge.messages import numbers
from services.edge.messages.base import Answer, HttpError, MeshCall, Received
from services.edge.messages.names import AliasNames, AliasTarget
from tests.edge.parts import (
    MODEL,
    WIDTH,
    Script,
    card,
    dense,
    edge,
    ragged,
    scores,
    sparse,
    vectors,
)

NAMES = AliasNames({"mini": AliasTarget(MODEL, "query", 4)})


def tensor(name: str, *texts: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(texts)], "datatype": "BYTES", "data": list(texts), **more}


def asked(body: dict[str, Any], raw: bytes = b"", model: str = MODEL) -> MeshCall:
    content = json.dumps(body).encode()
    return kserve.infer(
        Received(content + raw, NAMES, model, json_length=str(len(content)) if raw else "")
    )


def ask(*inputs: dict[str, Any], **more: Any) -> MeshCall:
    return asked({"inputs": inputs, **more})


def embed(*inputs: dict[str, Any], **more: Any) -> MeshCall:
    """Return the call that follows the card."""
    question = ask(*inputs, **more)
    assert question.method is GET_MODEL
    return following(question, models_pb2.GetModelResponse(model=card()))


def following(question: MeshCall, reply: Any) -> MeshCall:
    found = question.convert(reply)
    assert isinstance(found, MeshCall)
    return found


def content_of(answer: Answer | MeshCall) -> Any:
    assert isinstance(answer, Answer)
    return json.loads(answer.body if isinstance(answer.body, bytes) else b"".join(answer.body))


def outputs(answer: Answer | MeshCall) -> dict[str, Any]:
    return {
        one["name"]: (one["datatype"], one["shape"], one["data"])
        for one in content_of(answer)["outputs"]
    }


def packed(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def test_vectors() -> None:
    rows = vectors(2)
    question = embed(tensor("text", "a", "b"), id="7")
    assert question.method is ENCODE
    assert question.message == pb.EncodeRequest(
        model=MODEL, items=[pb.Item(text="a"), pb.Item(text="b")]
    )
    answer = question.convert(pb.EncodeResponse(dense=dense(rows), model_revision="r1"))
    content = content_of(answer)
    assert {
        name: content[name] for name in ("model_name", "model_version", "id", "parameters")
    } == {
        "model_name": MODEL,
        "model_version": "1",
        "id": "7",
        "parameters": {"revision": "r1"},
    }
    kind, shape, data = outputs(answer)["dense"]
    assert (kind, shape) == ("FP32", [2, WIDTH])
    assert np.array_equal(np.array(data, np.float32).reshape(shape), rows)
    msgspec.convert(content, kserve.InferOut)
    assert question.renamed("items[1].text is empty") == "text[1] is empty"


def test_large_answer_in_pieces_equals_the_whole_answer() -> None:
    rows = vectors(3, numbers.PIECE_NUMBERS // 2)
    answer = embed(tensor("text", "a", "b", "c")).convert(pb.EncodeResponse(dense=dense(rows)))
    assert isinstance(answer, Answer)
    assert not isinstance(answer.body, bytes)
    assert np.array_equal(
        np.array(outputs(answer)["dense"][2], np.float32).reshape(rows.shape), rows
    )


@pytest.mark.parametrize("data", [["a", "b"], [["a"], ["b"]], [["a", "b"]], [[["a"]], [["b"]]]])
def test_data_may_be_nested_and_the_only_input_have_any_name(data: Any) -> None:
    question = embed({"name": "INPUT0", "shape": [2, 1], "datatype": "BYTES", "data": data})
    assert [item.text for item in question.message.items] == ["a", "b"]  # type: ignore[attr-defined]
    assert question.renamed("items[1].text") == "INPUT0[1]"


def test_options() -> None:
    options = {
        "role": "query",
        "dimensions": 4,
        "normalize": True,
        "truncation": False,
        "priority": "bulk",
        "sequence_id": 3,
    }
    message: Any = embed(tensor("text", "a"), parameters=options).message
    assert (message.role, message.dimensions, message.normalize) == (pb.ROLE_QUERY, 4, True)
    assert (message.truncation, message.priority) == (pb.TRUNCATION_NONE, pb.PRIORITY_BULK)


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("mini", MODEL),
        (f"{MODEL}/versions/1", MODEL),
        (f"{MODEL}/versions/abc", f"{MODEL}@abc"),
        (f"{MODEL}@x/versions/1", f"{MODEL}@x"),
    ],
)
def test_names_and_versions(path: str, model: str) -> None:
    assert asked({"inputs": [tensor("text", "a")]}, model=path).message.model == model  # type: ignore[attr-defined]


def test_outputs_determine_the_task() -> None:
    question = ask(
        tensor("text", "a", "b"),
        outputs=[{"name": "sparse_offsets"}, {"name": "sparse_indices"}, {"name": "sparse_values"}],
    )
    assert question.method is ENCODE
    assert list(question.message.representations) == [pb.REPRESENTATION_SPARSE]  # type: ignore[attr-defined]
    found = outputs(question.convert(pb.EncodeResponse(sparse=sparse({3: 0.5, 7: 1.5}, {1: 2}))))
    assert found == {
        "sparse_offsets": ("INT64", [3], [0, 2, 3]),
        "sparse_indices": ("UINT32", [3], [3, 7, 1]),
        "sparse_values": ("FP32", [3], [0.5, 1.5, 2.0]),
    }


def test_vectors_of_tokens() -> None:
    rows = vectors(2), vectors(3)
    found = outputs(
        embed(tensor("text", "a", "b")).convert(pb.EncodeResponse(multi_vector=ragged(*rows)))
    )
    assert found["multi_vector"][:2] == ("FP32", [5, WIDTH])
    assert np.array_equal(
        np.array(found["multi_vector"][2], np.float32), np.concatenate(rows).reshape(-1)
    )
    assert found["multi_vector_offsets"] == ("INT64", [3], [0, 2, 5])


def test_scores() -> None:
    question = ask(
        tensor("query", "q"), tensor("documents", "a", "b"), parameters={"scale": "probability"}
    )
    assert question.method is SCORE
    message: Any = question.message
    assert (message.query.text, message.scale) == ("q", pb.SCORE_SCALE_PROBABILITY)
    assert outputs(question.convert(scores(0.5, 0.25))) == {"scores": ("FP32", [2], [0.5, 0.25])}
    assert question.renamed("documents[1].text") == "documents[1]"


def test_labels_entities_and_relations() -> None:
    kind = models_pb2.GetModelResponse(model=card(tasks=[models_pb2.TASK_CLASSIFY]))
    question = following(ask(tensor("text", "a", "b"), parameters={"multi_label": True}), kind)
    message: Any = question.message
    assert question.method is EXTRACT
    assert message.classify.multi_label
    one, two = pb.LabelScore(label="x", score=0.5), pb.LabelScore(label="y", score=0.25)
    reply = pb.ExtractResponse(
        results=[pb.Extraction(labels=[one, two]), pb.Extraction(labels=[two])]
    )
    assert outputs(question.convert(reply)) == {
        "labels": ("BYTES", [2, 2], ["x", "y", "y", ""]),
        "scores": ("FP32", [2, 2], [0.5, 0.25, 0.25, 0.0]),
    }
    question = ask(tensor("text", "a"), tensor("labels", "ship"), outputs=[{"name": "entities"}])
    entity = pb.Entity(text="a", label="ship", score=0.5, start=0, end=1)
    kind_of, shape, data = outputs(
        question.convert(pb.ExtractResponse(results=[pb.Extraction(entities=[entity])]))
    )["entities"]
    assert (kind_of, shape) == ("BYTES", [1])
    assert json.loads(data[0]) == [
        {"text": "a", "label": "ship", "score": 0.5, "start": 0, "end": 1}
    ]
    inputs = tensor("text", "a"), tensor("labels", "by"), tensor("entity_labels", "ship")
    question = ask(*inputs, outputs=[{"name": "relations"}])
    assert list(question.message.relations.entity_labels) == ["ship"]  # type: ignore[attr-defined]
    relation = pb.Relation(head=entity, tail=entity, label="by", score=0.25)
    found = outputs(
        question.convert(pb.ExtractResponse(results=[pb.Extraction(relations=[relation])]))
    )
    assert json.loads(found["relations"][2][0])[0]["label"] == "by"
    assert question.renamed("relations.labels") == "labels"


def test_unknown_model_is_called_for_vectors() -> None:
    question = ask(tensor("text", "a"))
    unknown = question.fallback(HttpError("MODEL_NOT_FOUND", "no"))
    assert unknown is not None
    assert unknown.method is ENCODE
    assert question.fallback(HttpError("INTERNAL", "no")) is None
    ranker = models_pb2.GetModelResponse(model=card(tasks=[models_pb2.TASK_SCORE]))
    with pytest.raises(HttpError, match="query and documents"):
        question.convert(ranker)


def test_binary_tensors() -> None:
    rows = vectors(2)
    raw = packed("a", "Ü🐟")
    spec = {
        "name": "text",
        "shape": [2],
        "datatype": "BYTES",
        "parameters": {"binary_data_size": len(raw)},
    }
    question = following(
        asked({"inputs": [spec], "parameters": {"binary_data_output": True}}, raw),
        models_pb2.GetModelResponse(model=card()),
    )
    assert [item.text for item in question.message.items] == ["a", "Ü🐟"]  # type: ignore[attr-defined]
    answer = question.convert(pb.EncodeResponse(dense=dense(rows)))
    assert isinstance(answer, Answer)
    assert isinstance(answer.body, bytes)
    length = int(dict(answer.headers)[kserve.JSON_LENGTH])
    head = json.loads(answer.body[:length])
    assert head["outputs"] == [
        {
            "name": "dense",
            "shape": [2, WIDTH],
            "datatype": "FP32",
            "parameters": {"binary_data_size": rows.nbytes},
        }
    ]
    assert answer.body[length:] == rows.tobytes()


def test_binary_output_texts_follow_their_lengths() -> None:
    question = ask(
        tensor("text", "a"),
        outputs=[{"name": "labels", "parameters": {"binary_data": True}}, {"name": "scores"}],
    )
    reply = pb.ExtractResponse(
        results=[pb.Extraction(labels=[pb.LabelScore(label="Ü", score=0.5)])]
    )
    answer = question.convert(reply)
    assert isinstance(answer, Answer)
    assert isinstance(answer.body, bytes)
    length = int(dict(answer.headers)[kserve.JSON_LENGTH])
    assert answer.body[length:] == packed("Ü")
    assert json.loads(answer.body[:length])["outputs"][1]["data"] == [0.5]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [tensor("a", "x"), tensor("b", "y")]}, "inputs"),
        ({"inputs": [tensor("a", "x"), tensor("a", "y")]}, "inputs[1].name"),
        ({"inputs": [tensor("text", "x", datatype="FP32")]}, "inputs[0].datatype"),
        ({"inputs": [tensor("text", "x", shape=[2])]}, "inputs[0].shape"),
        ({"inputs": [tensor("text", "x", shape=[-1, -1])]}, "inputs[0].shape"),
        ({"inputs": [tensor("text", "x", shape=[1 << 40] * 8)]}, "inputs[0].shape"),
        ({"inputs": [tensor("text", "x", shape=[1] * 9)]}, "inputs[0].shape"),
        ({"inputs": [tensor("text", 1)]}, "inputs[0].data"),
        ({"inputs": [tensor("text", None)]}, "inputs[0].data"),
        ({"inputs": [tensor("text", "x", data=None)]}, "inputs[0].data"),
        (
            {"inputs": [tensor("text", "x", parameters={"binary_data_size": 5})]},
            "inputs[0].parameters.binary_data_size",
        ),
        (
            {"inputs": [tensor("text", "x", parameters={"binary_data_size": -1})]},
            "inputs[0].parameters.binary_data_size",
        ),
        ({"inputs": [tensor("query", "q", "r"), tensor("documents", "d")]}, "query"),
        (
            {
                "inputs": [tensor("query", "q"), tensor("documents", "d")],
                "parameters": {"scale": "x"},
            },
            "parameters.scale",
        ),
        (
            {
                "inputs": [tensor("text", "q")],
                "outputs": [{"name": "dense", "parameters": {"classification": 2}}],
            },
            "outputs[0].parameters.classification",
        ),
    ],
)
def test_invalid_request_is_refused_with_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(HttpError) as caught:
        asked(body)
    assert (caught.value.status, caught.value.field) == (400, field)


def test_unknown_output_is_refused() -> None:
    question = ask(tensor("text", "a"), outputs=[{"name": "dense"}, {"name": "other"}])
    with pytest.raises(HttpError) as caught:
        question.convert(pb.EncodeResponse(dense=dense(vectors(1))))
    assert (caught.value.status, caught.value.field) == (400, "outputs[1].name")


@pytest.mark.parametrize(
    ("raw", "length"),
    [
        (packed("a")[:-1], ""),
        (b"\xff\xff\xff\xff", ""),
        (b"\x01\0\0\0\xff", ""),
        (b"x", "-1"),
        (b"x", "9" * 20),
    ],
)
def test_invalid_binary_tensors_are_refused(raw: bytes, length: str) -> None:
    spec = {
        "name": "text",
        "shape": [1],
        "datatype": "BYTES",
        "parameters": {"binary_data_size": len(raw)},
    }
    content = json.dumps({"inputs": [spec]}).encode()
    with pytest.raises(HttpError) as caught:
        kserve.infer(Received(content + raw, NAMES, MODEL, json_length=length or str(len(content))))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("kind", "inputs", "outs"),
    [
        ({}, ["text"], ["dense"]),
        (
            {"representations": [pb.REPRESENTATION_SPARSE, pb.REPRESENTATION_MULTI_VECTOR]},
            ["text"],
            [
                "sparse_indices",
                "sparse_values",
                "sparse_offsets",
                "multi_vector",
                "multi_vector_offsets",
            ],
        ),
        ({"tasks": [models_pb2.TASK_SCORE]}, ["query", "documents"], ["scores"]),
        (
            {"tasks": [models_pb2.TASK_CLASSIFY], "labels": ["a", "b"]},
            ["text"],
            ["labels", "scores"],
        ),
        ({"tasks": [models_pb2.TASK_ENTITIES]}, ["text", "labels"], ["entities"]),
        (
            {"tasks": [models_pb2.TASK_RELATIONS]},
            ["text", "labels", "entity_labels"],
            ["relations"],
        ),
    ],
)
async def test_descriptions(kind: dict[str, Any], inputs: list[str], outs: list[str]) -> None:
    async with edge(Script(models=[card(**kind)])) as http:
        found = (await http.get(f"/v2/models/{MODEL}")).json
        assert (found["name"], found["versions"]) == (MODEL, ["1"])
        assert [[one["name"] for one in found[side]] for side in ("inputs", "outputs")] == [
            inputs,
            outs,
        ]
        msgspec.convert(found, kserve.ModelOut)


async def test_over_http() -> None:
    failed = models_pb2.Model(model="org/failed", state=models_pb2.MODEL_STATE_FAILED)
    script = Script(models=[card(), failed])
    async with edge(script) as http:
        assert (await http.get("/v2")).json["extensions"] == ["binary_tensor_data"]
        assert (await http.get("/v2/health/live")).json == {"live": True}
        reply = await http.get("/v2/health/ready")
        assert (reply.status, reply.json) == (200, {"ready": True})
        assert (await http.get("/v2/models/org%2Fmodel/ready")).json == {
            "name": MODEL,
            "ready": True,
        }
        assert (await http.get("/v2/models/org/model/versions/1/ready")).json == {
            "name": MODEL,
            "ready": True,
        }
        assert (await http.get("/v2/models/org/failed/ready")).status == 503
        assert (await http.get("/v2/models/org/none/ready")).status == 404
        reply = await http.post(f"/v2/models/{MODEL}/infer", {"inputs": [tensor("text", "a")]})
        assert (reply.status, reply.json["outputs"][0]["shape"]) == (200, [1, WIDTH])
        raw = packed("a")
        head = json.dumps(
            {
                "inputs": [
                    {
                        "name": "text",
                        "shape": [1],
                        "datatype": "BYTES",
                        "parameters": {"binary_data_size": len(raw)},
                    }
                ]
            }
        ).encode()
        reply = await http.post(
            f"/v2/models/{MODEL}/infer", head + raw, inference_header_content_length=str(len(head))
        )
        assert reply.status == 200
        reply = await http.post("/v2/models/gpt-4o/infer", {"inputs": [tensor("text", "a")]})
        assert reply.status == 404
        assert "does not exist" in reply.json["error"]
        reply = await http.post(f"/v2/models/{MODEL}/infer", b"\xff")
        assert (reply.status, list(reply.json)) == (400, ["error"])
