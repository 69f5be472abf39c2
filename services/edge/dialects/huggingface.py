"""Hugging Face's pipelines as huggingface_hub's and npm's InferenceClient call them: `POST` to a
base URL with a body that determines the task, and the hosted inference's paths `/models/{model}`
and `/models/{model}/pipeline/{task}`. Pure.

Bodies are `{inputs, parameters}`. A list of inputs is a batch, and its answer is a list of answers.
Errors have TEI's form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Final, cast

import msgspec
from shoal.requests.words import AGGREGATIONS
from shoal.tasks import Aggregation
from shoal.transport.methods import EXTRACT, GET_MODEL
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from services.edge.dialects import tei
from services.edge.dialects.tei import (
    TEI,
    Prediction,
    parse_truncation,
    path_target,
    timing_headers,
)
from services.edge.messages.base import (
    Answer,
    Fields,
    HttpError,
    MeshCall,
    Received,
    Route,
    encode_json,
    invalid,
    item_fields,
    single_field,
)
from services.edge.messages.limits import LABELS, MAX_LABELS, too_many
from services.edge.messages.reading import read, read_count, text_item

Texts = str | list[str]


class TextClassificationParameters(msgspec.Struct, kw_only=True):
    """`top_k` is the number of labels; all if omitted."""

    top_k: int | None = None
    function_to_apply: str | None = None
    truncation: bool | None = None


class TextClassificationRequest(msgspec.Struct, kw_only=True):
    """Classification with a classifier's labels."""

    inputs: Texts
    parameters: TextClassificationParameters | None = None


class ZeroShotParameters(msgspec.Struct, kw_only=True):
    """`candidate_labels` is a list, or names separated by commas. `hypothesis_template` has `{}` in
    place of the label.
    """

    candidate_labels: str | Annotated[list[str], LABELS]
    multi_label: bool | None = None
    hypothesis_template: str | None = None


class ZeroShotRequest(msgspec.Struct, kw_only=True):
    """Classification with the request's labels."""

    inputs: Texts
    parameters: ZeroShotParameters


class ZeroShotAnswer(msgspec.Struct, kw_only=True):
    """The answer for each text of a batch, best label first, like transformers' pipeline; a single
    text gets a list of labels with scores.
    """

    sequence: str
    labels: list[str]
    scores: list[float]


class TokenClassificationParameters(msgspec.Struct, kw_only=True):
    """`labels` (Shoal's) are the types that a zero-shot model finds."""

    aggregation_strategy: str | None = None
    ignore_labels: list[str] | None = None
    stride: int | None = None
    labels: Annotated[list[str], LABELS] | None = None


class TokenClassificationRequest(msgspec.Struct, kw_only=True):
    """Named entities in texts."""

    inputs: Texts
    parameters: TokenClassificationParameters | None = None


class Token(msgspec.Struct, kw_only=True):
    """An entity: characters `start` … `end` of the text. `entity` replaces `entity_group` if
    `aggregation_strategy` is none.
    """

    score: float
    word: str
    start: int
    end: int
    entity_group: str | msgspec.UnsetType = msgspec.UNSET
    entity: str | msgspec.UnsetType = msgspec.UNSET


def text_classification(received: Received) -> MeshCall:
    """Serve the text-classification pipeline. Raises HttpError."""
    request = read(TextClassificationRequest, received)
    parameters = request.parameters or TextClassificationParameters()
    most = read_count(parameters.top_k, "parameters.top_k") or None
    if parameters.function_to_apply not in (None, "sigmoid", "softmax"):
        raise invalid(
            "parameters.function_to_apply must be sigmoid or softmax, or be omitted",
            "parameters.function_to_apply",
        )
    message = _extract(received, request.inputs, "predict")
    message.truncation = parse_truncation(parameters.truncation, None)
    message.classify.SetInParent()
    if parameters.function_to_apply is not None:
        message.classify.multi_label = parameters.function_to_apply == "sigmoid"

    def convert(reply: pb.ExtractResponse) -> Answer:
        # A single text also gets a list of lists: huggingface_hub takes its first element.
        return _json_answer(
            [_scored(result.labels[:most]) for result in reply.results], reply, message
        )

    return MeshCall(EXTRACT, message, convert, fields=_field_names(request.inputs), dialect=TEI)


