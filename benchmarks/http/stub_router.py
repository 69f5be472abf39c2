"""The face of a router without a mesh, for `benchmarks.http.edge`: `python -m
benchmarks.http.stub_router`.

A gRPC server that answers Encode, alone or on a stream of calls, at once with one ready-made vector
for each text, whatever the text is, and health as a router does. It prints the port of loopback
that it listens on as a line of JSON, and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any

import grpc
import numpy as np
import uvloop
from shoal.v1 import inference_pb2, multiplex_pb2, tensor_pb2

DIMENSIONS = 384
SERVING = b"\x08\x01"
"""A serialised grpc.health.v1.HealthCheckResponse."""
TOKENS_A_TEXT = 8


@lru_cache(maxsize=64)
def build_answer(texts: int, dimensions: int = DIMENSIONS) -> bytes:
    """Return the serialised EncodeResponse of this many texts."""
    rows = np.random.default_rng(7).standard_normal((texts, dimensions)).astype("<f4")
    tensor = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=rows.shape, data=rows.tobytes()
    )
    usage = inference_pb2.Usage(input_tokens=TOKENS_A_TEXT * texts)
    return inference_pb2.EncodeResponse(
        dense=tensor, usage=usage, model_revision="stub"
    ).SerializeToString()


def _encode(request: bytes) -> bytes:
    """Requests of less than a kilobyte are single texts: they are not parsed, so that this process
    costs less than an edge.
    """
    return build_answer(
        1 if len(request) < 1024 else len(inference_pb2.EncodeRequest.FromString(request).items)
    )


async def encode(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    return _encode(request)


async def multiplex(
    requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
) -> AsyncIterator[bytes]:
    """Answer the Encode calls of each message with one message. Clients write only after the
    metadata of an accepted stream.
    """
    await context.send_initial_metadata((("x-request-id", "stub"),))
    async for request in requests:
        answers = multiplex_pb2.MultiplexResponse()
        for call in multiplex_pb2.MultiplexRequest.FromString(request).calls:
            if not call.cancelled:
                answers.answers.add(number=call.number, response=_encode(call.encode))
        yield answers.SerializeToString()


async def check(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    return SERVING


async def serve() -> None:
    """Serve until its input ends."""
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    )
    inference: dict[str, Any] = {
        "Encode": grpc.unary_unary_rpc_method_handler(encode),
        "Multiplex": grpc.stream_stream_rpc_method_handler(multiplex),
    }
    health: dict[str, Any] = {"Check": grpc.unary_unary_rpc_method_handler(check)}
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler("shoal.v1.InferenceService", inference),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", health),
        ]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"port": port}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    uvloop.run(serve())
