"""The role and tenant that each method requires."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import pytest
import shoal.v1

from libs.errors import PermissionDenied
from libs.serving import Identity
from libs.serving.security.identity import NAMED_ROLES
from libs.serving.security.roles import METHODS, check_allowed, is_allowed
from services.scheduler.externalscaler import externalscaler_pb2
from tests.serving.parts import (
    GET_MESH,
    HEARTBEAT,
    LOAD,
)


def declared_methods() -> list[str]:
    """Return every method of every service in the proto files of servers."""
    files = [
        import_module(f"shoal.v1.{found.name}") for found in pkgutil.iter_modules(shoal.v1.__path__)
    ]
    descriptors = [
        module.DESCRIPTOR
        for module in [*files, externalscaler_pb2]
        if module.__name__.endswith("_pb2")
    ]
    services = [service for file in descriptors for service in file.services_by_name.values()]
    return [
        f"/{service.full_name}/{method.name}" for service in services for method in service.methods
    ]


def test_rules_match_the_declared_methods() -> None:
    declared = declared_methods()
    assert len(declared) >= 19
    named = frozenset().union(*(METHODS[role] for role in NAMED_ROLES))
    streamed = {f"/shoal.v1.WorkerService/{name}" for name in ("Pull", "Complete", "Deltas")}
    assert named == set(declared) | streamed
    assert METHODS["anonymous"] == named


def test_method_without_a_rule_is_refused_to_all_roles() -> None:
    for role in METHODS:
        assert not is_allowed(role, "/shoal.v1.ModelService/DropEverything")
        with pytest.raises(PermissionDenied, match="no role may"):
            check_allowed(Identity("s", role, "t"), "/shoal.v1.ModelService/DropEverything")


@pytest.mark.parametrize(
    ("role", "method", "allowed"),
    [
        ("client", "/shoal.v1.InferenceService/Encode", True),
        ("client", LOAD, False),
        ("client", GET_MESH, False),
        ("admin", LOAD, True),
        ("admin", HEARTBEAT, False),
        ("admin", "/externalscaler.ExternalScaler/GetMetrics", False),
        ("worker", HEARTBEAT, True),
        ("worker", "/shoal.v1.InferenceService/Encode", False),
        ("scaler", "/externalscaler.ExternalScaler/GetMetrics", True),
        ("scaler", GET_MESH, False),
        ("anonymous", HEARTBEAT, True),
    ],
)
def test_roles(role: Any, method: str, allowed: bool) -> None:
    assert is_allowed(role, method) == allowed


@pytest.mark.parametrize(
    ("own", "named", "expected"),
    [
        ("acme", "", "acme"),
        ("acme", "acme", "acme"),
        ("acme", "other", None),
        ("*", "", "default"),
        ("*", "other", "other"),
        ("acme", "*", None),
    ],
)
def test_tenants(own: str, named: str, expected: str | None) -> None:
    identity = Identity("s", "client", own)
    if expected is None:
        with pytest.raises(PermissionDenied):
            identity.tenant_for(named)
    else:
        assert identity.tenant_for(named) == expected
