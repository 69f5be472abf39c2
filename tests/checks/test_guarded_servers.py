"""One function constructs gRPC servers, and one module reads requests that may be of any size: a
port cannot lack the guard.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.serving.calls.decode import SMALL_TRANSPORT_BYTES
from libs.serving.calls.guard import Guard
from libs.serving.server import guarded_server
from tests.serving.parts import connected

ROOT = Path(__file__).parents[2]
MADE_IN = {"libs/serving/server.py"}
READ_IN = {
    "libs/serving/calls/arrivals.py",
    "libs/serving/calls/interceptor.py",  # of callers who were authenticated
    "services/edge/ports/tei_grpc.py",  # of callers whom a router has answered
}


def files() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("libs", "services"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def calls(tree: ast.Module, name: str) -> Iterator[str]:
    """Yield the receivers of calls of methods with that name."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == name
        ):
            yield ast.unparse(node.func.value)


def test_one_function_constructs_grpc_servers() -> None:
    made = {
        name
        for name, tree in files()
        for owner in calls(tree, "server")
        if owner in ("grpc", "grpc.aio", "aio")
    }
    assert made == MADE_IN
    imported = {
        name
        for name, tree in files()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module in ("grpc", "grpc.aio")
        and {"server", "aio"} & {a.name for a in node.names}
    }
    assert imported == set(), "import grpc, so that this check finds what constructs a server"


def test_requests_are_read_where_their_memory_is_bounded() -> None:
    read = {
        name
        for name, tree in files()
        for owner in calls(tree, "read")
        if owner.split(".")[-1] == "context"
    }
    assert read == READ_IN


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
