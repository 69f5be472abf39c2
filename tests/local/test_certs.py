"""`shoal certs` and `shoal redis-acl`: the files, their content, and that none is overwritten."""

from __future__ import annotations

import json
import ssl
import stat
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import typer
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner, Result

from libs.errors import InvalidInput
from libs.serving import Security
from libs.serving.security.authentication import certified
from libs.setting import NAME
from services.local.trust.certificates import CALLERS, SERVERS, Party, issue_all
from services.local.trust.command import certs, redis_acl

Run = Callable[..., Result]
EVERYBODY = (*SERVERS, *CALLERS)


@pytest.fixture
def run() -> Run:
    app = typer.Typer()
    app.command("certs")(certs)
    app.command("redis-acl")(redis_acl)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path: Path) -> x509.SubjectAlternativeName:
    return certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def test_each_party_gets_a_certificate_and_its_settings(run: Run, tmp_path: Path) -> None:
    done = run(
        "certs",
        tmp_path / "c",
        "--host",
        "router.example",
        "--host",
        "10.0.0.7",
        "--name",
        "client/search",
    )
    assert done.exit_code == 0, done.output
    for role in EVERYBODY:
        assert f"spiffe://shoal/{role}/default" in done.output
    for wanted in (
        "client-search.pem",
        f"SHOAL_TLS_CLIENT_CA={tmp_path}/c/ca.pem",
        f"SHOAL_TLS_CA={tmp_path}/c/ca.pem",
        "again",
    ):
        assert wanted in done.output
    for file in (tmp_path / "c").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == (0o600 if file.suffix == ".key" else 0o644)
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700
    router = names(tmp_path / "c/router.pem")
    assert router.get_values_for_type(x509.DNSName) == ["localhost", "router.example"]
    assert sorted(map(str, router.get_values_for_type(x509.IPAddress))) == [
        "10.0.0.7",
        "127.0.0.1",
        "::1",
    ]
    assert names(tmp_path / "c/worker.pem").get_values_for_type(x509.DNSName) == []


def test_certificates_are_accepted_by_servers_and_openssl(tmp_path: Path) -> None:
    issue_all(tmp_path, [Party.parse("client/*"), Party.parse("redis")])
    for role in CALLERS:
        uri = names(tmp_path / f"{role}.pem").get_values_for_type(x509.UniformResourceIdentifier)[0]
        who = certified([uri.encode()], "shoal")
        assert (who.role, who.tenant) == (role, "default")
    any_tenant = names(tmp_path / "client-any.pem").get_values_for_type(
        x509.UniformResourceIdentifier
    )[0]
    assert certified([any_tenant.encode()], "shoal").tenant == "*"
    for role in SERVERS:
        Security(
            cert=tmp_path / f"{role}.pem",
            key=tmp_path / f"{role}.key",
            client_ca=tmp_path / "ca.pem",
        ).check_files()
    for path in tmp_path.glob("*.pem"):
        key = certificate(path).public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"
        if path.name != "ca.pem":
            purpose = "sslserver" if path.stem in (*SERVERS, "redis") else "sslclient"
            verify = [
                "openssl",
                "verify",
                "-x509_strict",
                "-purpose",
                purpose,
                "-CAfile",
                str(tmp_path / "ca.pem"),
                str(path),
            ]
            subprocess.run(verify, check=True, capture_output=True)
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path, path.with_suffix(".key"))


def test_second_run_renews_certificates_and_keeps_authority_hosts_and_names(
    run: Run, tmp_path: Path
) -> None:
    run("certs", tmp_path, "--host", "router.example", "--name", "client/search", "--days", "1")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = run("certs", tmp_path, "--json")
    reported = json.loads(done.stdout)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert reported["is_new"] is False
    assert before.keys() == after.keys()
    for name in after:
        assert (before[name] == after[name]) == name.startswith("ca."), name
    assert "router.example" in names(tmp_path / "router.pem").get_values_for_type(x509.DNSName)
    assert {one["uri"] for one in reported["certificates"]} >= {
        "spiffe://shoal/client/search",
        "spiffe://shoal/admin/default",
    }
    ends = datetime.fromisoformat(next(one["ends"] for one in reported["certificates"]))
    assert timedelta(days=29) < ends - datetime.now(UTC) <= timedelta(days=30)


