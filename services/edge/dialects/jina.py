"""Jina's `POST /v1/multi-vector` and `/v1/classify`. Pure. `/v1/embeddings` (openai.py) and
`/v1/rerank` (rerank.py) support Jina's fields too.

Cohere and Jina share `/v1/classify`: a body with `inputs` is Cohere's (cohere.py), one with `input`
Jina's.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from shoal.transport.methods import EXTRACT
from shoal.v1 import inference_pb2 as pb

from services.edge.dialects import cohere, openai
from services.edge.dialects.openai import OPENAI, EmbeddingsAnswer, EmbeddingsRequest, JinaInput
from services.edge.messages.base import (
    Answer,
    HttpError,
    MeshCall,
    Received,
    Route,
    encode_json,
    invalid,
    item_fields,
)
from services.edge.messages.limits import ITEMS, LABELS
from services.edge.messages.reading import (
    image_item,
    named_or_default,
    read,
    read_priority,
    text_item,
)


class JinaClassifyRequest(msgspec.Struct, kw_only=True):
    """`labels` are the labels to choose from; the model's if omitted. `classifier_id` is refused,
    because classifiers are not stored.
    """

    input: Annotated[list[str | JinaInput], ITEMS]
    model: str | None = None
    labels: Annotated[list[str], LABELS] | None = None
    classifier_id: str | None = None
    # Shoal's.
    adapter: str | None = None
    pool: str | None = None
    priority: str | int | None = None


class JinaPrediction(msgspec.Struct, kw_only=True):
    """`score` is 0…1, or the cosine to the label for embedding models."""

    label: str
    score: float


class JinaClassified(msgspec.Struct, kw_only=True):
    """`prediction` is the first of `predictions`, which are best first."""

    index: int
    prediction: str
    score: float
    predictions: list[JinaPrediction]
    object: Literal["classification"] = "classification"


class JinaClassifyAnswer(msgspec.Struct, kw_only=True):
    """The answer. `data` has the order of `input`."""

    data: list[JinaClassified]
    usage: dict[str, int]
    model: str
    object: Literal["list"] = "list"


def multi_vector(received: Received) -> MeshCall:
    """`POST /v1/multi-vector`: one vector per token. Raises HttpError."""
    request = read(EmbeddingsRequest, received)
    request.return_multivector = True
    return openai.make_call(request, received)


def classify(received: Received) -> MeshCall:
    """`POST /v1/classify` in Cohere's or Jina's form, by the body. Raises HttpError."""
    if not received.is_msgpack and _has_inputs(received.body):
        try:
            return cohere.classify(received)
        except HttpError as problem:
            problem.dialect = cohere.COHERE
            raise
    return _classify(received)


class _Peek(msgspec.Struct):
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _has_inputs(body: bytes) -> bool:
    if b'"inputs"' not in body:
        return False
    try:
        found = msgspec.json.decode(body, type=_Peek)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return found.inputs is not msgspec.UNSET and found.input is msgspec.UNSET


def _classify(received: Received) -> MeshCall:
    request = read(JinaClassifyRequest, received)
    if request.classifier_id is not None:
        raise invalid(
            "classifier_id is not supported because classifiers are not stored: send labels",
            "classifier_id",
        )
    named = named_or_default(received, request.model, "predict")
    message = pb.ExtractRequest(
        model=named.model,
        items=[_item(one, f"input[{index}]") for index, one in enumerate(request.input)],
        # The probabilities are normalised over the requested labels.
        classify=pb.ClassifyTask(labels=request.labels or (), among_labels=True),
        truncation=pb.TRUNCATION_END,
        adapter=request.adapter or named.adapter,
        pool=request.pool or "",
        priority=read_priority(request.priority),
    )
    name = request.model or "predict"

    def convert(reply: pb.ExtractResponse) -> Answer:
        tokens = reply.usage.input_tokens
        data = [_entry(index, result) for index, result in enumerate(reply.results)]
        usage = {"total_tokens": tokens, "prompt_tokens": tokens}
        return Answer(encode_json({"object": "list", "model": name, "data": data, "usage": usage}))

    fields = {**item_fields("items", "input"), "classify.labels": "labels"}
    return MeshCall(EXTRACT, message, convert, fields=fields)


def _item(given: str | JinaInput, field: str) -> pb.Item:
    if isinstance(given, str):
        return text_item(given, field)
    if (given.text is None) == (given.image is None):
        raise invalid(f"{field} must have either text or image", field)
    return (
        text_item(given.text, f"{field}.text")
        if given.text is not None
        else image_item(given.image or "", f"{field}.image")
    )


def _entry(index: int, result: pb.Extraction) -> dict[str, Any]:
    predictions = [{"label": one.label, "score": one.score} for one in result.labels]
    best = predictions[0] if predictions else {"label": "", "score": 0.0}
    return {
        "object": "classification",
        "index": index,
        "prediction": best["label"],
        "score": best["score"],
        "predictions": predictions,
    }


ROUTES: Final = (
    Route(
        "POST",
        "/v1/multi-vector",
        OPENAI,
        multi_vector,
        "Turns texts into token vectors",
        EmbeddingsRequest,
        EmbeddingsAnswer,
    ),
    Route(
        "POST",
        "/v1/classify",
        OPENAI,
        classify,
        "Classifies texts by labels",
        (JinaClassifyRequest, cohere.CohereClassifyRequest),
        (JinaClassifyAnswer, cohere.CohereClassifyAnswer),
    ),
)
