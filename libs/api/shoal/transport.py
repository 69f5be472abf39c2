"""The seam between what a call is (`shoal.call`) and how bytes travel (`shoal.blocking`, `shoal.aio`).

The client's logic is written once, as coroutines over this protocol. Over grpc.aio they are awaited; over blocking gRPC nothing in
them ever suspends, and `shoal.blocking.finish` runs them to the end in the caller's thread: no event loop, no thread, no hop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from shoal.addresses import is_local
from shoal.errors import ShoalError, decode
from shoal.trust import Tls
from shoal.v1 import inference_pb2, mesh_pb2, models_pb2
from shoal.version import VERSION

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")
QueryMessage = TypeVar("QueryMessage", bound=Message)
ReplyMessage = TypeVar("ReplyMessage", bound=Message)
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, R]):
    """A method of a service that takes one message: its path and how its messages become bytes and back."""

    path: str
    serialize: Callable[[Q], bytes]
    parse: Callable[[bytes], R]


def _method(path: str, query: type[QueryMessage], reply: type[ReplyMessage]) -> Method[QueryMessage, ReplyMessage]:
    return Method(f"/shoal.v1.{path}", query.SerializeToString, reply.FromString)


def _health_query(service: str) -> bytes:
    """grpc.health.v1.HealthCheckRequest, by hand: one string field is not worth another dependency."""
    name = service.encode()
    return b"\x0a" + bytes([len(name)]) + name if name else b""


ENCODE = _method("InferenceService/Encode", inference_pb2.EncodeRequest, inference_pb2.EncodeResponse)
ENCODE_STREAM = _method("InferenceService/EncodeStream", inference_pb2.EncodeRequest, inference_pb2.EncodeResponse)  # many replies
SCORE = _method("InferenceService/Score", inference_pb2.ScoreRequest, inference_pb2.ScoreResponse)
EXTRACT = _method("InferenceService/Extract", inference_pb2.ExtractRequest, inference_pb2.ExtractResponse)
LIST_MODELS = _method("ModelService/ListModels", models_pb2.ListModelsRequest, models_pb2.ListModelsResponse)
GET_MODEL = _method("ModelService/GetModel", models_pb2.GetModelRequest, models_pb2.GetModelResponse)
LOAD_MODEL = _method("ModelService/LoadModel", models_pb2.LoadModelRequest, models_pb2.LoadModelResponse)
EVICT_MODEL = _method("ModelService/EvictModel", models_pb2.EvictModelRequest, models_pb2.EvictModelResponse)
PIN_MODEL = _method("ModelService/PinModel", models_pb2.PinModelRequest, models_pb2.PinModelResponse)
GET_MESH = _method("MeshService/GetMesh", mesh_pb2.GetMeshRequest, mesh_pb2.GetMeshResponse)
WATCH_MESH = _method("MeshService/WatchMesh", mesh_pb2.WatchMeshRequest, mesh_pb2.WatchMeshResponse)  # many replies
EXPLAIN = _method("MeshService/ExplainPlacement", mesh_pb2.ExplainPlacementRequest, mesh_pb2.ExplainPlacementResponse)
# HealthCheckResponse has one enum field: 08 01 is SERVING.
HEALTH = Method("/grpc.health.v1.Health/Check", _health_query, lambda reply: reply == b"\x08\x01")


class Wire(Protocol):
    """Sends one request, for one reply or for many, or lets time pass."""

    async def send(self, address: str, method: Method[Q, R], request: Q, *, timeout: float, metadata: Metadata) -> R:
        """The reply. Raises ShoalError."""

    async def receive(
        self, address: str, method: Method[Q, R], request: Q, take: Callable[[R], None], *, timeout: float, metadata: Metadata
    ) -> None:
        """Gives the replies to `take`, one after another, up to the last. Raises ShoalError."""

    async def sleep(self, seconds: float) -> None: ...


class Transport(Wire, Protocol):
    """Channels to routers, opened on first use."""

    async def gather(
        self, jobs: Sequence[Callable[[Wire], Awaitable[T]]], *, limit: int, on_done: Callable[[int], None]
    ) -> list[T]:
        """The results of `jobs` in their order, at most `limit` at a time; `on_done(index)` is called after each, in the caller's
        thread. The first failure ends the others and is raised."""


def channel_options(address: str, tls: Tls | None) -> list[tuple[str, str | int]]:
    """gRPC's settings for the channel to one router."""
    options: list[tuple[str, str | int]] = [
        ("grpc.primary_user_agent", f"shoal-python/{VERSION}"),
        # 512 documents as multi-vectors are more than 100 MB; the server bounds what it accepts.
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # A peer that vanished without a FIN is noticed within 40 s; the server permits pings this often.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A restarted router is found again soon, and one that drops packets is given up for the next address.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        # What one client knows of a router that fails is not another's, nor that of its own next channel.
        ("grpc.use_local_subchannel_pool", 1),
        # A name with several addresses (a headless Service) is spread over all of them.
        ("grpc.lb_policy_name", "round_robin"),
        # Retries are ours: they honour RetryInfo and change the address.
        ("grpc.service_config_disable_resolution", 1),
    ]
    if is_local(address):
        # A proxy of the environment (https_proxy) would take what is meant to stay on this machine.
        options.append(("grpc.enable_http_proxy", 0))
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def translate(error: grpc.RpcError, address: str) -> ShoalError:
    """The ShoalError that a failed gRPC call means."""
    trailing: Any = error.trailing_metadata() or ()  # Pairs in both; the stubs know only blocking gRPC's.
    details: bytes = next((value for key, value in trailing if key == "grpc-status-details-bin"), b"")
    return decode(error.code().name, error.details() or "", details, address=address)
