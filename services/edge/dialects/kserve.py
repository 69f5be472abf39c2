"""KServe v2, the Open Inference Protocol over HTTP, with Triton's extension for binary tensors,
which its clients use by default. Pure.

Tensor names determine the task. Input `text` (or a single tensor of any name) returns `dense`,
`sparse_*` or `multi_vector*`, or `labels` and `scores`, `entities` or `relations`; inputs `query`
and `documents` return `scores`. Ragged outputs are two tensors: values and `_offsets`, with row i
in values offsets[i] … offsets[i + 1]. Shoal's options are in `parameters`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from shoal.requests import codec
from shoal.transport.methods import ENCODE, EXTRACT, GET_MODEL, SCORE
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2
from shoal.version import VERSION

from services.edge.messages.base import (
    Answer,
    Dialect,
    HttpError,
    MeshCall,
    Received,
    Route,
    encode_json,
    invalid,
    item_fields,
    retry_headers,
)
from services.edge.messages.limits import PARTS, check_items
from services.edge.messages.names import AliasTarget
from services.edge.messages.numbers import PIECE_NUMBERS, Rows, decoded, dense_rows
from services.edge.messages.reading import (
    read,
    read_count,
    read_priority,
    read_role,
    read_truncation,
    target,
    text_item,
)

NAME: Final = "shoal"
JSON_LENGTH: Final = b"inference-header-content-length"
OCTETS: Final = b"application/octet-stream"
_VERSIONS: Final = "/versions/"
_LATEST: Final = "1"


def error(problem: HttpError) -> Answer:
    """Return `{"error": text}`."""
    message = problem.message
    if problem.field and problem.field not in message:
        message = f"{problem.field}: {message}"
    return Answer(encode_json({"error": message}), problem.status, headers=retry_headers(problem))


KSERVE: Final = Dialect("kserve", error)


class InParameters(msgspec.Struct, kw_only=True):
    """Parameters of a request; others are ignored. `binary_data_output` is Triton's, the rest
    Shoal's.
    """

    binary_data_output: bool = False
    role: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    instruction: str | None = None
    truncation: bool | str | None = None
    scale: str | None = None
    threshold: float | None = None
    multi_label: bool | None = None
    adapter: str | None = None
    pool: str | None = None
    priority: str | int | None = None


class TensorParameters(msgspec.Struct, kw_only=True):
    """Triton's parameters of a tensor. `classification` is not supported.

    Attributes:
        binary_data_size: The size of this input after the JSON.
        binary_data: Whether this output follows the JSON as bytes.
    """

    binary_data_size: int | None = None
    binary_data: bool | None = None
    classification: int | None = None


class InTensor(msgspec.Struct, kw_only=True):
    """Texts: BYTES, flat or nested, in row-major order."""

    name: str
    shape: Annotated[list[int], PARTS]
    datatype: str
    data: list[Any] | None = None
    parameters: TensorParameters | None = None


class RequestedOutput(msgspec.Struct, kw_only=True):
    """A requested output tensor."""

    name: str
    parameters: TensorParameters | None = None


class InferIn(msgspec.Struct, kw_only=True):
    """`POST /v2/models/{model}/infer`."""

    inputs: Annotated[list[InTensor], PARTS]
    id: str | None = None
    parameters: InParameters | None = None
    outputs: Annotated[list[RequestedOutput], PARTS] | None = None


class OutTensor(msgspec.Struct, kw_only=True):
    """An output tensor. `data` is flat in row-major order, or absent if it follows the JSON as
    bytes.
    """

    name: str
    shape: list[int]
    datatype: str
    data: list[float | str] | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class InferOut(msgspec.Struct, kw_only=True):
    """The answer of infer."""

    model_name: str
    outputs: list[OutTensor]
    id: str | msgspec.UnsetType = msgspec.UNSET
    model_version: str | msgspec.UnsetType = msgspec.UNSET


class ServerOut(msgspec.Struct, kw_only=True):
    """`GET /v2`."""

    name: str
    version: str
    extensions: list[str]


class ModelOut(msgspec.Struct, kw_only=True):
    """`GET /v2/models/{model}`."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[OutTensor]
    outputs: list[OutTensor]


class ReadyOut(msgspec.Struct, kw_only=True):
    """`GET /v2/models/{model}/ready`."""

    name: str
    ready: bool


