"""Preemption notices from small servers that simulate clouds, and from files; and a worker's
reaction.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.v1 import worker_pb2

from libs.errors import InvalidInput
from services.worker.machine.notice import (
    GOOGLE_SECONDS,
    LAST_SECONDS,
    NOTICE_STOP_SECONDS,
    AwsSource,
    FileSource,
    GoogleSource,
    grace_left,
    noticed,
    parse_source,
    stops_at,
)
from services.worker.settings import Settings
from tests.worker.fakes import (
    HANG_SECONDS,
    SLOW,
    FakeLanes,
    encode_job,
    routers,
    until,
    vector,
    vectors,
)
from tests.worker.running import MODEL, worker

seconds = st.floats(0, 600)


class FakeMetadata(ThreadingHTTPServer):
    """The used part of both clouds' metadata servers. `notice` is the body of the notice, empty for
    none.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.notice = ""
        self.tokens: list[str] = []
        """Issued tokens; only the last one is valid."""
        self.broken = False
        self.asked = 0

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeMetadata

    def do_PUT(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.server.tokens.append(f"token-{len(self.server.tokens)}")
        self._reply(200, self.server.tokens[-1])

    def do_GET(self) -> None:
        self.server.asked += 1
        notice = self.server.notice
        if self.server.broken:
            self._reply(500, "")
        elif self.path == "/latest/meta-data/spot/instance-action":
            has_token = self.headers["X-aws-ec2-metadata-token"] in self.server.tokens[-1:]
            self._reply(
                401 if not has_token else 200 if notice else 404, notice if has_token else ""
            )
        elif self.path == "/computeMetadata/v1/instance/preempted":
            self._reply(
                200 if self.headers["Metadata-Flavor"] == "Google" else 403, notice or "FALSE"
            )
        else:
            self._reply(404, "")

    def _reply(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMetadata]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # must not be used
    with _served() as server:
        yield server


@contextmanager
def _served() -> Iterator[FakeMetadata]:
    with FakeMetadata() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_aws_notice(metadata: FakeMetadata) -> None:
    source = AwsSource(metadata.base)
    assert source.gone_at() is None
    assert source.gone_at() is None
    assert len(metadata.tokens) == 1
    metadata.tokens.append("another's, so that ours has run out")
    metadata.notice = '{"action": "terminate", "time": "2026-11-20T08:22:00Z"}'
    assert source.gone_at() == datetime(2026, 11, 20, 8, 22, tzinfo=UTC).timestamp()
    metadata.notice = '{"action": "terminate"}'
    with pytest.raises(ValueError, match="no time"):
        source.gone_at()


def test_gcp_notice(metadata: FakeMetadata) -> None:
    source = GoogleSource(metadata.base, clock=lambda: 1000.0)
    assert source.gone_at() is None
    metadata.notice = "TRUE"
    assert source.gone_at() == 1000.0 + GOOGLE_SECONDS


def test_file_notice(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    source = FileSource(path)
    assert source.gone_at() is None
    path.write_text("90\n")
    os.utime(path, (1000, 1000))
    assert source.gone_at() == 1090
    path.write_text("2026-11-20T08:22:00")
    assert source.gone_at() == datetime(2026, 11, 20, 8, 22, tzinfo=UTC).timestamp()
    path.write_text("2026-11-20T08:22:00+01:00")
    assert source.gone_at() == datetime(2026, 11, 20, 7, 22, tzinfo=UTC).timestamp()
    for nonsense in ("", "soon", "nan", "-3", "inf"):
        path.write_text(nonsense)
        with pytest.raises(ValueError, match="isoformat"):
            source.gone_at()


async def test_failing_source_is_polled_again(metadata: FakeMetadata) -> None:
    metadata.broken = True
    metadata.notice = "TRUE"
    waiting = asyncio.create_task(noticed(GoogleSource(metadata.base, clock=lambda: 0.0), 0.01))
    await until(lambda: metadata.asked >= 3)
    assert not waiting.done()
    metadata.broken = False
    assert await waiting == GOOGLE_SECONDS


async def test_missing_source_is_polled_again(tmp_path: Path) -> None:
    with _served() as server:
        base = server.base
    waiting = asyncio.create_task(noticed(AwsSource(base), 0.01))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    waiting.cancel()


def test_setting_selects_the_source() -> None:
    assert parse_source("none") is None
    assert isinstance(parse_source("aws"), AwsSource)
    assert isinstance(parse_source("gcp"), GoogleSource)
    source = parse_source("file:/run/notice")
    assert isinstance(source, FileSource)
    assert Settings.from_env({"SHOAL_SPOT": "file:/run/notice"}).spot == "file:/run/notice"
    assert Settings.from_env({}).spot == "none"
    for wrong in ("azure", "file:", "file:notice", "AWS"):
        with pytest.raises(InvalidInput, match="SHOAL_SPOT"):
            Settings.from_env({"SHOAL_SPOT": wrong})


@given(seconds, seconds, seconds)
def test_stop_leaves_time_to_serve_and_to_shut_down(
    ahead: float, passed: float, grace: float
) -> None:
    gone_at = 1000.0 + ahead
    stop = stops_at(gone_at, grace)
    assert gone_at - NOTICE_STOP_SECONDS <= stop <= gone_at
    assert gone_at - stop <= grace + 1e-6
    now = max(1000.0, stop) + passed
    left = grace_left(gone_at, now, grace)
    assert 0 <= left <= grace
    assert left == 0 or now + left <= gone_at - LAST_SECONDS + 1e-6


@pytest.fixture
def notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a notice that a worker looks for often."""
    monkeypatch.setattr("services.worker.app.noticed", partial(noticed, interval_seconds=0.05))
    return tmp_path / "notice"


def announce(notice: Path, seconds: float) -> None:
    """Write that the machine is preempted in this time."""
    notice.write_text(datetime.fromtimestamp(time.time() + seconds, UTC).isoformat())


async def test_worker_with_a_notice_keeps_serving_and_loads_no_model(
    tmp_path: Path, notice: Path
) -> None:
    lanes, root, changes = FakeLanes(), tmp_path / "models", {"spot": f"file:{notice}"}
    async with routers(lanes) as running, worker(root, running, "org/cold", **changes) as bay:  # type: ignore[arg-type]
        lanes.put(MODEL, encode_job("before", "before"))
        await until(lambda: "before" in lanes.answers)
        assert not lanes.heartbeats[-1].HasField("preempted_in_seconds")
        announce(notice, 600.0)
        await until(lambda: lanes.heartbeats[-1].HasField("preempted_in_seconds"))
        assert 0 < lanes.heartbeats[-1].preempted_in_seconds <= 600
        lanes.next_response = worker_pb2.HeartbeatResponse(
            directives=[worker_pb2.Directive(seq=1, load_model="org/cold")]
        )
        lanes.put("org/cold", encode_job("cold", "cold"))
        lanes.put(MODEL, encode_job("meanwhile", "meanwhile"))
        await until(lambda: "meanwhile" in lanes.answers)
        await until(lambda: lanes.heartbeats[-1].directive_seq == 1)
        assert vectors(lanes.answer_of("meanwhile")) == [vector("meanwhile")]
        assert not lanes.heartbeats[-1].draining
        assert list(bay.models) == [MODEL]
        assert lanes.queued["org/cold"]


async def test_worker_with_a_notice_stops_before_its_own_grace_period_ends(
    tmp_path: Path, notice: Path
) -> None:
    lanes, root = FakeLanes(), tmp_path / "models"
    changes = {"spot": f"file:{notice}", "grace_seconds": 5 * HANG_SECONDS}
    async with routers(lanes) as running, worker(root, running, **changes) as bay:  # type: ignore[arg-type]
        lanes.put(MODEL, encode_job("slow", SLOW))
        await until(lambda: any("slow" in jobs for jobs in lanes.leased.values()))
        announce(notice, LAST_SECONDS + 1.0)
        assert bay.done is not None
        await asyncio.wait_for(asyncio.shield(bay.done), HANG_SECONDS)
        assert lanes.heartbeats[-1].leaving
        assert lanes.handed_back == ["slow"]
        assert not any(lanes.leased.values())
