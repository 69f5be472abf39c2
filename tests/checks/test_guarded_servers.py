"""One function constructs gRPC servers, and one module reads requests that may be of any size: a
port cannot lack the guard.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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