Texts = list[str]
Tensor = tuple[str, Rows | list[str], list[int]]
"""A name, the numbers (float32, uint32 or int64) or texts, and the shape."""
_TYPES: Final = {
    np.dtype(np.float32): "FP32",
    np.dtype(np.uint32): "UINT32",
    np.dtype(np.int64): "INT64",
}
_FORMS: Final = {
    "dense": pb.REPRESENTATION_DENSE,
    "sparse_indices": pb.REPRESENTATION_SPARSE,
    "sparse_values": pb.REPRESENTATION_SPARSE,
    "sparse_offsets": pb.REPRESENTATION_SPARSE,
    "multi_vector": pb.REPRESENTATION_MULTI_VECTOR,
    "multi_vector_offsets": pb.REPRESENTATION_MULTI_VECTOR,
}
_SCALES: Final = {
    None: pb.SCORE_SCALE_UNSPECIFIED,
    "logit": pb.SCORE_SCALE_LOGIT,
    "probability": pb.SCORE_SCALE_PROBABILITY,
}
_TASK_OF: Final = {
    "labels": models_pb2.TASK_CLASSIFY,
    "scores": models_pb2.TASK_CLASSIFY,
    "entities": models_pb2.TASK_ENTITIES,
    "relations": models_pb2.TASK_RELATIONS,
    **dict.fromkeys(_FORMS, models_pb2.TASK_ENCODE),
}
"""The task that produces each tensor."""


def server(received: Received) -> Answer:
    """`GET /v2`: describe the server."""
    return Answer(
        encode_json({"name": NAME, "version": VERSION, "extensions": ["binary_tensor_data"]})
    )


def described(received: Received) -> MeshCall:
    """`GET /v2/models/{model}`: describe the model's tensors."""
    name, named = _named(received)

    def convert(reply: models_pb2.GetModelResponse) -> Answer:
        inputs, outputs = _signature(reply.model.card)
        content = {"name": name, "versions": [_LATEST], "platform": NAME}
        return Answer(encode_json({**content, "inputs": inputs, "outputs": outputs}))

    return MeshCall(GET_MODEL, models_pb2.GetModelRequest(model=named.model), convert)


def ready(received: Received) -> MeshCall:
    """`GET /v2/models/{model}/ready`: report whether the mesh knows the model and its last load
    succeeded. A model is loaded by its first request.
    """
    name, named = _named(received)

    def convert(reply: models_pb2.GetModelResponse) -> Answer:
        is_ready = reply.model.state != models_pb2.MODEL_STATE_FAILED
        return Answer(encode_json({"name": name, "ready": is_ready}), 200 if is_ready else 503)

    return MeshCall(GET_MODEL, models_pb2.GetModelRequest(model=named.model), convert)


def infer(received: Received) -> MeshCall:
    """`POST /v2/models/{model}/infer`. If neither inputs nor outputs determine the task, the
    model's card does. Raises HttpError.
    """
    request, tensors = _inputs(received)
    name, named = _named(received)
    ask = _InferCall(name, named, request, tensors)
    for index, one in enumerate(request.outputs or ()):
        if one.parameters is not None and one.parameters.classification:
            raise invalid(
                "classification is not supported: ask for the whole tensor",
                f"outputs[{index}].parameters.classification",
            )
    if "query" in tensors and "documents" in tensors:
        return ask.score()
    ask.texts()
    tasks = {_TASK_OF[one.name] for one in request.outputs or () if one.name in _TASK_OF}
    if tasks:
        return ask.call_for(tasks)

    def convert(reply: models_pb2.GetModelResponse) -> MeshCall:
        return ask.call_for(set(reply.model.card.tasks))

    def fallback(problem: HttpError) -> MeshCall | None:
        """Call an unknown model anyway, which makes a worker load it."""
        return ask.call_for(set()) if problem.reason == "MODEL_NOT_FOUND" else None

    return MeshCall(
        GET_MODEL, models_pb2.GetModelRequest(model=named.model), convert, fallback=fallback
    )


