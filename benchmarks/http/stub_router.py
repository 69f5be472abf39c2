"""The face of a router without a mesh, for `benchmarks.http.edge`: `python -m
benchmarks.http.stub_router`.

A gRPC server that answers Encode at once with one ready-made vector for each text, whatever the
text is, and health as a router does. It prints the port of loopback that it listens on as a line of
JSON, and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from functools import lru_cache

import grpc
import numpy as np
import uvloop
from shoal.v1 import inference_pb2, tensor_pb2

DIMENSIONS = 384
SERVING = b"\x08\x01"
"""A serialised grpc.health.v1.HealthCheckResponse."""
TOKENS_A_TEXT = 8
Handler = Callable[[bytes, grpc.aio.ServicerContext[bytes, bytes]], Awaitable[bytes]]


@lru_cache(maxsize=64)
def answer_of(texts: int, dimensions: int = DIMENSIONS) -> bytes:
    """Return the serialised EncodeResponse of this many texts."""
    rows = np.random.default_rng(7).standard_normal((texts, dimensions)).astype("<f4")
    tensor = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=rows.shape, data=rows.tobytes()
    )
    usage = inference_pb2.Usage(input_tokens=TOKENS_A_TEXT * texts)
    return inference_pb2.EncodeResponse(
        dense=tensor, usage=usage, model_revision="stub"
    ).SerializeToString()


async def encode(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    """Requests of less than a kilobyte are single texts: they are not parsed, so that this process
    costs less than an edge.
    """
    return answer_of(
        1 if len(request) < 1024 else len(inference_pb2.EncodeRequest.FromString(request).items)
    )


async def check(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    return SERVING


def _service(name: str, method: str, handler: Handler) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        name, {method: grpc.unary_unary_rpc_method_handler(handler)}
    )


async def serve() -> None:
    """Serve until its input ends."""
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    )
    services = (
        ("shoal.v1.InferenceService", "Encode", encode),
        ("grpc.health.v1.Health", "Check", check),
    )
    server.add_generic_rpc_handlers([_service(*service) for service in services])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"port": port}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    uvloop.run(serve())