def zero_shot(received: Received) -> MeshCall:
    """Serve the zero-shot-classification pipeline. Raises HttpError."""
    request = read(ZeroShotRequest, received)
    given = request.parameters.candidate_labels
    if isinstance(given, str) and given.count(",") >= MAX_LABELS:
        raise too_many("parameters.candidate_labels", MAX_LABELS)
    labels = (
        [label.strip() for label in given.split(",") if label.strip()]
        if isinstance(given, str)
        else given
    )
    message = _extract(received, request.inputs, "predict")
    task = pb.ClassifyTask(
        labels=labels,
        multi_label=bool(request.parameters.multi_label),
        hypothesis=request.parameters.hypothesis_template or "",
        among_labels=True,
    )
    message.classify.CopyFrom(task)
    if not labels:
        raise invalid("parameters.candidate_labels is empty", "parameters.candidate_labels")

    def convert(reply: pb.ExtractResponse) -> Answer:
        if isinstance(request.inputs, str):
            return _json_answer(_scored(reply.results[0].labels), reply, message)
        content = [
            {
                "sequence": text,
                "labels": [one.label for one in result.labels],
                "scores": [one.score for one in result.labels],
            }
            for text, result in zip(request.inputs, reply.results, strict=True)
        ]
        return _json_answer(content, reply, message)

    fields = {
        **_field_names(request.inputs),
        "classify.labels": "parameters.candidate_labels",
        "classify.hypothesis": "parameters.hypothesis_template",
    }
    return MeshCall(EXTRACT, message, convert, fields=fields, dialect=TEI)


def token_classification(received: Received) -> MeshCall:
    """Serve the token-classification pipeline. Tokens outside of entities, label "O", are never in
    the answer. Raises HttpError.
    """
    request = read(TokenClassificationRequest, received)
    parameters = request.parameters or TokenClassificationParameters()
    if parameters.stride:
        raise invalid(
            "parameters.stride is not supported: send long texts in parts", "parameters.stride"
        )
    strategy = (parameters.aggregation_strategy or "simple").lower()
    if strategy not in AGGREGATIONS:
        raise invalid(
            f"parameters.aggregation_strategy must be one of {', '.join(AGGREGATIONS)}",
            "parameters.aggregation_strategy",
        )
    message = _extract(received, request.inputs, "predict")
    message.entities.CopyFrom(
        pb.EntitiesTask(
            labels=parameters.labels or (),
            aggregation=AGGREGATIONS[cast("Aggregation", strategy)],
        )
    )
    ignored = frozenset(parameters.ignore_labels or ())
    name = "entity" if strategy == "none" else "entity_group"

    def convert(reply: pb.ExtractResponse) -> Answer:
        found = [
            [
                {
                    name: one.label,
                    "score": one.score,
                    "word": one.text,
                    "start": one.start,
                    "end": one.end,
                }
                for one in result.entities
                if one.label not in ignored
            ]
            for result in reply.results
        ]
        return _json_answer(found[0] if isinstance(request.inputs, str) else found, reply, message)

    fields = {**_field_names(request.inputs), "entities.labels": "parameters.labels"}
    return MeshCall(EXTRACT, message, convert, fields=fields, dialect=TEI)


def hosted(received: Received) -> MeshCall:
    """`POST /models/{model}`: the pipeline follows from the body, or else from the model's task."""
    return _by_task(received, read(_Hosted, received), text_classification)


def by_task(received: Received) -> MeshCall:
    """`POST` to TEI's base URL. TEI's clients send no parameters, and for them two texts are a
    pair.
    """
    found = read(_Hosted, received)
    return _by_task(
        received, found, tei.predict if found.parameters is None else text_classification
    )