@pytest.mark.parametrize("damage", ["no key", "another key", "no certificate", "text", "ended"])
def test_authority_that_cannot_sign_is_kept_unless_forced(
    run: Run, tmp_path: Path, damage: str
) -> None:
    issue_all(
        tmp_path, [], now=datetime.now(UTC) - timedelta(days=400) if damage == "ended" else None
    )
    ca, key = tmp_path / "ca.pem", tmp_path / "ca.key"
    match damage:
        case "no key":
            key.unlink()
        case "another key":
            key.write_bytes((tmp_path / "router.key").read_bytes())
        case "no certificate":
            ca.unlink()
        case "text":
            ca.write_text("text")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = run("certs", tmp_path)
    assert done.exit_code == 1
    assert "--force" in done.output
    assert "Traceback" not in done.output
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert run("certs", tmp_path, "--force").exit_code == 0
    subprocess.run(
        ["openssl", "verify", "-CAfile", str(ca), str(tmp_path / "router.pem")],
        check=True,
        capture_output=True,
    )


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    then = datetime.now(UTC) - timedelta(days=360)
    issue_all(tmp_path, [], now=then)
    _, issued = issue_all(tmp_path, [])
    assert {one.ends for one in issued} == {certificate(tmp_path / "ca.pem").not_valid_after_utc}


@pytest.mark.parametrize(
    "wrong",
    [
        ("--name", "king"),
        ("--name", "client/a/b"),
        ("--name", "client/Müller"),
        ("--name", "client/a?b"),
        ("--name", "client/a%2fb"),
        ("--name", "client/a\n"),
        ("--name", "client/.."),
        ("--host", "a:1"),
        ("--days", "0"),
        ("--days", "9999"),
        ("--trust-domain", "UPPER/x"),
    ],
)
def test_invalid_option_is_refused_before_anything_is_written(
    run: Run, tmp_path: Path, wrong: tuple[str, str]
) -> None:
    done = run("certs", tmp_path / "c", *wrong)
    assert done.exit_code == 1, done.output
    assert "error" in done.output
    assert not (tmp_path / "c").exists()


def test_names_of_parties_are_names(tmp_path: Path) -> None:
    for text in ("client/a", "worker/gpu-1.pool_a"):
        assert NAME.holds(Party.parse(text).name)
    with pytest.raises(InvalidInput):
        Party.parse("client/")


def test_redis_users_are_printed_with_digests_alone(run: Run, tmp_path: Path) -> None:
    passwords: dict[str, Any] = {}
    for name in ("password", "scheduler-password", "admin-password"):
        (tmp_path / name).write_text(f"the {name}\n")
        passwords[name] = (f"--{name}-file", tmp_path / name)
    both = run("redis-acl", *passwords["password"])
    assert both.stdout.count(sha256(b"the password").hexdigest()) == 2
    assert "user default off" in both.stdout
    everyone = run("redis-acl", *(part for pair in passwords.values() for part in pair))
    lines = everyone.stdout.splitlines()
    for line, name in zip(lines, ("admin-password", "password", "scheduler-password"), strict=True):
        assert sha256(f"the {name}".encode()).hexdigest() in line
    assert "the password" not in everyone.output
    assert run("redis-acl").stdout.count(" off ") == 3
    assert run("redis-acl", "--password-file", tmp_path / "none").exit_code == 1


@pytest.mark.parametrize("name", ["a\0", "a?b", "a%2fb", "a/b", "a b", "", ".a", "a" * 64])
def test_odd_name_gets_no_certificate(name: str) -> None:
    with pytest.raises(InvalidInput, match="A-Z a-z 0-9"):
        Party("client", name)
    with pytest.raises(InvalidInput, match="a role is one of"):
        Party("king", "a")
