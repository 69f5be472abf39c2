"""Hugging Face's pipelines, from bytes to calls and from replies to bytes, without sockets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from shoal.transport.methods import ENCODE, EXTRACT, GET_MODEL
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from services.edge.dialects import huggingface
from services.edge.dialects.tei import TEI
from services.edge.messages.base import Answer, HttpError, MeshCall, Received
from services.edge.messages.names import AliasNames
from services.edge.routes import RouteTable
from tests.edge.parts import MODEL, card

ZERO_SHOT = {"candidate_labels": ["fish", "wood"], "multi_label": False}


def ask(what: Callable[[Received], MeshCall], inputs: Any = "a", **parameters: Any) -> MeshCall:
    body = {"inputs": inputs, "parameters": parameters}
    return what(Received(json.dumps(body).encode(), AliasNames({}), MODEL))


def content_of(answer: Answer | MeshCall) -> Any:
    assert isinstance(answer, Answer)
    assert isinstance(answer.body, bytes)
    return json.loads(answer.body)


def classes(texts: int) -> pb.ExtractResponse:
    labels = [pb.LabelScore(label="fish", score=0.75), pb.LabelScore(label="wood", score=0.25)]
    return pb.ExtractResponse(results=[pb.Extraction(labels=labels)] * texts)


def entities(texts: int) -> pb.ExtractResponse:
    found = [
        pb.Entity(start=0, end=3, label="PER", score=0.75, text="Ann"),
        pb.Entity(start=8, end=12, label="LOC", score=0.5, text="Oslo"),
    ]
    return pb.ExtractResponse(results=[pb.Extraction(entities=found)] * texts)


def test_text_classification_is_a_list_of_lists() -> None:
    question = ask(huggingface.text_classification)
    message: Any = question.message
    assert (
        question.method,
        message.WhichOneof("task"),
        message.classify.HasField("multi_label"),
    ) == (EXTRACT, "classify", False)
    pair = [{"label": "fish", "score": 0.75}, {"label": "wood", "score": 0.25}]
    assert content_of(question.convert(classes(1))) == [pair]
    assert content_of(ask(huggingface.text_classification, ["a", "b"]).convert(classes(2))) == [
        pair,
        pair,
    ]
    assert content_of(ask(huggingface.text_classification, top_k=1).convert(classes(1))) == [
        pair[:1]
    ]
    for function, several in (("sigmoid", True), ("softmax", False)):
        message = ask(huggingface.text_classification, function_to_apply=function).message
        assert message.classify.multi_label is several


def test_zero_shot() -> None:
    question = ask(huggingface.zero_shot, **ZERO_SHOT, hypothesis_template="About {}.")
    task = pb.ClassifyTask(
        labels=["fish", "wood"], multi_label=False, hypothesis="About {}.", among_labels=True
    )
    assert question.message.classify == task  # type: ignore[attr-defined]
    assert content_of(question.convert(classes(1))) == [
        {"label": "fish", "score": 0.75},
        {"label": "wood", "score": 0.25},
    ]
    batch = ask(huggingface.zero_shot, ["a", "b"], candidate_labels="fish, wood,", multi_label=True)
    assert (list(batch.message.classify.labels), batch.message.classify.multi_label) == (  # type: ignore[attr-defined]
        ["fish", "wood"],
        True,
    )
    found = content_of(batch.convert(classes(2)))
    assert found[1] == {"sequence": "b", "labels": ["fish", "wood"], "scores": [0.75, 0.25]}
    msgspec.convert(found, list[huggingface.ZeroShotAnswer])
    assert (
        question.renamed("classify.labels[1] is empty") == "parameters.candidate_labels[1] is empty"
    )
    assert (
        question.renamed("classify.hypothesis must hold {}")
        == "parameters.hypothesis_template must hold {}"
    )
    assert question.renamed("items[0].text is empty") == "inputs is empty"
    assert batch.renamed("items[1].text is empty") == "inputs[1] is empty"


def test_token_classification() -> None:
    question = ask(huggingface.token_classification, ignore_labels=["LOC"])
    assert question.message.entities == pb.EntitiesTask(aggregation=pb.AGGREGATION_SIMPLE)  # type: ignore[attr-defined]
    found = content_of(question.convert(entities(1)))
    assert found == [{"entity_group": "PER", "score": 0.75, "word": "Ann", "start": 0, "end": 3}]
    msgspec.convert(found, list[huggingface.Token])
    alone = ask(
        huggingface.token_classification, ["a", "b"], aggregation_strategy="none", labels=["PER"]
    )
    task = pb.EntitiesTask(labels=["PER"], aggregation=pb.AGGREGATION_NONE)
    assert alone.message.entities == task  # type: ignore[attr-defined]
    rows = content_of(alone.convert(entities(2)))
    assert [[token["entity"] for token in row] for row in rows] == [["PER", "LOC"]] * 2
    assert alone.renamed("entities.labels is empty") == "parameters.labels is empty"


def chosen(question: MeshCall, **values: Any) -> Any:
    """Return the call that follows the model's card."""
    return question.convert(models_pb2.GetModelResponse(model=card(**values)))


