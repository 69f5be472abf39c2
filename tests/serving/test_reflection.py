"""Reflection over real sockets, by clients of either protocol, and by buf without other knowledge
of the server.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest as ReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionResponse as ReflectionResponse

from libs.serving.calls.public import REQUEST_BYTES
from tests.serving.parts import Caller, Calls, connected, running_server

BUF = Path(sys.executable).with_name("buf")
PROTOCOLS = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
both = pytest.mark.parametrize("protocol", PROTOCOLS)


async def ask(caller: Caller, protocol: str, request: ReflectionRequest) -> ReflectionResponse:
    """Ask by either protocol: their messages are equal on the wire."""
    return ReflectionResponse.FromString(
        await caller.stream(
            f"/{protocol}.ServerReflection/ServerReflectionInfo", request.SerializeToString()
        ).read()
    )


def make_pool(files: Iterable[bytes]) -> descriptor_pool.DescriptorPool:
    """Return a pool with only these files, which must be sufficient."""
    pool, known = descriptor_pool.DescriptorPool(), set[str]()
    waiting = [descriptor_pb2.FileDescriptorProto.FromString(file) for file in files]
    while waiting:
        ready = [file for file in waiting if known.issuperset(file.dependency)]
        assert ready, "a file is missing"
        for file in ready:
            pool.Add(file)
            known.add(file.name)
            waiting.remove(file)
    return pool


@both
async def test_both_protocols_describe_services_and_files(protocol: str) -> None:
    async with running_server(Calls()) as server, connected(server.address) as caller:
        listed = await ask(caller, protocol, ReflectionRequest(list_services=""))
        names = {service.name for service in listed.list_services_response.service}
        assert names >= {
            "shoal.v1.MeshService",
            "grpc.health.v1.Health",
            *(f"{one}.ServerReflection" for one in PROTOCOLS),
        }
        for name in names:
            reported = await ask(caller, protocol, ReflectionRequest(file_containing_symbol=name))
            pool = make_pool(reported.file_descriptor_response.file_descriptor_proto)
            service = pool.FindServiceByName(name)
            assert all(
                method.input_type.full_name and method.output_type.full_name
                for method in service.methods
            )
        unknown = await ask(caller, protocol, ReflectionRequest(file_containing_symbol="no.Such"))
        assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


@both
async def test_both_protocols_refuse_large_requests(protocol: str) -> None:
    async with running_server(Calls()) as server, connected(server.address) as caller:
        stream = caller.stream(
            f"/{protocol}.ServerReflection/ServerReflectionInfo", bytes(REQUEST_BYTES + 1)
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "4,096" in str(refused.value.details())


@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
async def test_buf_calls_a_server_with_only_one_protocol(protocol: str) -> None:
    async with running_server(Calls()) as server:
        method = f"http://{server.address}/shoal.v1.MeshService/GetMesh"
        options = (
            "--protocol",
            "grpc",
            "--http2-prior-knowledge",
            "--reflect-protocol",
            protocol,
            "--data",
            "{}",
        )
        piped = asyncio.subprocess.PIPE
        run = await asyncio.create_subprocess_exec(
            BUF, "curl", *options, method, stdout=piped, stderr=piped
        )
        out, complaints = await run.communicate()
        assert (run.returncode, out.strip()) == (0, b"{}"), complaints
