"""From the wire to numpy and dataclasses. Pure; the only place of the client that reads answers.

A protobuf `bytes` field is handed out as one Python object, and numpy views it: a matrix is not copied once received, except for
bfloat16, which numpy does not have and which becomes float32.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shoal.results import (
    DataType,
    EncodeResult,
    Entity,
    Extraction,
    ExtractResult,
    Floats,
    Integers,
    LabelScore,
    Numbers,
    Ragged,
    Region,
    Relation,
    ScoreResult,
    Sparse,
    Timings,
    Usage,
    Vectors,
)
from shoal.status import (
    LaneStatus,
    Mesh,
    Model,
    ModelCard,
    ModelPlace,
    Placement,
    PlacementReason,
    Scheduler,
    WorkerStatus,
)
from shoal.v1 import inference_pb2, mesh_pb2, models_pb2, tensor_pb2

T = TypeVar("T")

_STORED: dict[tensor_pb2.DataType, tuple[DataType, str]] = {
    tensor_pb2.DATA_TYPE_FLOAT32: ("float32", "<f4"),
    tensor_pb2.DATA_TYPE_FLOAT16: ("float16", "<f2"),
    tensor_pb2.DATA_TYPE_BFLOAT16: ("bfloat16", "<u2"),
    tensor_pb2.DATA_TYPE_INT8: ("int8", "i1"),
    tensor_pb2.DATA_TYPE_UINT8: ("uint8", "u1"),
    tensor_pb2.DATA_TYPE_BINARY: ("binary", "u1"),
}


def _widened(upper: npt.NDArray[np.uint16]) -> Floats:
    """bfloat16 is the upper half of a float32."""
    floats = (upper.astype(np.uint32) << 16).view(np.float32)
    floats.flags.writeable = False
    return floats


def _array(tensor: tensor_pb2.Tensor) -> tuple[Numbers, DataType]:
    """The stored numbers in their shape; for BINARY the last axis is whole bytes."""
    if tensor.data_type not in _STORED:
        raise ValueError(f"this client does not know data type {tensor.data_type}; a newer one does")
    data_type, stored = _STORED[tensor.data_type]
    shape = list(tensor.shape)
    if data_type == "binary":
        shape[-1] = (shape[-1] + 7) // 8
    array = np.frombuffer(tensor.data, dtype=stored).reshape(shape)
    return (_widened(array) if data_type == "bfloat16" else array), data_type


def _per_row(data: bytes) -> Floats | None:
    return np.frombuffer(data, dtype="<f4") if data else None


def vectors(tensor: tensor_pb2.Tensor) -> Vectors:
    array, data_type = _array(tensor)
    return Vectors(array, data_type, tensor.shape[-1], _per_row(tensor.scale), _per_row(tensor.offset))


def ragged(message: tensor_pb2.Ragged) -> Ragged:
    return Ragged(_array(message.values)[0], _offsets(message.offsets))


def sparse(message: tensor_pb2.SparseMatrix) -> Sparse:
    offsets = _offsets(message.offsets)
    indices: npt.NDArray[np.int32] = np.frombuffer(message.indices, dtype="<i4")  # uint32 below 2**31: columns of a vocabulary.
    return Sparse(_array(message.values)[0], indices, offsets, (len(offsets) - 1, message.columns))


def _offsets(numbers: Any) -> Integers:
    offsets = np.array(numbers, dtype=np.int64)
    offsets.flags.writeable = False
    return offsets


def encode_result(response: inference_pb2.EncodeResponse) -> EncodeResult:
    return EncodeResult(
        vectors(response.dense) if response.HasField("dense") else None,
        sparse(response.sparse) if response.HasField("sparse") else None,
        ragged(response.multi_vector) if response.HasField("multi_vector") else None,
        _flat(Usage, response.usage),
        _flat(Timings, response.timings),
        response.model_revision,
    )


def score_result(response: inference_pb2.ScoreResponse) -> ScoreResult:
    scores = np.frombuffer(response.scores.data, dtype="<f4")
    usage, timings = _flat(Usage, response.usage), _flat(Timings, response.timings)
    return ScoreResult(scores, _offsets(response.ranking), usage, timings, response.model_revision)


def extract_result(response: inference_pb2.ExtractResponse) -> ExtractResult:
    results = tuple(_extraction(result) for result in response.results)
    return ExtractResult(results, _flat(Usage, response.usage), _flat(Timings, response.timings), response.model_revision)


def _extraction(message: inference_pb2.Extraction) -> Extraction:
    return Extraction(
        tuple(_flat(Entity, entity) for entity in message.entities),
        tuple(_flat(LabelScore, label) for label in message.labels),
        tuple(
            Relation(_flat(Entity, relation.head), _flat(Entity, relation.tail), relation.label, relation.score)
            for relation in message.relations
        ),
        tuple(_flat(Region, region) for region in message.regions),
        message.text,
    )


def model(message: models_pb2.Model) -> Model:
    return Model(
        message.model,
        models_pb2.ModelState.Name(message.state).removeprefix("MODEL_STATE_").lower(),
        _card(message.card) if message.HasField("card") else None,
        tuple(_place(place) for place in message.places),
        message.queued_tokens,
        message.last_error,
    )


def _card(message: models_pb2.ModelCard) -> ModelCard:
    tasks = tuple(models_pb2.Task.Name(task).removeprefix("TASK_").lower() for task in message.tasks)
    forms = (inference_pb2.Representation.Name(form) for form in message.representations)
    representations = tuple(form.removeprefix("REPRESENTATION_").lower() for form in forms)
    return _flat(ModelCard, message, tasks=tasks, representations=representations)


def _place(message: models_pb2.ModelPlace) -> ModelPlace:
    return _flat(ModelPlace, message, state=models_pb2.ModelState.Name(message.state).removeprefix("MODEL_STATE_").lower())


def mesh(message: mesh_pb2.Mesh) -> Mesh:
    return Mesh(
        tuple(_worker(worker) for worker in message.workers),
        tuple(model(entry) for entry in message.models),
        tuple(_flat(LaneStatus, lane) for lane in message.lanes),
        message.router_id,
        _flat(Scheduler, message.scheduler),
    )


def _worker(message: mesh_pb2.WorkerStatus) -> WorkerStatus:
    noticed = message.HasField("preempted_in_seconds")
    return _flat(WorkerStatus, message, preempted_in_seconds=message.preempted_in_seconds if noticed else None)


def placement(model: str, message: mesh_pb2.ExplainPlacementResponse) -> Placement:
    reasons = tuple(_flat(PlacementReason, worker) for worker in message.workers)
    return Placement(model, message.summary, reasons, _flat(Scheduler, message.scheduler), message.plan)


def _flat(kind: type[T], message: Any, **given: object) -> T:
    """A dataclass whose fields bear the message's names; repeated fields become tuples."""
    values = dict(given)
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in values:
            value = getattr(message, field.name)
            values[field.name] = value if isinstance(value, (str, int, float)) else tuple(value)
    return kind(**values)