class _InferCall:
    """The mesh calls that one request may become."""

    def __init__(
        self, name: str, named: AliasTarget, request: InferIn, tensors: Mapping[str, Texts]
    ) -> None:
        self._name = name
        self._named = named
        self._request = request
        self._tensors = tensors
        self._options = request.parameters or InParameters()

    def texts(self) -> tuple[str, Texts]:
        """Return the input tensor's texts and the caller's name of it. Raises HttpError."""
        others = [name for name in self._tensors if name not in ("labels", "entity_labels")]
        if len(others) != 1:
            given = ", ".join(self._tensors) or "nothing"
            raise invalid(
                (
                    "inputs must be text, with labels if the model needs them, or query and "
                    f"documents; not {given}"
                ),
                "inputs",
            )
        return others[0], self._tensors[others[0]]

    def call_for(self, tasks: set[Any]) -> MeshCall:
        """Return the call for a model with these tasks; empty for an unknown model."""
        if models_pb2.TASK_ENCODE in tasks or not tasks:
            return self._encode()
        if tasks & {models_pb2.TASK_RELATIONS, models_pb2.TASK_ENTITIES, models_pb2.TASK_CLASSIFY}:
            return self._extract(tasks)
        raise invalid("inputs of this model must be query and documents", "inputs")

    def score(self) -> MeshCall:
        options, named = self._options, self._named
        query, documents = self._tensors["query"], self._tensors["documents"]
        if len(query) != 1:
            raise invalid(f"the tensor query has {len(query)} texts: it must have one", "query")
        if options.scale not in _SCALES:
            raise invalid(
                (
                    f"parameters.scale is {options.scale!r}; it must be logit or probability, or "
                    "be omitted"
                ),
                "parameters.scale",
            )
        message = pb.ScoreRequest(
            model=named.model,
            query=text_item(query[0], "query"),
            documents=[
                text_item(text, f"documents[{index}]") for index, text in enumerate(documents)
            ],
            scale=_SCALES[options.scale],
            truncation=read_truncation(options.truncation, "parameters.truncation"),
            instruction=options.instruction or "",
            adapter=options.adapter or named.adapter,
            pool=options.pool or "",
            priority=read_priority(options.priority),
        )

        def convert(reply: pb.ScoreResponse) -> Answer:
            scores = np.asarray(decoded(codec.score_result, reply).scores, np.float32)
            return self._to_answer([("scores", scores, [len(scores)])], reply.model_revision)

        return MeshCall(SCORE, message, convert, fields=item_fields("documents", "documents"))

    def _encode(self) -> MeshCall:
        options, named = self._options, self._named
        field, texts = self.texts()
        forms = dict.fromkeys(
            _FORMS[one.name] for one in self._request.outputs or () if one.name in _FORMS
        )
        message = pb.EncodeRequest(
            model=named.model,
            items=[text_item(text, f"{field}[{index}]") for index, text in enumerate(texts)],
            representations=list(forms),
            role=read_role(named, role=options.role),
            dimensions=read_count(options.dimensions, "parameters.dimensions") or named.dimensions,
            truncation=read_truncation(options.truncation, "parameters.truncation"),
            instruction=options.instruction or "",
            adapter=options.adapter or named.adapter,
            pool=options.pool or "",
            priority=read_priority(options.priority),
        )
        if options.normalize is not None:
            message.normalize = options.normalize

        def convert(reply: pb.EncodeResponse) -> Answer:
            return self._to_answer(list(_encoded(reply)), reply.model_revision)

        return MeshCall(
            ENCODE,
            message,
            convert,
            fields={**item_fields("items", field), "dimensions": "parameters.dimensions"},
        )

    def _extract(self, tasks: set[Any]) -> MeshCall:
        options, named = self._options, self._named
        field, texts = self.texts()
        labels = self._tensors.get("labels", [])
        message = pb.ExtractRequest(
            model=named.model,
            items=[text_item(text, f"{field}[{index}]") for index, text in enumerate(texts)],
            truncation=read_truncation(options.truncation, "parameters.truncation"),
            adapter=options.adapter or named.adapter,
            pool=options.pool or "",
            priority=read_priority(options.priority),
        )
        if models_pb2.TASK_RELATIONS in tasks:
            kinds = self._tensors.get("entity_labels", [])
            message.relations.CopyFrom(
                pb.RelationsTask(labels=labels, entity_labels=kinds, threshold=options.threshold)
            )
        elif models_pb2.TASK_ENTITIES in tasks:
            message.entities.CopyFrom(pb.EntitiesTask(labels=labels, threshold=options.threshold))
        else:
            message.classify.CopyFrom(pb.ClassifyTask(labels=labels, threshold=options.threshold))
            if options.multi_label is not None:
                message.classify.multi_label = options.multi_label
        kind = message.WhichOneof("task")

        def convert(reply: pb.ExtractResponse) -> Answer:
            return self._to_answer(list(_extracted(kind or "", reply)), reply.model_revision)

        names = dict.fromkeys(("entities.labels", "classify.labels", "relations.labels"), "labels")
        fields = {
            **item_fields("items", field),
            **names,
            "relations.entity_labels": "entity_labels",
        }
        return MeshCall(EXTRACT, message, convert, fields=fields)

    def _to_answer(self, tensors: list[Tensor], revision: str) -> Answer:
        """Return the requested tensors in the order of the request."""
        request = self._request
        known = {name: (name, content, shape) for name, content, shape in tensors}
        wanted = request.outputs or [RequestedOutput(name=name) for name in known]
        chosen = []
        for index, one in enumerate(wanted):
            if one.name not in known:
                raise invalid(
                    (
                        f"{one.name[:100]!r} is not an output of this model; its outputs are "
                        f"{', '.join(known)}"
                    ),
                    f"outputs[{index}].name",
                )
            is_binary = one.parameters.binary_data if one.parameters is not None else None
            chosen.append(
                _OutputTensor(
                    *known[one.name],
                    is_binary=self._options.binary_data_output if is_binary is None else is_binary,
                )
            )
        head: dict[str, Any] = {"model_name": self._name, "model_version": _LATEST}
        if request.id is not None:
            head["id"] = request.id
        if revision:
            head["parameters"] = {"revision": revision}
        return _serialise(head, chosen)


