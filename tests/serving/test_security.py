"""Addresses at which a server may listen, by its security settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.errors import InvalidInput
from libs.serving import Security, Service, serving
from libs.serving.security.settings import exposure, is_loopback
from tests.serving.parts import HEALTH, connected

MESH = Service("shoal.v1.MeshService", lambda server: None)
PLAIN = Security()
TLS = Security(cert=Path("c"), key=Path("k"))
MTLS = Security(cert=Path("c"), key=Path("k"), client_ca=Path("a"))
TOKENS = Security(tokens=Path("t"))
TLS_TOKENS = Security(cert=Path("c"), key=Path("k"), tokens=Path("t"))
TLS_JWKS = Security(cert=Path("c"), key=Path("k"), jwks=Path("j"), issuer="i", audience="a")
OPEN = Security(allow_insecure=True)


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("127.0.0.1:50051", True),
        ("127.255.3.4:0", True),
        ("localhost:1", True),
        ("[::1]:50051", True),
        ("unix:/run/shoal.sock", True),
        ("unix-abstract:shoal", True),
        ("0.0.0.0:50051", False),
        ("[::]:50051", False),
        (":50051", False),
        ("*:50051", False),
        ("10.0.0.1:50051", False),
        ("[::ffff:10.0.0.1]:50051", False),
        ("128.0.0.1:1", False),
        ("127.0.0.1.example.org:1", False),
        ("localhost.example.org:1", False),
        ("router:50051", False),
        ("ipv4:0.0.0.0:50051", False),
        ("ipv4:127.0.0.1:1,0.0.0.0:1", False),
        ("50051", False),
        ("", False),
    ],
)
def test_loopback_addresses_are_recognised(address: str, is_local: bool) -> None:
    assert is_loopback(address) == is_local
    assert (exposure(address, PLAIN) == "") == is_local


@pytest.mark.parametrize(
    ("security", "problem"),
    [
        (PLAIN, "without TLS and authentication"),
        (TLS, "without authentication"),
        (TOKENS, "clear text"),
        (MTLS, ""),
        (TLS_TOKENS, ""),
        (TLS_JWKS, ""),
        (OPEN, ""),
        (Security(tokens=Path("t"), allow_insecure=True), ""),
    ],
)
def test_unprotected_server_may_only_listen_on_loopback(security: Security, problem: str) -> None:
    found = exposure("0.0.0.0:50051", security)
    assert bool(found) == bool(problem)
    assert problem in found
    assert exposure("127.0.0.1:50051", security) == ""


async def test_refused_start_lists_the_remedies() -> None:
    with pytest.raises(InvalidInput) as raised:
        async with serving("0.0.0.0:0", [MESH]):
            pass
    for way in (
        "SHOAL_TLS_CLIENT_CA",
        "SHOAL_TOKENS",
        "SHOAL_JWKS",
        "SHOAL_ALLOW_INSECURE=1",
        "0.0.0.0:0",
    ):
        assert way in raised.value.message


async def test_health_only_server_may_listen_anywhere() -> None:
    async with serving("0.0.0.0:0", [], health=["worker"]) as server:
        await server.set_health(True)
        async with connected(server.address.replace("0.0.0.0", "127.0.0.1")) as probe:
            assert await probe.call(HEALTH) == b"\x08\x01"
