"""Credentials of clients and trust in routers: certificates and tokens that change during use,
secrets that stay secret.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import shoal
from shoal import errors
from shoal.transport.trust import Trust, WatchedCredential, tls_from, token_from

from services.local.settings import free_port
from tests.api.conftest import Connect
from tests.api.fake_router import MODEL, FakeRouter, serving
from tests.support.certificates import Certificates
from tests.support.waiting import wait_until

SECRET = "s3cret-of-the-tests"
ONCE = shoal.RetryPolicy(attempts=1)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    made = Certificates(tmp_path / "certificates")
    made.issue("client")
    return made


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at with every call, and not once a second."""
    monkeypatch.setattr("shoal.transport.trust.LOOK_SECONDS", 0.0)


def make_tls(certificates: Certificates, stem: str = "client") -> shoal.Tls:
    folder = certificates.directory
    return shoal.Tls(certificates.ca, folder / f"{stem}.pem", folder / f"{stem}.key")


def server_credentials(certificates: Certificates) -> Any:
    files = certificates.security(asks_callers=True).tls
    assert files is not None
    return files.credentials()


def shown(router: FakeRouter) -> list[bytes]:
    return [call.certificate.strip() for call in router.calls]


async def test_new_certificate_is_shown_by_new_calls_and_a_call_in_flight_ends_well(
    connect: Connect, certificates: Certificates
) -> None:
    path = certificates.directory / "client.pem"
    first = path.read_bytes().strip()
    with serving(FakeRouter(), credentials=server_credentials(certificates)) as router:
        client = connect(router.address, tls=make_tls(certificates))
        await client.do("encode", MODEL, "warm")
        router.gate.clear()
        held = asyncio.ensure_future(client.do("encode", MODEL, "in flight"))
        await asyncio.to_thread(wait_until, lambda: len(router.calls) == 2)
        certificates.issue("client")
        second = path.read_bytes().strip()
        later = asyncio.ensure_future(client.do("encode", MODEL, "later"))
        await asyncio.to_thread(wait_until, lambda: len(router.calls) == 3)
        router.gate.set()
        await held
        await later
        await client.do("encode", MODEL, "again")
    assert shown(router) == [first, first, second, second]


def test_old_connection_is_closed_when_its_last_call_has_ended(certificates: Certificates) -> None:
    with (
        serving(FakeRouter(), credentials=server_credentials(certificates)) as router,
        shoal.Client(router.address, tls=make_tls(certificates)) as client,
    ):
        channels: Any = client._transport._channels
        pooled = channels.acquire(router.address)
        certificates.issue("client")
        client.encode(MODEL, "x")
        assert channels._retired == {pooled}
        assert channels.release(pooled) == [pooled.channel]
        assert not channels._retired
        pooled.channel.close()
        certificates.issue("client")
        client.encode(MODEL, "x")  # nothing was in flight: the old one is closed at once
        assert (len(channels._current), channels._retired, channels._unused) == (1, set(), [])


async def test_another_authority_counts_without_a_new_client(
    connect: Connect, certificates: Certificates
) -> None:
    port = free_port()
    credentials = server_credentials(certificates)
    with serving(FakeRouter(), port=port, credentials=credentials) as router:
        client = connect(router.address, tls=make_tls(certificates))
        await client.do("encode", MODEL, "x")
    for file in certificates.directory.iterdir():
        file.unlink()
    renewed = Certificates(certificates.directory)
    renewed.issue("client")
    with serving(FakeRouter(), port=port, credentials=server_credentials(renewed)):
        await client.do("encode", MODEL, "x")