@dataclass(frozen=True, slots=True)
class _OutputTensor:
    """A tensor of the answer."""

    name: str
    content: Rows | list[str]
    shape: list[int]
    is_binary: bool

    @property
    def head(self) -> dict[str, Any]:
        kind = "BYTES" if isinstance(self.content, list) else _TYPES[self.content.dtype]
        return {"name": self.name, "shape": self.shape, "datatype": kind}

    def octets(self) -> bytes:
        """Return numbers as little-endian, or texts, each after its length in four bytes."""
        if not isinstance(self.content, list):
            return self.content.astype(self.content.dtype.newbyteorder("<"), copy=False).tobytes()
        texts = [text.encode() for text in self.content]
        return b"".join(part for text in texts for part in (struct.pack("<I", len(text)), text))

    def pieces(self) -> Iterator[bytes]:
        """Yield the tensor as JSON."""
        yield encode_json(self.head)[:-1] + b',"data":['
        flat = self.content if isinstance(self.content, list) else self.content.reshape(-1)
        for first in range(0, len(flat), PIECE_NUMBERS):
            yield (b"," if first else b"") + encode_json(flat[first : first + PIECE_NUMBERS])[1:-1]
        yield b"]}"


def _serialise(head: dict[str, Any], chosen: Sequence[_OutputTensor]) -> Answer:
    behind = {index: one.octets() for index, one in enumerate(chosen) if one.is_binary}

    def pieces() -> Iterator[bytes]:
        yield encode_json(head)[:-1] + b',"outputs":['
        for index, one in enumerate(chosen):
            yield b"," if index else b""
            if index in behind:
                yield encode_json(
                    {**one.head, "parameters": {"binary_data_size": len(behind[index])}}
                )
            else:
                yield from one.pieces()
        yield b"]}"

    if behind:
        reported = b"".join(pieces())
        headers = ((JSON_LENGTH, b"%d" % len(reported)),)
        return Answer(b"".join((reported, *behind.values())), media_type=OCTETS, headers=headers)
    is_small = sum(math.prod(one.shape) for one in chosen) <= PIECE_NUMBERS
    return Answer(b"".join(pieces()) if is_small else pieces())


