"""Cohere's `POST /v2/embed`, `/v1/embed`, `/v1/classify` and `/v1/check-api-key`. Pure. Reranking
is in rerank.py.

`response_type` distinguishes the two forms of v1's answer. Classification is by examples: for an
embedding model a text is compared with the mean of each label's examples; a classifier receives
only the labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from shoal.transport.methods import ENCODE, EXTRACT, GET_MODEL, LIST_MODELS
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, tensor_pb2

from services.edge.messages.base import (
    Answer,
    Dialect,
    Fields,
    HttpError,
    MeshCall,
    Received,
    Route,
    encode_json,
    invalid,
    item_fields,
    retry_headers,
    single_field,
)
from services.edge.messages.limits import ITEMS, PARTS
from services.edge.messages.names import AliasTarget
from services.edge.messages.numbers import (
    PIECE_NUMBERS,
    Rows,
    dense_rows,
    listed,
    quantised,
    signed,
)
from services.edge.messages.reading import (
    image_item,
    named_or_default,
    read,
    read_count,
    read_priority,
    read_role,
    read_truncation,
    text_item,
)

SOFTMAX_SCALE: Final = 20.0
"""The factor of cosines before their softmax: the scale at which sentence-transformers trains
embedding models.
"""
_TEXTS_PER_PIECE: Final = 256
_MIN_PROBABILITY: Final = 0.5
"""Minimum probability of the predicted labels in multi-label classification."""


def error(problem: HttpError) -> Answer:
    """Return `{"message": text}`; Cohere's clients derive the exception from the status."""
    return Answer(
        encode_json({"message": problem.message}), problem.status, headers=retry_headers(problem)
    )


COHERE: Final = Dialect("cohere", error)


class CohereImageUrl(msgspec.Struct, kw_only=True):
    """A `data:` URI."""

    url: str


class CohereContent(msgspec.Struct, kw_only=True):
    """`type`: text or image_url."""

    type: str
    text: str | None = None
    image_url: CohereImageUrl | None = None


class CohereInput(msgspec.Struct, kw_only=True):
    """One input with exactly one content."""

    content: Annotated[list[CohereContent], PARTS]


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """A request of v1 or v2. Exactly one of `texts`, `images` and `inputs` is required."""

    model: str | None = None
    texts: Annotated[list[str], ITEMS] | None = None
    images: Annotated[list[str], ITEMS] | None = None
    inputs: Annotated[list[CohereInput], ITEMS] | None = None
    input_type: str | None = None
    embedding_types: list[str] | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None
    truncate: str | None = None
    # Shoal's.
    instruction: str | None = None
    adapter: str | None = None
    pool: str | None = None
    priority: str | int | None = None