async def test_half_written_pair_changes_nothing(
    connect: Connect, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(FakeRouter(), credentials=server_credentials(certificates)) as router:
        client = connect(router.address, tls=make_tls(certificates))
        await client.do("encode", MODEL, "x")
        before = (certificates.directory / "client.pem").read_bytes()
        made = certificates.issue("client")
        after = made.certificate.read_bytes()
        made.certificate.write_bytes(before)  # the key is new, its certificate is not there yet
        for _ in range(3):
            await client.do("encode", MODEL, "x")
        reported = [record for record in caplog.records if record.name == "shoal.transport.trust"]
        assert len(reported) == 1
        assert "KEY_VALUES_MISMATCH" in reported[0].getMessage()
        made.certificate.write_bytes(after)
        await client.do("encode", MODEL, "x")
    assert shown(router) == [before.strip()] * 4 + [after.strip()]


async def test_token_file_is_read_again(
    connect: Connect, router: FakeRouter, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    client = connect(router.address, token=shoal.TokenFile(file))
    await client.do("encode", MODEL, "x")
    file.write_text("another")
    await client.do("encode", MODEL, "x")
    file.write_text("not one token")
    await client.do("encode", MODEL, "x")
    file.unlink()
    await client.do("encode", MODEL, "x")
    sent = [call.metadata["authorization"] for call in router.calls]
    assert sent == ["Bearer one", "Bearer another", "Bearer another", "Bearer another"]


async def test_environment_says_tls_and_token(
    connect: Connect, certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(SECRET)
    variables = {"CA": "ca.pem", "CERT": "client.pem", "KEY": "client.key"}
    for name, file in variables.items():
        monkeypatch.setenv(f"SHOAL_TLS_{name}", str(certificates.directory / file))
    monkeypatch.setenv("SHOAL_TOKEN_FILE", str(tmp_path / "token"))
    with serving(FakeRouter(), credentials=server_credentials(certificates)) as router:
        await connect(router.address).do("encode", MODEL, "x")
        monkeypatch.setenv("SHOAL_TLS_NAME", "localhost")
        await connect(router.address).do("encode", MODEL, "x")
        monkeypatch.setenv("SHOAL_TLS_NAME", "elsewhere.example")
        with pytest.raises(errors.TlsFailed, match=r"elsewhere\.example"):
            await connect(router.address, retry=ONCE).do("encode", MODEL, "x")
    assert [call.metadata["authorization"] for call in router.calls] == [f"Bearer {SECRET}"] * 2


def test_environment_is_checked() -> None:
    assert tls_from({}) is None
    assert tls_from({"SHOAL_TLS": "1"}) == shoal.Tls()
    assert tls_from({"SHOAL_TLS": "0", "SHOAL_TLS_NAME": "a"}) == shoal.Tls(server_name="a")
    assert token_from({"SHOAL_TOKEN": SECRET, "SHOAL_TOKEN_FILE": "/nowhere"}) == SECRET
    for wrong, words in (
        ({"SHOAL_TLS": "maybe"}, "SHOAL_TLS must be"),
        ({"SHOAL_TLS_KEY": "key.pem"}, "SHOAL_TLS_CERT and SHOAL_TLS_KEY"),
        ({"SHOAL_TOKEN_FILE": "/nowhere"}, "/nowhere cannot be read"),
    ):
        with pytest.raises(ValueError, match=words):
            Trust.from_env(wrong)


def test_files_that_cannot_be_used_are_named_at_once(
    certificates: Certificates, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("text")
    folder = certificates.directory
    certificates.issue("worker")
    for tls, words in (
        (shoal.Tls(tmp_path / "none"), "none cannot be read"),
        (shoal.Tls(tmp_path / "text"), "text holds no PEM certificates"),
        (shoal.Tls(b"text"), "root_certificates holds no PEM certificates"),
        (
            shoal.Tls(folder / "ca.pem", tmp_path / "text", folder / "client.key"),
            "not a certificate and its unencrypted key",
        ),
        (
            shoal.Tls(folder / "ca.pem", folder / "client.pem", folder / "worker.key"),
            "KEY_VALUES_MISMATCH",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            shoal.Client(tls=tls)


@pytest.mark.parametrize(
    "address", ["10.0.0.1:50051", "router.example", "127.0.0.1:1,10.0.0.1:1", "dns:///localhost:1"]
)
def test_token_does_not_leave_the_machine_in_plain_text(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(SECRET)
    for token in (SECRET, lambda: SECRET, shoal.TokenFile(tmp_path / "token")):
        with pytest.raises(ValueError, match="unencrypted"):
            shoal.Client(address, token=token)
    monkeypatch.setenv("SHOAL_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(ValueError, match="unencrypted"):
        shoal.Client(address)
    shoal.Client(address, tls=True)
    monkeypatch.setenv("SHOAL_TOKEN_WITHOUT_TLS", "1")
    shoal.Client(address)


async def test_local_addresses_bypass_the_proxy(
    connect: Connect, router: FakeRouter, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://{nobody}")
    await connect(router.address, token=SECRET, retry=ONCE).do("encode", MODEL, "x")


async def test_secrets_are_nowhere_to_be_read(
    connect: Connect,
    router: FakeRouter,
    nobody: str,
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "token").write_text(SECRET)
    file = shoal.TokenFile(tmp_path / "token")
    key = (certificates.directory / "client.key").read_bytes()
    tls = shoal.Tls(
        certificates.ca.read_bytes(), (certificates.directory / "client.pem").read_bytes(), key
    )
    client = shoal.Client(router.address, token=SECRET)
    reported = [
        repr(client),
        repr(vars(client)),
        repr(vars(client._caller)),
        repr(file),
        repr(tls),
        repr(Trust(tls, SECRET)),
    ]
    for wrong in (f"{SECRET}\n", f"{SECRET} {SECRET}", f"{SECRET}ü"):
        with pytest.raises(ValueError, match="visible ASCII") as refused:
            shoal.Client(token=wrong)
        reported.append(str(refused.value))
        with pytest.raises(ValueError, match="visible ASCII") as refused:
            await connect(router.address, token=lambda wrong=wrong: wrong).do("encode", MODEL, "x")
        reported.append(str(refused.value))
    with pytest.raises(ValueError, match="visible ASCII") as refused:
        shoal.Client(token=SECRET, tenant="Müller")
    reported.append(str(refused.value))
    with pytest.raises(errors.CannotConnect) as failed:
        await connect(nobody, token=file, retry=ONCE).do("encode", MODEL, "x")
    reported += [str(failed.value), repr(failed.value), caplog.text]
    assert SECRET not in "\n".join(reported)
    assert key.decode().splitlines()[1] not in "\n".join(reported)


async def test_trust_errors_are_explained(
    connect: Connect, certificates: Certificates, tmp_path: Path
) -> None:
    other = Certificates(tmp_path / "other")
    other.issue("client")
    certificates.issue("client/ended", days=-1)
    mine = make_tls(certificates)
    foreign = shoal.Tls(
        certificates.ca, other.directory / "client.pem", other.directory / "client.key"
    )
    with serving(FakeRouter(), credentials=server_credentials(certificates)) as router:
        for tls, kind, words in (
            (True, errors.TlsFailed, "authority that this client does not trust"),
            (make_tls(other), errors.TlsFailed, "authority that this client does not trust"),
            (
                shoal.Tls(mine.root_certificates, server_name="a.example"),
                errors.TlsFailed,
                r"not valid for the name a\.example",
            ),
            (
                shoal.Tls(mine.root_certificates),
                errors.CannotConnect,
                "require TLS, or a client certificate",
            ),
            (make_tls(certificates, "client-ended"), errors.CannotConnect, "has not expired"),
            (foreign, errors.CannotConnect, "a client certificate"),
            (False, errors.CannotConnect, "may require TLS"),
        ):
            with pytest.raises(kind, match=words):
                await connect(router.address, tls=tls, retry=ONCE).do("encode", MODEL, "x")
        assert router.calls == []
    with serving(FakeRouter()) as plain, pytest.raises(errors.TlsFailed, match="does not use TLS"):
        await connect(plain.address, tls=mine, retry=ONCE).do("encode", MODEL, "x")


def test_files_are_looked_at_once_a_second_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.transport.trust.LOOK_SECONDS", 1.0)
    file, now, reads = tmp_path / "file", 0.0, []

    def read() -> str:
        reads.append(now)
        return file.read_text()

    file.write_text("a")
    watched = WatchedCredential([file], read, clock=lambda: now)
    file.write_text("bb")
    assert watched.get() == "a"
    now = 0.999
    assert watched.get() == "a"
    now = 1.0
    assert [watched.get(), watched.get()] == ["bb", "bb"]
    now = 5.0
    assert watched.get() == "bb"
    os.replace(file, tmp_path / "moved")
    now = 7.0
    assert watched.get() == "bb"
    (tmp_path / "moved").write_text("bb")
    os.replace(tmp_path / "moved", file)
    now = 9.0
    assert watched.get() == "bb"
    assert reads == [0.0, 1.0, 7.0, 9.0]