def _by_task(
    received: Received, found: _Hosted, classify: Callable[[Received], MeshCall]
) -> MeshCall:
    if found.query is not msgspec.UNSET:
        return tei.rerank(received)
    if bytes(found.inputs)[:1] == b"{":
        return tei.similarity(received)
    given = frozenset(found.parameters or ())
    if "candidate_labels" in given:
        return zero_shot(received)
    if given & {"aggregation_strategy", "ignore_labels", "stride"}:
        return token_classification(received)
    named = path_target(received, "embed")

    def convert(reply: models_pb2.GetModelResponse) -> MeshCall:
        card = reply.model.card
        if models_pb2.TASK_ENCODE in card.tasks:
            is_sparse = list(card.representations) == [pb.REPRESENTATION_SPARSE]
            return tei.embed_sparse(received) if is_sparse else tei.embed(received)
        if models_pb2.TASK_ENTITIES in card.tasks and models_pb2.TASK_CLASSIFY not in card.tasks:
            return token_classification(received)
        return classify(received)

    def fallback(problem: HttpError) -> MeshCall | None:
        """Call an unknown model anyway, which makes a worker load it."""
        return (
            _first_supported((tei.embed, classify, token_classification), received)
            if problem.reason == "MODEL_NOT_FOUND"
            else None
        )

    question = models_pb2.GetModelRequest(model=named.model)
    return MeshCall(GET_MODEL, question, convert, fallback=fallback, dialect=TEI)


class _Hosted(msgspec.Struct, kw_only=True):
    inputs: msgspec.Raw = msgspec.Raw(b"null")
    query: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, Any] | None = None


def _first_supported(
    asks: tuple[Callable[[Received], MeshCall], ...], received: Received
) -> MeshCall:
    """Return the first call, replaced by the next one if the model does not have its task."""
    question = asks[0](received)
    if len(asks) == 1:
        return question

    def fallback(problem: HttpError) -> MeshCall | None:
        return (
            _first_supported(asks[1:], received) if problem.reason == "TASK_NOT_SUPPORTED" else None
        )

    return replace(question, fallback=fallback)


def _extract(received: Received, given: Texts, default: str) -> pb.ExtractRequest:
    """Return the request without its task."""
    named = path_target(received, default)
    texts = [given] if isinstance(given, str) else given
    items = [text_item(text, f"inputs[{index}]") for index, text in enumerate(texts)]
    return pb.ExtractRequest(
        model=named.model, items=items, truncation=pb.TRUNCATION_END, adapter=named.adapter
    )


def _field_names(given: Texts) -> Fields:
    return (
        single_field("items", "inputs")
        if isinstance(given, str)
        else item_fields("items", "inputs")
    )


def _scored(labels: Any) -> list[dict[str, Any]]:
    return [{"label": one.label, "score": one.score} for one in labels]


def _json_answer(content: object, reply: pb.ExtractResponse, message: pb.ExtractRequest) -> Answer:
    return Answer(encode_json(content), headers=timing_headers(reply.timings, reply.usage, message))


_PIPELINES: Final[tuple[tuple[str, Callable[[Received], MeshCall], type, Any], ...]] = (
    ("feature-extraction", tei.embed, tei.EmbedRequest, list[list[float]]),
    ("sentence-similarity", tei.similarity, tei.SimilarityRequest, list[float]),
    ("text-classification", text_classification, TextClassificationRequest, list[list[Prediction]]),
    (
        "zero-shot-classification",
        zero_shot,
        ZeroShotRequest,
        (list[Prediction], list[ZeroShotAnswer]),
    ),
    (
        "token-classification",
        token_classification,
        TokenClassificationRequest,
        (list[Token], list[list[Token]]),
    ),
)

ROUTES: Final = (
    *(
        Route("POST", path, TEI, ask, "Runs the pipeline of the body or of the model's task")
        for path, ask in (("/tei/{model}", by_task), ("/models/{model}", hosted))
    ),
    *(
        Route(
            "POST",
            f"{start}/invocations",
            TEI,
            by_task,
            "Runs the model's task, for SageMaker clients",
        )
        for start in ("/tei/{model}", "")
    ),
    *(
        Route("POST", path, TEI, ask, f"Hugging Face's {name}", body, answer)
        for name, ask, body, answer in _PIPELINES
        for path in (
            f"/models/{{model}}/pipeline/{name}",
            f"/pipeline/{name}/{{model}}",
            f"/tei/{{model}}/pipeline/{name}",
        )
    ),
    Route("GET", "/models/{model}/info", TEI, tei.info, "Describes the model", answer=tei.Info),
    Route("GET", "/models/{model}/health", TEI, tei.health, "Reports that this process is alive"),
)