def test_base_url_uses_the_body_and_then_the_models_task() -> None:
    assert ask(huggingface.by_task, **ZERO_SHOT).message.classify.labels == ["fish", "wood"]  # type: ignore[attr-defined]
    for name, value in (("aggregation_strategy", "max"), ("ignore_labels", [])):
        assert ask(huggingface.by_task, **{name: value}).message.HasField("entities")
    question = ask(huggingface.by_task, ["a", "b"])
    assert question.method == GET_MODEL
    assert chosen(question).method == ENCODE
    tagger = chosen(question, tasks=[models_pb2.TASK_ENTITIES], representations=[])
    assert tagger.message.HasField("entities")
    classifier = chosen(question, tasks=[models_pb2.TASK_CLASSIFY], representations=[])
    assert [item.text for item in classifier.message.items] == [
        "a",
        "b",
    ]  # with parameters these are two texts and not a pair


def test_one_text_without_parameters_is_flat_only_for_tei() -> None:
    classifier = {"tasks": [models_pb2.TASK_CLASSIFY], "representations": []}
    received = Received(b'{"inputs": "a"}', AliasNames({}), MODEL)
    flat = content_of(chosen(huggingface.by_task(received), **classifier).convert(classes(1)))
    assert content_of(chosen(huggingface.hosted(received), **classifier).convert(classes(1))) == [
        flat
    ]


def test_unknown_model_is_tried_with_each_task() -> None:
    found: Any = ask(huggingface.by_task).fallback(HttpError("MODEL_NOT_FOUND", ""))
    assert found.method == ENCODE
    assert found.fallback(HttpError("INVALID_INPUT", "")) is None
    found = found.fallback(HttpError("TASK_NOT_SUPPORTED", ""))
    assert found.message.HasField("classify")
    found = found.fallback(HttpError("TASK_NOT_SUPPORTED", ""))
    assert found.message.HasField("entities")
    assert found.fallback(HttpError("TASK_NOT_SUPPORTED", "")) is None
    assert ask(huggingface.by_task).fallback(HttpError("QUEUE_FULL", "")) is None


@pytest.mark.parametrize(
    "name",
    [
        "text-classification",
        "zero-shot-classification",
        "token-classification",
        "feature-extraction",
    ],
)
def test_paths_of_the_hosted_inference(name: str) -> None:
    table = RouteTable()
    for path in (
        f"/models/org/m/pipeline/{name}",
        f"/pipeline/{name}/org/m",
        f"/tei/org/m/pipeline/{name}",
    ):
        route, model = table.find("POST", path)
        assert (model, route.dialect) == ("org/m", TEI)
        assert route.ask is not huggingface.by_task
    assert table.find("POST", "/models/org/m")[0].ask is huggingface.hosted
    assert table.find("POST", "/tei/org/m")[0].ask is huggingface.by_task
    assert table.find("GET", "/models/org/m/info")[1] == "org/m"


@pytest.mark.parametrize(
    ("what", "body", "field"),
    [
        (huggingface.text_classification, {}, "inputs"),
        (huggingface.text_classification, {"inputs": [["a"]]}, "inputs[0]"),
        (
            huggingface.text_classification,
            {"inputs": "a", "parameters": {"top_k": 0}},
            "parameters.top_k",
        ),
        (
            huggingface.text_classification,
            {"inputs": "a", "parameters": {"function_to_apply": "none"}},
            "parameters.function_to_apply",
        ),
        (huggingface.zero_shot, {"inputs": "a"}, "parameters"),
        (huggingface.zero_shot, {"inputs": "a", "parameters": {}}, "parameters.candidate_labels"),
        (
            huggingface.zero_shot,
            {"inputs": "a", "parameters": {"candidate_labels": " ,"}},
            "parameters.candidate_labels",
        ),
        (
            huggingface.zero_shot,
            {"inputs": "a", "parameters": {"candidate_labels": ["a", 3]}},
            "parameters.candidate_labels[1]",
        ),
        (
            huggingface.token_classification,
            {"inputs": "a", "parameters": {"stride": 8}},
            "parameters.stride",
        ),
        (
            huggingface.token_classification,
            {"inputs": "a", "parameters": {"aggregation_strategy": "most"}},
            "parameters.aggregation_strategy",
        ),
        (huggingface.by_task, {"inputs": "a", "parameters": 3}, "parameters"),
        (huggingface.by_task, {"inputs": {"text": "a"}}, "inputs.source_sentence"),
    ],
)
def test_unsupported_request_is_refused_with_its_field(
    what: Callable[[Received], MeshCall], body: Any, field: str
) -> None:
    with pytest.raises(HttpError) as caught:
        what(Received(json.dumps(body).encode(), AliasNames({}), MODEL))
    assert (caught.value.status, caught.value.field) == (400, field)
    assert TEI.error(caught.value).status in (400, 422)
