"""Authorisation over the wire. tests/mesh/test_authorisation.py checks the whole table of
methods.
"""

from __future__ import annotations

import pkgutil
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import pytest
import shoal.v1

from libs.errors import PermissionDenied
from libs.serving import Identity, Security
from libs.serving.security.identity import ANONYMOUS, NAMED_ROLES
from libs.serving.security.roles import METHODS, check_allowed, is_allowed
from services.scheduler.externalscaler import externalscaler_pb2
from tests.router.parts import until
from tests.serving.parts import (
    ADMIN,
    CLIENT,
    GET_MESH,
    HEALTH,
    HEARTBEAT,
    LIST,
    LOAD,
    ROAMING,
    WATCH,
    Caller,
    Calls,
    connected,
    running_server,
    write_tokens,
)
from tests.support.certificates import Certificates

CODES = grpc.StatusCode


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens.yaml")


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


async def test_tokens_determine_role_and_tenant(tokens: Path) -> None:
    calls = Calls()
    async with running_server(calls, Security(tokens=tokens)) as server:
        for token, tenant, method, expected in (
            (CLIENT, "", LIST, CODES.OK),
            (CLIENT, "acme", LIST, CODES.OK),
            (CLIENT, "other", LIST, CODES.PERMISSION_DENIED),
            (ROAMING, "other", LIST, CODES.OK),
            (CLIENT, "", LOAD, CODES.PERMISSION_DENIED),
            (CLIENT, "", WATCH, CODES.PERMISSION_DENIED),
            (ADMIN, "", WATCH, CODES.OK),
            (ADMIN, "", LOAD, CODES.OK),
            ("", "", LIST, CODES.UNAUTHENTICATED),
            ("", "", WATCH, CODES.UNAUTHENTICATED),
            ("wrong-token-0123456789", "", LIST, CODES.UNAUTHENTICATED),
            (CLIENT.upper(), "", LIST, CODES.UNAUTHENTICATED),
            ("", "", HEALTH, CODES.OK),
            ("wrong", "", HEALTH, CODES.OK),
        ):
            async with connected(server.address, token=token, tenant=tenant) as caller:
                assert await caller.code(method) == expected, (token, tenant, method)
    said = [(call.identity.subject, call.tenant) for call in calls.seen]
    assert said == [("frontend", "acme")] * 2 + [("gateway", "other")] + [("ops", "acme")] * 2


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        f"Basic {CLIENT}",
        CLIENT,
        f"Bearer {CLIENT} x",
        f"Bearer  {CLIENT}",
        "Bearer " + "x" * 8193,
    ],
)
async def test_malformed_header_is_refused_and_not_repeated(value: str, tokens: Path) -> None:
    async with (
        running_server(Calls(), Security(tokens=tokens)) as server,
        connected(server.address) as caller,
    ):
        caller.metadata.append(("authorization", value))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await caller.call(LIST)
    assert raised.value.code() == CODES.UNAUTHENTICATED
    assert "Bearer <token>" in (raised.value.details() or "")
    assert CLIENT not in str(raised.value)


async def test_two_authorization_headers_are_refused(tokens: Path) -> None:
    async with (
        running_server(Calls(), Security(tokens=tokens)) as server,
        connected(server.address, token=CLIENT) as caller,
    ):
        caller.metadata.append(("authorization", f"Bearer {ADMIN}"))
        assert await caller.code(LOAD) == CODES.UNAUTHENTICATED


async def test_without_authentication_any_caller_and_tenant_is_accepted() -> None:
    calls = Calls()
    async with (
        running_server(calls) as server,
        connected(server.address, token="anything", tenant="acme") as caller,
    ):
        assert await caller.code(LOAD) == CODES.OK
    assert (calls.seen[0].identity, calls.seen[0].tenant) == (ANONYMOUS, "acme")


async def test_changed_tokens_apply_within_a_second_and_broken_files_do_not(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running_server(Calls(), Security(tokens=tokens)) as server,
        connected(server.address, token=CLIENT) as caller,
    ):
        assert await caller.code(LIST) == CODES.OK
        tokens.write_text(f"tokens: [{{token: {CLIENT}, subject: frontend}}]")  # noqa: ASYNC240
        await until(lambda: "are invalid" in caplog.text)
        assert await caller.code(LIST) == CODES.OK
        for left, expected in ((ADMIN, CODES.UNAUTHENTICATED), (CLIENT, CODES.OK)):
            write_tokens(tokens, left)
            await until(partial(has_code, caller, expected))
    assert CLIENT not in caplog.text


async def has_code(caller: Caller, code: grpc.StatusCode) -> bool:
    return await caller.code(LIST) == code


async def test_token_takes_precedence_over_the_client_certificate(
    tmp_path: Path, tokens: Path
) -> None:
    certificates = Certificates(tmp_path / "certs")
    calls = Calls()
    shown = certificates.channel_credentials(certificates.issue("client/acme"))
    unnamed = certificates.channel_credentials(certificates.issue("router"))
    foreign = certificates.channel_credentials(certificates.issue("admin", trust_domain="others"))
    async with running_server(
        calls, certificates.security(asks_callers=True, tokens=tokens)
    ) as server:
        for credentials, token, method, expected in (
            (shown, "", LIST, CODES.OK),
            (shown, "", LOAD, CODES.PERMISSION_DENIED),
            (shown, ADMIN, LOAD, CODES.OK),
            (shown, "wrong-token-0123456789", LIST, CODES.UNAUTHENTICATED),
            (unnamed, "", LIST, CODES.UNAUTHENTICATED),
            (unnamed, ADMIN, LOAD, CODES.OK),
            (foreign, "", LIST, CODES.UNAUTHENTICATED),
        ):
            async with connected(server.address, credentials, token=token) as caller:
                assert await caller.code(method) == expected
    assert calls.seen[0].identity == Identity("spiffe://shoal/client/acme", "client", "acme")
    # `shoal certs` does not issue such a name, but another authority may.
    for name in ("acme\0", "acme?a", "acme%2fa"):
        odd = certificates.issue_odd("client", name)
        security, shows = (
            certificates.security(asks_callers=True, tokens=tokens),
            certificates.channel_credentials(odd),
        )
        async with (
            running_server(Calls(), security) as server,
            connected(server.address, shows) as caller,
        ):
            assert await caller.code(LIST) == CODES.UNAUTHENTICATED
    only_certificates = certificates.security(asks_callers=True)
    async with (
        running_server(Calls(), only_certificates) as server,
        connected(server.address, shown, token=ADMIN) as caller,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="takes certificates, not tokens"):
            await caller.call(LIST)