def _encoded(reply: pb.EncodeResponse) -> Iterator[Tensor]:
    """Yield all representations of the reply."""
    if reply.HasField("dense"):
        rows = np.ascontiguousarray(dense_rows(reply.dense), np.float32)
        yield "dense", rows, list(rows.shape)
    if reply.HasField("sparse"):
        matrix = decoded(codec.sparse, reply.sparse)
        parts = [matrix[index] for index in range(len(matrix))]
        columns = np.concatenate([np.asarray(part[0], np.uint32) for part in parts])
        values = np.concatenate([np.asarray(part[1], np.float32) for part in parts])
        yield "sparse_indices", columns, [len(columns)]
        yield "sparse_values", values, [len(values)]
        yield "sparse_offsets", *_offsets([len(part[0]) for part in parts])
    if reply.HasField("multi_vector"):
        ragged = decoded(codec.ragged, reply.multi_vector)
        vectors = [np.asarray(ragged[index], np.float32) for index in range(len(ragged))]
        every = np.concatenate(vectors)
        yield "multi_vector", every, list(every.shape)
        yield "multi_vector_offsets", *_offsets([len(one) for one in vectors])


def _offsets(lengths: Sequence[int]) -> tuple[Rows, list[int]]:
    found = np.cumsum([0, *lengths], dtype=np.int64)
    return found, [len(found)]


def _extracted(kind: str, reply: pb.ExtractResponse) -> Iterator[Tensor]:
    """Yield labels as two tensors [texts, labels], best first, with short rows padded by "" and 0.
    Yield other results as one JSON list per text.
    """
    results = reply.results
    if kind == "classify":
        width = max((len(result.labels) for result in results), default=0)
        names = [one.label for result in results for one in _pad_labels(result, width)]
        scores = np.array(
            [one.score for result in results for one in _pad_labels(result, width)], np.float32
        )
        shape = [len(results), width]
        yield "labels", names, shape
        yield "scores", scores, shape
        return
    entities = [[_entity(one) for one in result.entities] for result in results]
    relations = [
        [
            {
                "head": _entity(one.head),
                "tail": _entity(one.tail),
                "label": one.label,
                "score": one.score,
            }
            for one in result.relations
        ]
        for result in results
    ]
    for name, rows in (("entities", entities), ("relations", relations)):
        if name == kind or any(rows):
            yield name, [encode_json(row).decode() for row in rows], [len(rows)]


def _pad_labels(result: pb.Extraction, width: int) -> list[pb.LabelScore]:
    return [*result.labels, *([pb.LabelScore()] * (width - len(result.labels)))]


def _entity(one: pb.Entity) -> dict[str, Any]:
    return {
        "text": one.text,
        "label": one.label,
        "score": one.score,
        "start": one.start,
        "end": one.end,
    }


