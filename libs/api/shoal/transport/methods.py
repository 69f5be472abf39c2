"""The RPC methods that a client calls: their paths, and how their messages are serialised and
parsed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from shoal.v1 import aliases_pb2, caller_pb2, inference_pb2, mesh_pb2, models_pb2, multiplex_pb2

Q = TypeVar("Q")
R = TypeVar("R")
RequestMessage = TypeVar("RequestMessage", bound=Message)
ReplyMessage = TypeVar("ReplyMessage", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, R]):
    """An RPC method that takes one message: its path, and how requests are serialised and replies
    parsed.
    """

    path: str
    serialize: Callable[[Q], bytes]
    parse: Callable[[bytes], R]


def _method(
    path: str, request: type[RequestMessage], reply: type[ReplyMessage]
) -> Method[RequestMessage, ReplyMessage]:
    return Method(f"/shoal.v1.{path}", request.SerializeToString, reply.FromString)


def _health_request(service: str) -> bytes:
    """Serialise a grpc.health.v1.HealthCheckRequest by hand: one string field is not worth another
    dependency.
    """
    name = service.encode()
    return b"\x0a" + bytes([len(name)]) + name if name else b""


ENCODE = _method(
    "InferenceService/Encode", inference_pb2.EncodeRequest, inference_pb2.EncodeResponse
)
ENCODE_STREAM = _method(
    "InferenceService/EncodeStream", inference_pb2.EncodeRequest, inference_pb2.EncodeResponse
)  # server streaming
SCORE = _method("InferenceService/Score", inference_pb2.ScoreRequest, inference_pb2.ScoreResponse)
EXTRACT = _method(
    "InferenceService/Extract", inference_pb2.ExtractRequest, inference_pb2.ExtractResponse
)
EXTRACT_STREAM = _method(
    "InferenceService/ExtractStream",
    inference_pb2.ExtractRequest,
    inference_pb2.ExtractStreamResponse,
)  # server streaming
TOKENIZE = _method(
    "InferenceService/Tokenize", inference_pb2.TokenizeRequest, inference_pb2.TokenizeResponse
)
DETOKENIZE = _method(
    "InferenceService/Detokenize", inference_pb2.DetokenizeRequest, inference_pb2.DetokenizeResponse
)
MULTIPLEX = _method(
    "InferenceService/Multiplex", multiplex_pb2.MultiplexRequest, multiplex_pb2.MultiplexResponse
)  # streaming both ways
LIST_MODELS = _method(
    "ModelService/ListModels", models_pb2.ListModelsRequest, models_pb2.ListModelsResponse
)
GET_MODEL = _method(
    "ModelService/GetModel", models_pb2.GetModelRequest, models_pb2.GetModelResponse
)
LOAD_MODEL = _method(
    "ModelService/LoadModel", models_pb2.LoadModelRequest, models_pb2.LoadModelResponse
)
EVICT_MODEL = _method(
    "ModelService/EvictModel", models_pb2.EvictModelRequest, models_pb2.EvictModelResponse
)
PIN_MODEL = _method(
    "ModelService/PinModel", models_pb2.PinModelRequest, models_pb2.PinModelResponse
)
LIST_ALIASES = _method(
    "AliasService/ListAliases", aliases_pb2.ListAliasesRequest, aliases_pb2.ListAliasesResponse
)
SET_ALIAS = _method(
    "AliasService/SetAlias", aliases_pb2.SetAliasRequest, aliases_pb2.SetAliasResponse
)
REMOVE_ALIAS = _method(
    "AliasService/RemoveAlias", aliases_pb2.RemoveAliasRequest, aliases_pb2.RemoveAliasResponse
)
GET_CALLER = _method(
    "CallerService/GetCaller", caller_pb2.GetCallerRequest, caller_pb2.GetCallerResponse
)
GET_MESH = _method("MeshService/GetMesh", mesh_pb2.GetMeshRequest, mesh_pb2.GetMeshResponse)
WATCH_MESH = _method(
    "MeshService/WatchMesh", mesh_pb2.WatchMeshRequest, mesh_pb2.WatchMeshResponse
)  # server streaming
EXPLAIN = _method(
    "MeshService/ExplainPlacement",
    mesh_pb2.ExplainPlacementRequest,
    mesh_pb2.ExplainPlacementResponse,
)
# HealthCheckResponse has one enum field: 08 01 is SERVING.
HEALTH = Method("/grpc.health.v1.Health/Check", _health_request, lambda reply: reply == b"\x08\x01")
