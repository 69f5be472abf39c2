"""Authorisation over the wire. tests/mesh/test_authorisation.py checks the whole table of
methods.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import grpc
import pytest

from libs.serving import Identity, Security
from libs.serving.security.identity import ANONYMOUS
from tests.router.parts import until
from tests.serving.parts import (
    ADMIN,
    CLIENT,
    HEALTH,
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