def _signature(card: models_pb2.ModelCard) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the input and output tensors of a model by its tasks."""

    def tensor(name: str, kind: str, *shape: int) -> dict[str, Any]:
        return {"name": name, "datatype": kind, "shape": list(shape)}

    text = tensor("text", "BYTES", -1)
    labels = tensor("labels", "BYTES", -1)
    if models_pb2.TASK_ENCODE in card.tasks:
        outputs = []
        for form in card.representations:
            if form == pb.REPRESENTATION_DENSE:
                outputs.append(tensor("dense", "FP32", -1, card.dimensions or -1))
            elif form == pb.REPRESENTATION_SPARSE:
                outputs += [
                    tensor("sparse_indices", "UINT32", -1),
                    tensor("sparse_values", "FP32", -1),
                ]
                outputs.append(tensor("sparse_offsets", "INT64", -1))
            elif form == pb.REPRESENTATION_MULTI_VECTOR:
                outputs.append(
                    tensor("multi_vector", "FP32", -1, card.multi_vector_dimensions or -1)
                )
                outputs.append(tensor("multi_vector_offsets", "INT64", -1))
        return [text], outputs
    if models_pb2.TASK_RELATIONS in card.tasks:
        return [text, labels, tensor("entity_labels", "BYTES", -1)], [
            tensor("relations", "BYTES", -1)
        ]
    if models_pb2.TASK_ENTITIES in card.tasks:
        return [text, *([] if card.labels else [labels])], [tensor("entities", "BYTES", -1)]
    if models_pb2.TASK_CLASSIFY in card.tasks:
        many = len(card.labels) or -1
        return [text, *([] if card.labels else [labels])], [
            tensor("labels", "BYTES", -1, many),
            tensor("scores", "FP32", -1, many),
        ]
    return [tensor("query", "BYTES", 1), tensor("documents", "BYTES", -1)], [
        tensor("scores", "FP32", -1)
    ]


def _named(received: Received) -> tuple[str, AliasTarget]:
    """Return the name in the path and the model. A version is a revision; 1 is the current one.
    Raises HttpError.
    """
    name, _, version = (
        received.model.rpartition(_VERSIONS)
        if _VERSIONS in received.model
        else (received.model, "", "")
    )
    wanted = name if version in ("", _LATEST) or "@" in name else f"{name}@{version}"
    return name, target(received, wanted)


def json_part(received: Received) -> bytes:
    """Return the JSON at the beginning of a body; binary tensors may follow it.

    Raises HttpError.
    """
    length = received.json_length
    if not length:
        return received.body
    if (
        not (length.isascii() and length.isdigit())
        or len(length) > 12
        or int(length) > len(received.body)
    ):
        raise invalid(
            "the header inference-header-content-length must be the size of the JSON in the body",
            "inputs",
        )
    return received.body[: int(length)]


def _inputs(received: Received) -> tuple[InferIn, dict[str, Texts]]:
    """Return the request and its texts by tensor name. Raises HttpError."""
    head = json_part(received)
    raw = received.body[len(head) :]
    request = read(InferIn, received.with_body(head))
    tensors: dict[str, Texts] = {}
    at = 0
    for index, tensor in enumerate(request.inputs):
        field = f"inputs[{index}]"
        if tensor.name in tensors:
            raise invalid(
                f"{field}.name {tensor.name[:100]!r} is also the name of another input",
                f"{field}.name",
            )
        if tensor.datatype != "BYTES":
            raise invalid(
                f"{field}.datatype is {tensor.datatype[:20]!r}; it must be BYTES: texts",
                f"{field}.datatype",
            )
        size = tensor.parameters.binary_data_size if tensor.parameters is not None else None
        if size is not None:
            if not 0 <= size <= len(raw) - at:
                raise invalid(
                    f"{field} is longer than the data after the JSON",
                    f"{field}.parameters.binary_data_size",
                )
            texts = _unpacked(raw[at : at + size], field)
            at += size
        elif tensor.data is not None:
            texts = _flatten(tensor.data, field)
        else:
            raise invalid(f"{field}.data is required", f"{field}.data")
        if (
            len(tensor.shape) > 8
            or any(not 0 <= side < 1 << 31 for side in tensor.shape)
            or math.prod(tensor.shape) != len(texts)
        ):
            raise invalid(
                f"{field}.shape {tensor.shape[:8]} does not match {len(texts)} texts",
                f"{field}.shape",
            )
        tensors[tensor.name] = texts
    return request, tensors


def _unpacked(raw: bytes, field: str) -> Texts:
    """Return the texts of a tensor, each after its length in four bytes. Raises HttpError."""
    texts = []
    at = 0
    while at < len(raw):
        end = at + 4
        size = int.from_bytes(raw[at:end], "little")
        if end + size > len(raw):
            raise invalid(f"{field}: a text extends beyond the tensor", field)
        try:
            texts.append(raw[end : end + size].decode())
        except UnicodeDecodeError:
            raise invalid(f"{field}[{len(texts)}] is not UTF-8", field) from None
        check_items(texts, field)
        at = end + size
    return texts


def _flatten(data: list[Any], field: str) -> Texts:
    """Return the texts of nested lists in row-major order. Raises HttpError."""
    texts: Texts = []
    waiting: list[Any] = [iter(data)]
    while waiting:
        for one in waiting[-1]:
            if isinstance(one, list):
                waiting.append(iter(one))
                break
            if not isinstance(one, str):
                raise invalid(f"{field}.data must be texts", f"{field}.data")
            texts.append(one)
            check_items(texts, f"{field}.data")
        else:
            waiting.pop()
    return texts


_GETS: Final[tuple[tuple[str, Callable[[Received], MeshCall | Answer], str, type], ...]] = (
    ("/v2", server, "Describes the server", ServerOut),
    ("/v2/models/{model}", described, "Describes a model's tensors", ModelOut),
    ("/v2/models/{model}/ready", ready, "Reports whether a model is available", ReadyOut),
)
ROUTES: Final = (
    *(
        Route("GET", path, KSERVE, ask, summary, answer=answer)
        for path, ask, summary, answer in _GETS
    ),
    Route(
        "POST",
        "/v2/models/{model}/infer",
        KSERVE,
        infer,
        "Runs a model over tensors of text",
        InferIn,
        InferOut,
        decoded=json_part,
    ),
)
