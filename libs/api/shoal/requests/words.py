"""The words of arguments and results, and their values in messages.

Clients, workers and the edge encode and decode with these tables. A word is the name of an enum's
value in lower case, without the enum's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, Protocol, TypeVar

from shoal.results import DataType, Form
from shoal.tasks import (
    Aggregation,
    ChunkMethod,
    LongText,
    Priority,
    Role,
    Scale,
    Speaker,
    TextKind,
    TextLayer,
)
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, tensor_pb2

_W = TypeVar("_W")
_V = TypeVar("_V")


class _Enum(Protocol):
    """The method of a generated enum that is used here."""

    def items(self) -> Any: ...


def _words(kind: _Enum, prefix: str) -> dict[Any, Any]:
    """Return the values of an enum by their words, without the unspecified one, which is 0."""
    return {name.removeprefix(prefix).lower(): value for name, value in kind.items() if value}


def inverse(words: Mapping[_W, _V]) -> dict[_V, _W]:
    """Return the words by their values."""
    return {value: word for word, value in words.items()}


ROLES: Final[Mapping[Role, pb.Role]] = _words(pb.Role, "ROLE_")
REPRESENTATIONS: Final[Mapping[Form, pb.Representation]] = _words(
    pb.Representation, "REPRESENTATION_"
)
DATA_TYPES: Final[Mapping[DataType, tensor_pb2.DataType]] = _words(
    tensor_pb2.DataType, "DATA_TYPE_"
)
TRUNCATIONS: Final[Mapping[LongText, pb.Truncation]] = _words(pb.Truncation, "TRUNCATION_")
PRIORITIES: Final[Mapping[Priority, pb.Priority]] = _words(pb.Priority, "PRIORITY_")
SCALES: Final[Mapping[Scale, pb.ScoreScale]] = _words(pb.ScoreScale, "SCORE_SCALE_")
AGGREGATIONS: Final[Mapping[Aggregation, pb.Aggregation]] = _words(pb.Aggregation, "AGGREGATION_")
TEXT_KINDS: Final[Mapping[TextKind, pb.TextTask.Kind]] = _words(pb.TextTask.Kind, "KIND_")
TEXT_LAYERS: Final[Mapping[TextLayer, pb.TextTask.TextLayer]] = _words(
    pb.TextTask.TextLayer, "TEXT_LAYER_"
)
SPEAKERS: Final[Mapping[Speaker, pb.Turn.Role]] = _words(pb.Turn.Role, "ROLE_")
CHUNK_METHODS: Final[Mapping[ChunkMethod, pb.Chunking.Method]] = _words(
    pb.Chunking.Method, "METHOD_"
)
FINISH_REASONS: Final[Mapping[Literal["stop", "length"], pb.FinishReason]] = _words(
    pb.FinishReason, "FINISH_REASON_"
)
FIELD_DTYPES: Final[Mapping[Literal["list", "str"], pb.SchemaField.Kind]] = {
    "list": pb.SchemaField.KIND_LIST,
    "str": pb.SchemaField.KIND_STRING,
}
TASKS: Final[Mapping[str, models_pb2.Task]] = _words(models_pb2.Task, "TASK_")
