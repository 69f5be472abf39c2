"""Call every RPC of every service over real gRPC on a mesh with one good worker. No call may return
INTERNAL or exceed its deadline, and valid requests in between must succeed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
import numpy as np
import torch
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import mesh_pb2, models_pb2, multiplex_pb2, worker_pb2

from libs.models import EncodeResult, EncodeWork, load_model
from libs.versions import WIRE_VERSION
from services.scheduler.externalscaler import externalscaler_pb2
from tests.fuzz import messages, mutate
from tests.fuzz.decoders import WORDS
from tests.fuzz.meshes import MODEL, WORKER, Mesh, serving
from tests.fuzz.target import Broken, Internal, Random, Target, Try

_FILES: Final = (pb, models_pb2, mesh_pb2, worker_pb2, externalscaler_pb2)
METHODS: Final[Sequence[MethodDescriptor]] = [
    method
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
_KINDS: Final = [message_factory.GetMessageClass(method.input_type) for method in METHODS]

_FAULT: Final = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DATA_LOSS,
)
_TOLD: Final = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
)
"""These errors must have details, or a client cannot find the cause."""
_SECONDS: Final = {
    "LoadModel": 0.2,
    "Encode": 0.5,
    "EncodeStream": 0.5,
    "Score": 0.5,
    "Extract": 0.5,
    "ExtractStream": 0.5,
    "Tokenize": 0.5,
    "Detokenize": 0.5,
}
_LATE_SECONDS: Final = 15.0
_FLYING: Final = 64
_EACH: Final = 200
"""The number of inputs between two valid requests."""
_TEXTS: Final = ["a text", "text text e"]

_WORDS: Final[Mapping[str, Sequence[Any]]] = {
    **WORDS,
    "model": (*[MODEL] * 9, "org/gone"),
    "load_model": (MODEL, "org/gone"),
    "pool": ("cpu", "cpu", "", "fuzz"),
    "worker_id": ("x1", "x2"),
    "wait_seconds": (0.0, 0.01, 0.05),
    "interval_seconds": (0.2, 1.0),
    "scalerMetadata": ("cpu",),
    "key": ("pool", "minWarm", "drainSeconds"),
    "batch_id": ("b-1",),
    "job_id": ("j-1",),
    "metricName": ("desired-workers",),
}


def _bases(kind: type[Message]) -> list[Message]:
    items = [pb.Item(text=text) for text in _TEXTS]
    query = pb.Item(text="text")
    lane = worker_pb2.Lane(pool="fuzz", model=MODEL)
    model = worker_pb2.WorkerModel(
        model=MODEL, state=models_pb2.MODEL_STATE_RESIDENT, bytes=100, tokens_per_second=10.0
    )
    reference = externalscaler_pb2.ScaledObjectRef(
        name="n", namespace="s", scalerMetadata={"pool": "cpu"}
    )
    pull = worker_pb2.PullRequest(
        wire_version=WIRE_VERSION,
        worker_id="x1",
        epoch="e",
        pool="fuzz",
        lanes=[lane],
        budget_tokens=100,
        budget_jobs=1,
    )
    complete = worker_pb2.CompleteRequest(
        worker_id="x1",
        lane=lane,
        batch_id="b-1",
        jobs=[worker_pb2.CompletedJob(job_id="j-1", result=b"x")],
    )
    known: list[Message] = [
        pb.EncodeRequest(model=MODEL, items=items),
        pb.ScoreRequest(model=MODEL, query=query, documents=items),
        pb.ExtractRequest(model=MODEL, items=items, classify=pb.ClassifyTask(labels=["a", "b"])),
        pb.ExtractRequest(
            model=MODEL,
            items=items,
            text=pb.TextTask(turns=[pb.Turn(role=pb.Turn.ROLE_USER, text="a")]),
        ),
        models_pb2.GetModelRequest(model=MODEL),
        models_pb2.LoadModelRequest(model=MODEL),
        models_pb2.EvictModelRequest(model=MODEL),
        models_pb2.PinModelRequest(model=MODEL, pinned=True),
        mesh_pb2.ExplainPlacementRequest(model=MODEL),
        multiplex_pb2.MultiplexRequest(
            calls=[
                multiplex_pb2.MultiplexedCall(number=1, pull=pull.SerializeToString()),
                multiplex_pb2.MultiplexedCall(number=2, complete=complete.SerializeToString()),
            ]
        ),
        worker_pb2.HeartbeatRequest(
            wire_version=WIRE_VERSION,
            worker_id="x1",
            epoch="e",
            pool="fuzz",
            memory_bytes=1 << 20,
            models=[model],
        ),
        reference,
        externalscaler_pb2.GetMetricsRequest(
            scaledObjectRef=reference, metricName="desired-workers"
        ),
    ]
    return [base for base in known if type(base) is kind]


_MAKERS: Final = [messages.Maker(kind, _WORDS, *_bases(kind)) for kind in _KINDS]
# Messages without fields have a low weight.
_WEIGHTS: Final = [1 + min(9, len(method.input_type.fields)) for method in METHODS]


def _make(random: Random, known: Sequence[bytes]) -> bytes:
    """Return a byte for the method, one for headers, and the request."""
    if known and random.random() < 0.2:
        return mutate.mutated(random, random.choice(known), others=known)
    number = random.choices(range(len(METHODS)), _WEIGHTS)[0]
    return bytes([number, random.randrange(256)]) + _MAKERS[number].make(random)


def _tamed(number: int, data: bytes) -> bytes:
    """Return the request without claims about the good worker. A worker that lies harms its own
    models, as any worker of a pool can, and this target tests invalid data. So no request may use
    the good worker's name, pull its model's jobs, or report its model's card or workers in its
    pool.
    """
    request = messages.parsed(_KINDS[number], data)
    if isinstance(request, multiplex_pb2.MultiplexRequest):
        for call in request.calls:
            pull = messages.parsed(worker_pb2.PullRequest, call.pull)
            if call.WhichOneof("call") == "pull" and isinstance(pull, worker_pb2.PullRequest):
                kept = [lane for lane in pull.lanes if (lane.pool, lane.model) != ("cpu", MODEL)]
                del pull.lanes[:]
                pull.lanes.extend(kept)
                if pull.pool == "cpu":
                    pull.pool = "fuzz"
                call.pull = pull.SerializeToString()
    elif isinstance(request, worker_pb2.HeartbeatRequest):
        if request.worker_id == WORKER or request.pool == "cpu":
            request.worker_id, request.pool = "x3", "fuzz"
        for model in request.models:
            if model.model == MODEL:
                model.ClearField("card")
    else:
        return data
    return request.SerializeToString()


@dataclass(frozen=True, slots=True)
class _Flight:
    """A call in progress: a reply, or a stream of which the first reply suffices. It must end
    before `until`.
    """

    method: MethodDescriptor
    call: Any
    until: float
    data: bytes

    def judge(self) -> None:
        try:
            if self.method.server_streaming:
                next(self.call, None)
                self.call.cancel()
            else:
                self.call.result(timeout=max(0.0, self.until - time.monotonic()))
        except grpc.FutureTimeoutError:
            raise Broken(
                f"{self.method.name} has outlived its deadline by {_LATE_SECONDS:g} s", self.data
            ) from None
        except grpc.RpcError as error:
            _judge(self.method, error, self.data)


class Caller:
    """Calls the mesh with inputs, and in between like a valid client."""

    def __init__(self, mesh: Mesh) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._mesh = mesh
        self._channels = {
            address: grpc.insecure_channel(address, options)
            for address in (mesh.router, mesh.scheduler)
        }
        self._expected = _vectors(mesh)
        # The state: calls in progress, and the number of calls.
        self._flying: deque[_Flight] = deque()
        self._count = 0

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def one(self, data: bytes) -> None:
        """Send a call, and judge the one that was sent 64 calls ago."""
        number, header = (data[0] % len(METHODS), data[1]) if len(data) > 1 else (0, 0)
        self._send(number, header, _tamed(number, data[2:]), data)
        self._count += 1
        if len(self._flying) > _FLYING:
            self._flying.popleft().judge()
        if self._count % _EACH == 0:
            self.check()

    def finish(self) -> None:
        """Judge the calls in progress."""
        while self._flying:
            self._flying.popleft().judge()
        self.check()

    def _send(self, number: int, header: int, body: bytes, data: bytes) -> None:
        method = METHODS[number]
        is_scaler = method.containing_service.name == "ExternalScaler"
        channel = self._channels[self._mesh.scheduler if is_scaler else self._mesh.router]
        path = f"/{method.containing_service.full_name}/{method.name}"
        seconds = _SECONDS.get(method.name, 1.0)
        metadata = _headers(header)
        flight: Any
        if method.server_streaming:
            flight = channel.unary_stream(path, bytes, bytes)(
                body, timeout=seconds, metadata=metadata
            )
        else:
            flight = channel.unary_unary(path, bytes, bytes).future(
                body, timeout=seconds, metadata=metadata
            )
        self._flying.append(
            _Flight(method, flight, time.monotonic() + seconds + _LATE_SECONDS, data)
        )

    def check(self) -> None:
        """Check the results of a valid client."""
        if self._mesh.ended.done():
            self._mesh.ended.result()
            raise Broken("the mesh has ended")
        # Use the good worker's pool: a lying worker attracts requests without a pool to its own
        # pool.
        request = pb.EncodeRequest(
            model=MODEL, pool="cpu", items=[pb.Item(text=text) for text in _TEXTS]
        )
        call = self._channels[self._mesh.router].unary_unary(
            "/shoal.v1.InferenceService/Encode",
            pb.EncodeRequest.SerializeToString,
            pb.EncodeResponse.FromString,
        )
        try:
            answer = call(request, timeout=30.0)
        except grpc.RpcError as error:
            raise Broken(
                f"a good request failed: {error.code().name}: {error.details()}"
            ) from error
        found = np.frombuffer(answer.dense.data, "<f4").reshape(tuple(answer.dense.shape))
        if found.shape != self._expected.shape or not np.allclose(found, self._expected, atol=1e-4):
            raise Broken(f"a good request was answered wrongly: {found.tolist()}")


def _vectors(mesh: Mesh) -> np.ndarray[Any, np.dtype[np.float32]]:
    model = load_model(mesh.model, MODEL, torch.device("cpu"), torch.float32)
    prepared = model.prepare(EncodeWork(texts=_TEXTS))
    result = model.finish(prepared, model.forward(prepared.head, prepared.sequences))
    assert isinstance(result, EncodeResult)
    assert result.dense is not None
    return result.dense.values.astype(np.float32)


def _headers(header: int) -> tuple[tuple[str, str], ...]:
    tenants = ("", "default", "a", "x" * 128, "x" * 129, "a b", "*", "~")
    tenant = (("x-shoal-tenant", tenants[header % 8]),) if header & 8 else ()
    return (*tenant, ("x-request-id", "r" * (header % 140))) if header & 16 else tenant


def _judge(method: MethodDescriptor, error: grpc.RpcError, data: bytes) -> None:
    code, details = error.code(), error.details() or ""
    if code in _FAULT:
        raise Internal(
            f"{method.name} was answered with {code.name}: {details[:200]}", data
        ) from error
    if "metadata size" in details or "header" in details.lower():
        raise Broken(
            f"{method.name}: the status does not fit into headers: {details[:200]}", data
        ) from error
    trailing: Any = error.trailing_metadata()
    names = [name for name, _ in trailing or ()]
    if code in _TOLD and "grpc-status-details-bin" not in names:
        raise Broken(
            f"{method.name}: {code.name} without details: {details[:200]}", data
        ) from error


@contextmanager
def _open() -> Iterator[Try]:
    with serving() as mesh:
        caller = Caller(mesh)
        try:
            caller.check()
            yield caller.one
            caller.finish()
        finally:
            caller.close()


TARGETS: Final = (
    Target("calls", _make, _open, share=6.0, memory_bytes=4 << 30, hang_seconds=60.0),
)
