"""The guard of every gRPC server."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from libs.serving.calls.decode import SMALL_TRANSPORT_BYTES
from libs.serving.calls.guard import Guard
from libs.serving.server import guarded_server
from tests.serving.parts import connected


@pytest.mark.parametrize(
    "kind",
    [grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler],
    ids=["unary", "stream"],
)
async def test_guarded_server_serves_no_method_that_grpc_reads(kind: Any) -> None:
    async def refuse_to_run(request: object, context: object) -> bytes:
        raise AssertionError("the request was read")

    server = guarded_server(Guard(), SMALL_TRANSPORT_BYTES)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("a.Service", {"Method": kind(refuse_to_run)}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connected(f"127.0.0.1:{port}") as caller:
            assert await caller.code("/a.Service/Method") not in (
                grpc.StatusCode.OK,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
    finally:
        await server.stop(None)