class CohereEmbedAnswer(msgspec.Struct, kw_only=True):
    """The answer. `embeddings` is keyed by type; in v1 without `embedding_types` it is the list of
    vectors.
    """

    id: str
    embeddings: dict[str, list[list[float] | str]] | list[list[float]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_by_type", "embeddings_floats"]


class CohereExample(msgspec.Struct, kw_only=True):
    """A text that the label fits."""

    text: str
    label: str


class CohereClassifyRequest(msgspec.Struct, kw_only=True):
    """A request to classify. Without `examples` the model's labels are used."""

    inputs: Annotated[list[str], ITEMS]
    examples: Annotated[list[CohereExample], ITEMS] | None = None
    model: str | None = None
    preset: str | None = None
    truncate: str | None = None
    # Shoal's.
    adapter: str | None = None
    pool: str | None = None
    priority: str | int | None = None


class CohereClassified(msgspec.Struct, kw_only=True):
    """One classified text.

    Attributes:
        predictions: The best label; all labels from 0.5 on for multi-label models.
        prediction: The best label of a single-label model.
        confidence: Its probability.
    """

    id: str
    input: str
    predictions: list[str]
    confidences: list[float]
    labels: dict[str, dict[str, float]]
    classification_type: Literal["single-label", "multi-label"]
    prediction: str | None = None
    confidence: float | None = None


class CohereClassifyAnswer(msgspec.Struct, kw_only=True):
    """The answer. `classifications` has the order of `inputs`."""

    id: str
    classifications: list[CohereClassified]
    meta: dict[str, Any]


class CohereKeyAnswer(msgspec.Struct, kw_only=True):
    """The answer for a valid credential; an invalid one gets an error."""

    valid: bool


_STORED: Final = {
    "float": tensor_pb2.DATA_TYPE_UNSPECIFIED,
    "base64": tensor_pb2.DATA_TYPE_UNSPECIFIED,
    "int8": tensor_pb2.DATA_TYPE_INT8,
    "ubinary": tensor_pb2.DATA_TYPE_BINARY,
    "binary": tensor_pb2.DATA_TYPE_BINARY,
}


def embed_v2(received: Received) -> MeshCall:
    """`POST /v2/embed`. Raises HttpError."""
    return _embed(received, "2")


def embed_v1(received: Received) -> MeshCall:
    """`POST /v1/embed`. Raises HttpError."""
    return _embed(received, "1")


def _embed(received: Received, version: str) -> MeshCall:
    request = read(CohereEmbedRequest, received)
    if request.max_tokens is not None:
        raise invalid(
            "max_tokens is not supported: texts are truncated at the model's limit", "max_tokens"
        )
    named = named_or_default(received, request.model, "embed")
    kinds = _kinds(request.embedding_types)
    items, fields = _items(request)
    stored = {_STORED[kind] for kind in kinds}
    message = pb.EncodeRequest(
        model=named.model,
        items=items,
        representations=[pb.REPRESENTATION_DENSE],
        role=read_role(named, input_type=request.input_type),
        # Several types are derived from float32 here.
        data_type=stored.pop() if len(stored) == 1 else tensor_pb2.DATA_TYPE_UNSPECIFIED,
        dimensions=read_count(request.output_dimension, "output_dimension") or named.dimensions,
        truncation=read_truncation(request.truncate, "truncate"),
        instruction=request.instruction or "",
        adapter=request.adapter or named.adapter,
        pool=request.pool or "",
        priority=read_priority(request.priority),
    )
    is_plain = version == "1" and not request.embedding_types

    def convert(reply: pb.EncodeResponse) -> Answer:
        rows = dense_rows(reply.dense)
        head = b'{"id":' + encode_json(received.request_id) + b',"embeddings":'
        tail = b'],"meta":' + encode_json(_meta(version, reply.usage)) + b"}"
        form = b"embeddings_floats" if is_plain else b"embeddings_by_type"

        def pieces() -> Iterator[bytes]:
            yield head
            if is_plain:
                yield from listed(rows)
            else:
                for number, kind in enumerate(kinds):
                    yield b'%s"%s":' % (b"," if number else b"{", kind.encode())
                    yield from listed(_convert_rows(rows, kind), is_base64=kind == "base64")
                yield b"}"
            yield b',"response_type":"' + form + b'","texts":['
            texts = request.texts or []
            for first in range(0, len(texts), _TEXTS_PER_PIECE):
                yield (b"," if first else b"") + encode_json(
                    texts[first : first + _TEXTS_PER_PIECE]
                )[1:-1]
            yield tail

        return Answer(b"".join(pieces()) if rows.size <= PIECE_NUMBERS else pieces())

    renamed = {**fields, "dimensions": "output_dimension", "representations[]": "model"}
    return MeshCall(ENCODE, message, convert, fields=renamed)


def _kinds(requested: list[str] | None) -> list[str]:
    """Return the requested types without duplicates."""
    for index, kind in enumerate(requested or ()):
        field = f"embedding_types[{index}]"
        if kind == "uint8":
            raise invalid(
                (
                    f"{field}: uint8 needs an offset per vector, which this format cannot carry: "
                    "use int8 or float"
                ),
                field,
            )
        if kind not in _STORED:
            raise invalid(f"{field} is {kind!r}; it must be one of {', '.join(_STORED)}", field)
    return list(dict.fromkeys(requested or ("float",)))


def _convert_rows(rows: Rows, kind: str) -> Rows:
    """Convert rows of the mesh's reply to the requested type."""
    if rows.dtype == np.float32:
        return quantised(rows, kind)
    return signed(rows) if kind == "binary" else rows


def _items(request: CohereEmbedRequest) -> tuple[list[pb.Item], Fields]:
    given = [name for name in ("texts", "images", "inputs") if getattr(request, name) is not None]
    if len(given) != 1:
        raise invalid(
            "exactly one of texts, images and inputs is required", given[1] if given else "texts"
        )
    if request.texts is not None:
        return [
            text_item(text, f"texts[{index}]") for index, text in enumerate(request.texts)
        ], item_fields("items", "texts")
    if request.images is not None:
        return [
            image_item(uri, f"images[{index}]") for index, uri in enumerate(request.images)
        ], item_fields("items", "images")
    items = [
        _item(one, f"inputs[{index}].content") for index, one in enumerate(request.inputs or ())
    ]
    return items, item_fields("items", "inputs", ".content")


def _item(given: CohereInput, field: str) -> pb.Item:
    if len(given.content) != 1:
        raise invalid(
            f"{field} must have one entry: a vector is of one text or of one image", field
        )
    (one,) = given.content
    if one.type == "text" and one.text is not None:
        return text_item(one.text, f"{field}[0].text")
    if one.type == "image_url" and one.image_url is not None:
        return image_item(one.image_url.url, f"{field}[0].image_url.url")
    raise invalid(
        f"{field}[0] must have type text with text, or type image_url with image_url", f"{field}[0]"
    )


def _meta(version: str, usage: pb.Usage) -> dict[str, Any]:
    tokens = usage.input_tokens
    return {
        "api_version": {"version": version},
        "billed_units": {"input_tokens": tokens},
        "tokens": {"input_tokens": tokens},
    }


def classify(received: Received) -> MeshCall:
    """`POST /v1/classify`. With examples it requests the model's card first. Raises HttpError."""
    request = read(CohereClassifyRequest, received)
    if request.preset is not None:
        raise invalid("preset is not supported: send model and examples", "preset")
    named = named_or_default(received, request.model, "predict")
    plan = _Classification(request, received, named)
    plan.texts()
    if request.examples is None:
        return plan.by_labels()
    if not request.examples:
        raise invalid("examples is empty", "examples")

    def convert(reply: models_pb2.GetModelResponse) -> MeshCall:
        return (
            plan.by_examples()
            if pb.REPRESENTATION_DENSE in reply.model.card.representations
            else plan.by_labels()
        )

    def fallback(problem: HttpError) -> MeshCall | None:
        """Call an unknown model anyway, which makes a worker load it."""
        return plan.by_examples() if problem.reason == "MODEL_NOT_FOUND" else None

    card = models_pb2.GetModelRequest(model=named.model)
    return MeshCall(GET_MODEL, card, convert, fallback=fallback, dialect=COHERE)


class _Classification:
    """The ways to answer one request."""

    def __init__(
        self, request: CohereClassifyRequest, received: Received, named: AliasTarget
    ) -> None:
        self.request = request
        self.request_id = received.request_id
        self.named = named
        self.truncation = read_truncation(request.truncate, "truncate")
        self.priority = read_priority(request.priority)
        self.labels = list(dict.fromkeys(example.label for example in request.examples or ()))

    def texts(self) -> list[pb.Item]:
        return [
            text_item(text, f"inputs[{index}]") for index, text in enumerate(self.request.inputs)
        ]

    def by_examples(self) -> MeshCall:
        """Classify by vectors; encode the examples first."""
        examples = self.request.examples or []
        items = [
            text_item(example.text, f"examples[{index}].text")
            for index, example in enumerate(examples)
        ]

        def convert(reply: pb.EncodeResponse) -> MeshCall:
            rows = dense_rows(reply.dense)
            own = np.array([self.labels.index(example.label) for example in examples])
            means = np.stack(
                [rows[own == number].mean(axis=0) for number in range(len(self.labels))]
            )
            return self._compare_with_means(_unit(means), reply)

        def fallback(problem: HttpError) -> MeshCall | None:
            return self.by_labels() if problem.reason == "TASK_NOT_SUPPORTED" else None

        fields = item_fields("items", "examples", ".text")
        return MeshCall(
            ENCODE, self._encode(items), convert, fields=fields, fallback=fallback, dialect=COHERE
        )

    def _compare_with_means(self, means: Rows, examples: pb.EncodeResponse) -> MeshCall:
        """Encode the inputs by the model of the examples, even if an alias was moved since."""
        tokens = examples.usage.input_tokens
        message = self._encode(self.texts())
        message.model = examples.alias.model or message.model
        message.expect_embedding_id = examples.embedding_id

        def convert(reply: pb.EncodeResponse) -> Answer:
            if examples.HasField("alias"):
                reply.alias.CopyFrom(examples.alias)  # For the header x-shoal-model.
            shares = np.exp(SOFTMAX_SCALE * (dense_rows(reply.dense) @ means.T - 1))
            shares /= shares.sum(axis=1, keepdims=True)
            found = [dict(zip(self.labels, row, strict=True)) for row in shares.tolist()]
            return self._to_answer(found, tokens + reply.usage.input_tokens)

        return MeshCall(
            ENCODE,
            message,
            convert,
            fields=item_fields("items", "inputs"),
            dialect=COHERE,
        )

    def _encode(self, items: list[pb.Item]) -> pb.EncodeRequest:
        return pb.EncodeRequest(
            model=self.named.model,
            items=items,
            representations=[pb.REPRESENTATION_DENSE],
            truncation=self.truncation,
            normalize=True,
            adapter=self.request.adapter or self.named.adapter,
            pool=self.request.pool or "",
            priority=self.priority,
        )

    def by_labels(self) -> MeshCall:
        """Classify with a classifier: among the examples' labels, or its own labels if its
        configuration has them.
        """
        task = pb.ClassifyTask(labels=self.labels, among_labels=True)
        if self.labels:
            task.multi_label = False  # each example has one label
        message = pb.ExtractRequest(
            model=self.named.model,
            items=self.texts(),
            classify=task,
            truncation=self.truncation,
            adapter=self.request.adapter or self.named.adapter,
            pool=self.request.pool or "",
            priority=self.priority,
        )

        def convert(reply: pb.ExtractResponse) -> Answer:
            found = [{one.label: one.score for one in result.labels} for result in reply.results]
            return self._to_answer(found, reply.usage.input_tokens)

        fields = {**item_fields("items", "inputs"), **single_field("classify.labels", "examples")}
        return MeshCall(EXTRACT, message, convert, fields=fields, dialect=COHERE)

    def _to_answer(self, found: list[dict[str, float]], tokens: int) -> Answer:
        # Probabilities of exclusive labels sum to 1, those of independent labels do not. The reply
        # has no other indication.
        is_single = bool(self.labels) or all(abs(sum(one.values()) - 1) < 1e-3 for one in found)
        entries = [
            _entry(f"{self.request_id}-{index}", text, confidences, is_single=is_single)
            for index, (text, confidences) in enumerate(
                zip(self.request.inputs, found, strict=True)
            )
        ]
        meta = _meta("1", pb.Usage(input_tokens=tokens))
        return Answer(
            encode_json({"id": self.request_id, "classifications": entries, "meta": meta})
        )


def _entry(
    identity: str, text: str, confidences: dict[str, float], *, is_single: bool
) -> dict[str, Any]:
    ranked = sorted(confidences, key=lambda label: -confidences[label])
    chosen = (
        ranked[:1]
        if is_single
        else [label for label in ranked if confidences[label] >= _MIN_PROBABILITY]
    )
    entry: dict[str, Any] = {
        "id": identity,
        "input": text,
        "predictions": chosen,
        "confidences": [confidences[label] for label in chosen],
        "labels": {label: {"confidence": confidence} for label, confidence in confidences.items()},
        "classification_type": "single-label" if is_single else "multi-label",
    }
    if is_single and chosen:
        entry |= {"prediction": chosen[0], "confidence": confidences[chosen[0]]}
    return entry


def _unit(rows: Rows) -> Rows:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: Rows = rows / np.where(lengths > 0, lengths, 1)
    return scaled


def check_api_key(received: Received) -> MeshCall:
    """`POST /v1/check-api-key`: check whether a router accepts the credential."""
    return MeshCall(
        LIST_MODELS,
        models_pb2.ListModelsRequest(),
        lambda reply: Answer(encode_json({"valid": True})),
    )


ROUTES: Final = (
    Route(
        "POST",
        "/v2/embed",
        COHERE,
        embed_v2,
        "Turns texts into vectors",
        CohereEmbedRequest,
        CohereEmbedAnswer,
    ),
    Route(
        "POST",
        "/v1/embed",
        COHERE,
        embed_v1,
        "Turns texts into vectors",
        CohereEmbedRequest,
        CohereEmbedAnswer,
    ),
    # /v1/classify is shared with Jina (jina.py).
    Route(
        "POST",
        "/v1/check-api-key",
        COHERE,
        check_api_key,
        "Checks whether the credential is valid",
        answer=CohereKeyAnswer,
    ),
)
