"""The worker's connection to authenticating routers: certificates and tokens that change during
operation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from shoal.transport.trust import Tls, TokenFile, Trust
from shoal.v1 import worker_pb2, worker_pb2_grpc

from libs.errors import InvalidInput, NoCapacity
from libs.serving import Security, Service, serving
from services.worker.mesh.link import Link, WorkerIdentity
from services.worker.settings import Settings
from tests.support.certificates import Certificates
from tests.worker.fakes import (
    SERVICE,
    SLOW,
    FakeLanes,
    FakeRouter,
    encode_job,
    routers,
    until,
    vector,
    vectors,
)
from tests.worker.running import MODEL, worker

SECRET = "s3cret-of-the-worker"
OTHER = "another-s3cret-of-the-worker"
REFUSED = "a router refuses this worker's token or certificate"


@pytest.fixture(autouse=True)
def polls_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.transport.trust.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("libs.serving.security.authentication.POLL_SECONDS", 0.01)


class WatchingRouter(FakeRouter):
    """Records certificates that were presented with pulls, PEM."""

    def __init__(self, lanes: FakeLanes) -> None:
        super().__init__(lanes)
        self.shown: list[bytes] = []

    async def Pull(self, request: worker_pb2.PullRequest, context: Any) -> worker_pb2.PullResponse:
        self.shown += context.auth_context().get("x509_pem_cert", [])
        return await super().Pull(request, context)


@asynccontextmanager
async def guarded(lanes: FakeLanes, security: Security) -> AsyncIterator[WatchingRouter]:
    """Run a FakeRouter behind the real server, which authenticates."""
    router = WatchingRouter(lanes)
    service = Service(
        SERVICE,
        partial(worker_pb2_grpc.add_WorkerServiceServicer_to_server, router),
        stream_calls=router.stream_calls(),
    )
    async with serving("127.0.0.1:0", [service], security=security, grace_seconds=0.0) as server:
        router.address = server.address
        yield router


def write_tokens(path: Path, token: str, role: str = "worker") -> None:
    path.write_text(f"tokens:\n- {{token: {token}, subject: w1, role: {role}, tenant: w1}}\n")


async def test_worker_continues_with_renewed_certificates(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certificates")
    lanes = FakeLanes()
    mine = certificates.issue("worker")
    trust: Any = Trust(Tls(certificates.ca, mine.certificate, mine.key))
    async with (
        guarded(lanes, certificates.security(asks_callers=True)) as router,
        worker(tmp_path / "models", [router], trust=trust) as bay,
    ):
        lanes.put(MODEL, encode_job("before", "a"))
        await until(lambda: "before" in lanes.answers)
        lanes.put(MODEL, encode_job("across", SLOW))
        await until(lambda: len(bay.model.batches) == 2)
        for file in certificates.directory.iterdir():
            file.unlink()
        # Another authority: connections with the old files would fail.
        renewed = Certificates(certificates.directory)
        shown_now = renewed.issue("worker").certificate.read_bytes().strip()
        renewed.security(asks_callers=True)
        bay.model.gate.set()
        await until(lambda: "across" in lanes.answers)
        names = [f"after {number}" for number in range(20)]
        for name in names:
            lanes.put(MODEL, encode_job(name, name))
        await until(lambda: all(name in lanes.answers for name in names))
        assert [vectors(lanes.answer_of(name)) for name in names] == [
            [vector(name)] for name in names
        ]
        await until(lambda: router.shown[-1].strip() == shown_now)
        assert router.shown[0].strip() != shown_now
        assert all(len(answers) == 1 for answers in lanes.answers.values())
        assert not lanes.handed_back


async def test_unauthorised_worker_retries_and_logs_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, mine = tmp_path / "tokens.yaml", tmp_path / "token"
    write_tokens(tokens, OTHER)
    mine.write_text(SECRET)
    lanes = FakeLanes()
    trust: Any = Trust(token=TokenFile(mine))
    caplog.set_level(logging.DEBUG)
    async with (
        guarded(lanes, Security(tokens=tokens)) as router,
        worker(tmp_path / "models", [router], trust=trust) as bay,
    ):
        lanes.put(MODEL, encode_job("j1", "a"))
        await until(lambda: REFUSED in caplog.text)
        write_tokens(tokens, SECRET, role="client")  # known, but not as a worker
        await asyncio.sleep(0.3)
        assert "j1" not in lanes.answers
        write_tokens(tokens, SECRET)
        await until(lambda: "j1" in lanes.answers)
        write_tokens(tokens, OTHER)
        await asyncio.sleep(0.3)
        mine.write_text(OTHER)
        lanes.put(MODEL, encode_job("j2", "b"))
        await until(lambda: "j2" in lanes.answers)
        assert bay.done is not None
        assert not bay.done.done()
    assert caplog.text.count(REFUSED) == 1
    assert SECRET not in caplog.text


async def test_answers_wait_for_a_valid_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, mine = tmp_path / "tokens.yaml", tmp_path / "token"
    write_tokens(tokens, SECRET)
    mine.write_text(SECRET)
    lanes = FakeLanes()
    trust: Any = Trust(token=TokenFile(mine))
    async with (
        guarded(lanes, Security(tokens=tokens)) as router,
        worker(tmp_path / "models", [router], trust=trust) as bay,
    ):
        lanes.put(MODEL, encode_job("j1", SLOW))
        await asyncio.to_thread(_started, bay)
        write_tokens(tokens, OTHER)
        await until(lambda: REFUSED in caplog.text, "the router to refuse the old token")
        bay.model.gate.set()
        await asyncio.sleep(0.3)
        assert "j1" not in lanes.answers
        mine.write_text(OTHER)
        await until(lambda: "j1" in lanes.answers)
        assert len(lanes.answers["j1"]) == 1


def _started(bay: Any) -> None:
    while MODEL not in bay.models or not bay.model.started.wait(0.01):
        pass


async def test_every_router_is_tried_before_failing(tmp_path: Path) -> None:
    refusing, taking = tmp_path / "refusing.yaml", tmp_path / "taking.yaml"
    write_tokens(refusing, OTHER)
    write_tokens(taking, SECRET)
    lanes = FakeLanes()
    async with (
        guarded(lanes, Security(tokens=refusing)) as first,
        guarded(lanes, Security(tokens=taking)) as second,
        Link(
            WorkerIdentity("w1", "e1", "cpu"), [first.address, second.address], Trust(token=SECRET)
        ) as link,
        Link(WorkerIdentity("w1", "e1", "cpu"), [first.address], Trust(token=SECRET)) as lost,
    ):
        await link.heartbeat(worker_pb2.HeartbeatRequest(worker_id="w1"))
        assert len(lanes.heartbeats) == 1
        with pytest.raises(NoCapacity, match="UNAUTHENTICATED"):
            await lost.heartbeat(worker_pb2.HeartbeatRequest(worker_id="w1"))


def test_settings_validate_credentials(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    mine = certificates.issue("worker")
    (tmp_path / "token").write_text(SECRET)
    files = {
        "SHOAL_TLS_CA": certificates.ca,
        "SHOAL_TLS_CERT": mine.certificate,
        "SHOAL_TLS_KEY": mine.key,
    }
    environ = {name: str(path) for name, path in files.items()} | {
        "SHOAL_TOKEN": SECRET,
        "SHOAL_ROUTERS": "10.0.0.1:50051",
    }
    settings = Settings.from_env(environ)
    assert settings.trust.metadata() == (("authorization", f"Bearer {SECRET}"),)
    reported = f"{settings.describe()} {settings!r}"
    assert "mutual TLS, a token" in reported
    assert SECRET not in reported
    beyond = {"SHOAL_ROUTERS": "10.0.0.1:50051", "SHOAL_TOKEN_FILE": str(tmp_path / "token")}
    with pytest.raises(InvalidInput, match="unencrypted"):
        Settings.from_env(beyond)
    Settings.from_env(beyond | {"SHOAL_TLS": "1"})
    Settings.from_env(beyond | {"SHOAL_TOKEN_WITHOUT_TLS": "1"})
    for wrong in (
        {"SHOAL_TLS_CA": "/nowhere"},
        {"SHOAL_TLS_CERT": "/nowhere"},
        {"SHOAL_TOKEN_FILE": "/nowhere"},
    ):
        with pytest.raises(InvalidInput, match=r"/nowhere|SHOAL_TLS_KEY"):
            Settings.from_env(wrong)


async def test_broken_connection_triggers_a_heartbeat_and_reconnects(
    tmp_path: Path,
) -> None:
    lanes = FakeLanes()
    async with (
        routers(lanes, 2) as both,
        worker(tmp_path / "models", both, heartbeat_seconds=5.0) as bay,
    ):
        await until(lambda: bool(lanes.connects) and bool(lanes.heartbeats), "the first connection")
        first, other = sorted(both, key=lambda router: router.address != lanes.connects[0][0])
        before = len(lanes.heartbeats)
        await first.stop()
        await until(lambda: len(lanes.connects) > 1, "another connection")
        await until(lambda: len(lanes.heartbeats) > before, "a heartbeat")
        assert lanes.connects[-1] == (other.address, lanes.connects[0][1])
        assert bay.done is not None
        assert not bay.done.done()
