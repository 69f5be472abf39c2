"""TLS and mTLS of a running server with changing files."""

from __future__ import annotations

import logging
import shutil
import socket
import ssl
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from libs.errors import InvalidInput
from libs.serving import Security
from libs.serving.security.tls import TlsFiles
from tests.serving.parts import GET_MESH, HEALTH, HEARTBEAT, Calls, connected, running_server
from tests.support.certificates import Certificates


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certs")


def shown(address: str) -> int:
    """Return the serial number of the certificate that a new connection receives."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), 60) as plain,
        context.wrap_socket(plain) as connection,
    ):
        der = connection.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


def serial(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


async def test_new_connections_use_a_new_certificate_and_old_ones_continue(
    certificates: Certificates,
) -> None:
    calls = Calls()
    security = certificates.security()
    assert security.cert is not None
    async with (
        running_server(calls, security) as server,
        connected(server.address, certificates.channel_credentials()) as old,
    ):
        await old.call(GET_MESH)
        waiting = old.start(HEARTBEAT)
        first = serial(security.cert)
        assert shown(server.address) == first
        certificates.issue("router")
        second = serial(security.cert)
        assert second != first
        assert shown(server.address) == second
        await old.call(GET_MESH)
        calls.go.set()
        await waiting


@pytest.mark.parametrize("breakage", ["not PEM", "gone", "of another key", "ended"])
async def test_broken_new_files_are_ignored(
    breakage: str, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    security = certificates.security()
    assert security.cert is not None
    async with running_server(Calls(), security) as server:
        first = serial(security.cert)
        match breakage:
            case "not PEM":
                security.cert.write_text(
                    "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
                )
            case "gone":
                security.cert.unlink()
            case "of another key":
                shutil.copy(certificates.issue("scheduler").certificate, security.cert)
            case "ended":
                certificates.now -= timedelta(days=10)
                certificates.issue("router")
                certificates.now += timedelta(days=10)
        with caplog.at_level(logging.WARNING):
            assert [shown(server.address) for _ in range(3)] == [first] * 3
        assert [record.message for record in caplog.records] == [
            "changed files are invalid; keeping the previous content"
        ]
        certificates.issue("router")
        assert shown(server.address) == serial(security.cert) != first


async def test_callers_must_present_a_certificate_of_the_authority(
    certificates: Certificates, tmp_path: Path
) -> None:
    stranger = Certificates(tmp_path / "others")
    security = certificates.security(asks_callers=True)
    async with running_server(Calls(), security) as server:
        for caller, expected in (
            (certificates.issue("admin"), grpc.StatusCode.OK),
            (stranger.issue("admin"), grpc.StatusCode.UNAVAILABLE),
            (None, grpc.StatusCode.UNAVAILABLE),
        ):
            async with connected(server.address, certificates.channel_credentials(caller)) as known:
                assert await known.code(GET_MESH) == expected
                # Health checks need no credential, but the connection does.
                assert await known.code(HEALTH) == expected
        async with connected(server.address) as plain:
            assert await plain.code(HEALTH) == grpc.StatusCode.UNAVAILABLE


async def test_new_authority_applies_to_new_connections(
    certificates: Certificates, tmp_path: Path
) -> None:
    others = Certificates(tmp_path / "others")
    security = certificates.security(asks_callers=True)
    assert security.client_ca is not None
    before, after = certificates.issue("admin"), others.issue("admin")
    own = certificates.channel_credentials(before), certificates.channel_credentials(after)
    async with (
        running_server(Calls(), security) as server,
        connected(server.address, own[0]) as known,
    ):
        assert await known.code(GET_MESH) == grpc.StatusCode.OK
        # The server's certificate is still from the first authority.
        security.client_ca.write_bytes(others.ca.read_bytes())
        async with (
            connected(server.address, own[1]) as new,
            connected(server.address, own[0]) as late,
        ):
            assert await new.code(GET_MESH) == grpc.StatusCode.OK
            assert await late.code(GET_MESH) == grpc.StatusCode.UNAVAILABLE
        assert await known.code(GET_MESH) == grpc.StatusCode.OK


async def test_health_has_a_separate_plain_address(certificates: Certificates) -> None:
    security = certificates.security(asks_callers=True, health_address="127.0.0.1:0")
    async with (
        running_server(Calls(), security) as server,
        connected(server.health_address) as probe,
    ):
        assert await probe.call(HEALTH) == b"\x08\x01"
        assert await probe.code(GET_MESH) == grpc.StatusCode.UNIMPLEMENTED
        await server.set_health(False)
        assert await probe.call(HEALTH) == b"\x08\x02"


def test_unusable_files_are_named(certificates: Certificates, tmp_path: Path) -> None:
    router, scheduler = certificates.issue("router"), certificates.issue("scheduler")
    nothing = tmp_path / "nothing.pem"
    text = tmp_path / "text.pem"
    text.write_text("hello")
    ended = tmp_path / "ended"
    ended.mkdir()
    old = certificates.issue("router/old", days=-1)
    for files, variable, words in (
        (TlsFiles(nothing, router.key), "SHOAL_TLS_CERT", "nothing.pem cannot be read"),
        (TlsFiles(text, router.key), "SHOAL_TLS_CERT", "text.pem does not contain certificates"),
        (
            TlsFiles(router.certificate, text),
            "SHOAL_TLS_KEY",
            "text.pem does not contain a private key",
        ),
        (
            TlsFiles(router.certificate, scheduler.key),
            "SHOAL_TLS_KEY",
            r"scheduler.key \(SHOAL_TLS_KEY\) is not the key of .*router.pem",
        ),
        (
            TlsFiles(router.certificate, router.key, text),
            "SHOAL_TLS_CLIENT_CA",
            "text.pem does not contain certificates",
        ),
        (TlsFiles(old.certificate, old.key), "SHOAL_TLS_CERT", "has expired"),
    ):
        with pytest.raises(InvalidInput, match=words) as raised:
            files.read()
        assert raised.value.field == variable


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({"SHOAL_TLS_CERT": "a.pem"}, "SHOAL_TLS_KEY"),
        ({"SHOAL_TLS_KEY": "a.key"}, "SHOAL_TLS_KEY"),
        ({"SHOAL_TLS_CLIENT_CA": "ca.pem"}, "SHOAL_TLS_CERT"),
        ({"SHOAL_JWKS": "keys.json", "SHOAL_JWT_AUDIENCE": "a"}, "SHOAL_JWT_ISSUER"),
        ({"SHOAL_JWKS": "keys.json", "SHOAL_JWT_ISSUER": "i"}, "SHOAL_JWT_AUDIENCE"),
        ({"SHOAL_JWT_ISSUER": "a b"}, "SHOAL_JWT_ISSUER"),
        ({"SHOAL_TRUST_DOMAIN": "Not/this"}, "SHOAL_TRUST_DOMAIN"),
        ({"SHOAL_ALLOW_INSECURE": "yes"}, "SHOAL_ALLOW_INSECURE"),
        ({"SHOAL_TLS_CERT": "/nowhere/a.pem", "SHOAL_TLS_KEY": "/nowhere/a.key"}, "SHOAL_TLS_CERT"),
        ({"SHOAL_TOKENS": "/nowhere/tokens.yaml"}, "SHOAL_TOKENS"),
        (
            {
                "SHOAL_JWKS": "/nowhere/keys.json",
                "SHOAL_JWT_ISSUER": "i",
                "SHOAL_JWT_AUDIENCE": "a",
            },
            "SHOAL_JWKS",
        ),
    ],
)
def test_missing_variable_is_named(environ: dict[str, str], variable: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        Security.from_env(environ)
    assert raised.value.field == variable
