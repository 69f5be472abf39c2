"""Server reflection for clients of both protocols: `grpc.reflection.v1` and
`grpc.reflection.v1alpha`.

grpcio-reflection only has the latter (1.75.0 and 1.85.1). The two differ only in the package's name
(grpc/grpc-proto), so v1 is described by a renamed copy of v1alpha's descriptor, and served by
v1alpha's servicer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection, reflection_pb2

_OLD, _NEW = "grpc.reflection.v1alpha", "grpc.reflection.v1"
SERVICE_NAME: Final = f"{_NEW}.ServerReflection"
SERVICE_NAMES: Final = (SERVICE_NAME, reflection.SERVICE_NAME)
_METHOD: Final = "ServerReflectionInfo"


def add_reflection(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Let the server describe the named services, and reflection itself, to clients of both
    protocols.
    """
    _describe()
    every = [*names, *SERVICE_NAMES]
    reflection.enable_server_reflection(every, server)
    servicer = reflection.aio.ReflectionServicer(every)

    async def info(requests: Any, context: Any) -> AsyncIterator[Any]:
        async for response in servicer.ServerReflectionInfo(_as_old(requests), context):
            yield response

    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
        info, None, reflection_pb2.ServerReflectionResponse.SerializeToString
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE_NAME, {_METHOD: handler}),)
    )


async def _as_old(
    requests: AsyncIterator[Message],
) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    async for request in requests:
        yield reflection_pb2.ServerReflectionRequest.FromString(request.SerializeToString())


def _describe() -> None:
    """Add v1's file to the default descriptor pool, unless it exists."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(SERVICE_NAME)
    except KeyError:
        pool.Add(_renamed())


def _renamed() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = "grpc/reflection/v1/reflection.proto", _NEW
    for message in file.message_type:
        for field in (field for field in message.field if field.type_name):
            field.type_name = field.type_name.replace(f".{_OLD}.", f".{_NEW}.")
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(f".{_OLD}.", f".{_NEW}.")
        method.output_type = method.output_type.replace(f".{_OLD}.", f".{_NEW}.")
    return file
