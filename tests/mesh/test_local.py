"""`shoal up` as a new user sees it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import psutil
import pytest
import shoal
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.local.settings import MINILM, free_port
from tests.support.waiting import wait_until

NAMES = ("redis", "router", "scheduler", "worker-0", "edge")
SHOAL = [sys.executable, "-m", "shoal"]


@contextmanager
def up(
    *arguments: str, environment: Mapping[str, str] = os.environ
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*SHOAL, "up", *arguments],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def test_up_prints_usage_answers_and_stops_on_ctrl_c() -> None:
    port = free_port()
    with up("--port", str(port), "--http-port", "0", "--workers", "1") as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "Ctrl-C" in line:
                break
        text = "".join(said)
        assert f"127.0.0.1:{port}" in text
        assert "grpcurl -plaintext" in text
        assert "import shoal" in text
        with shoal.Client(f"127.0.0.1:{port}") as client:
            dense = client.encode(MINILM, "Hello, mesh").dense
            assert dense is not None
            assert dense.shape == (1, 384)
        advice = next(line for line in said if line.strip().startswith("shoal encode"))
        reported = subprocess.run(
            [sys.executable, "-m", *shlex.split(advice)], check=True, capture_output=True, text=True
        )
        assert "384" in reported.stdout
        advice = next(line for line in said if line.strip().startswith("curl"))
        reported = subprocess.run(shlex.split(advice), check=True, capture_output=True, text=True)
        assert len(json.loads(reported.stdout)["data"][0]["embedding"]) == 384
        scaler = re.search(r"scaler\s+(\S+)", text)
        assert scaler is not None
        with grpc.insecure_channel(scaler[1]) as channel:
            ready = health_pb2.HealthCheckRequest(service="liveness")
            answer = health_pb2_grpc.HealthStub(channel).Check(
                ready, wait_for_ready=True, timeout=60
            )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
        logs = re.search(r"logs\s+(\S+)", text)
        assert logs is not None


def test_up_with_a_model_answers_requests_without_a_model() -> None:
    with up(MINILM, "--port", "0", "--http-port", "0", "--workers", "1") as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        said = "".join(lines)
        assert f"requests that name none are for {MINILM}" in said
        url = re.search(r"http +(http://\S+)", said)
        assert url is not None
        request = urllib.request.Request(
            f"{url[1]}/embed", json.dumps({"inputs": "Hello"}).encode()
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert len(json.load(answer)[0]) == 384
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


def test_up_with_tls_prints_working_commands_and_refuses_others() -> None:
    with up("--port", "0", "--workers", "1", "--no-scheduler", "--tls") as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line.strip())
            if "Ctrl-C" in line:
                break
        (command,) = (line for line in said if line.startswith("python -c"))
        reported = subprocess.run(
            [sys.executable, *shlex.split(command)[1:]], check=True, capture_output=True, text=True
        )
        assert reported.stdout.strip() == "(1, 384)"
        encode, status = (shlex.split(line) for line in said if line.startswith("shoal"))
        assert (
            "384"
            in subprocess.run(
                [*SHOAL, *encode[1:]], check=True, capture_output=True, text=True
            ).stdout
        )
        assert (
            "worker-0"
            in subprocess.run(
                [*SHOAL, *status[1:]], check=True, capture_output=True, text=True
            ).stdout
        )
        (curl,) = (shlex.split(line) for line in said if line.startswith("curl"))
        assert b"embedding" in subprocess.run(curl, check=True, capture_output=True).stdout
        place = curl.index("--cert")
        assert (
            subprocess.run(
                [*curl[:place], *curl[place + 4 :]], check=False, capture_output=True
            ).returncode
            != 0
        )
        address = encode[encode.index("--address") + 1]
        with (
            shoal.Client(address, retry=shoal.RetryPolicy(attempts=1)) as nobody,
            pytest.raises(shoal.errors.CannotConnect),
        ):
            nobody.encode(MINILM, "Hello, mesh")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


def test_killed_processes_restart_and_calls_in_flight_are_answered(
    tmp_path: Path,
) -> None:
    """Send kill -9 to a worker, the router, the scheduler and Redis in turn, then Ctrl-C with a
    call in flight.
    """
    logs = tmp_path / "logs"
    environment = os.environ | {"SHOAL_LEASE_MS": "3000"}
    with up(
        "--port", "0", "--workers", "2", "--keep-logs", str(logs), environment=environment
    ) as process:
        address = _address(process)
        with shoal.Client(address, timeout=180) as client:
            client.encode(MINILM, ["load it"])
            for name in ("worker-1", "router", "scheduler", "edge", "redis"):
                old = _child(process.pid, name)
                old.kill()
                dense = client.encode(MINILM, f"after {name}").dense
                assert dense is not None
                assert dense.shape == (1, 384)
                wait_until(
                    lambda name=name: _restarts(client, name) == 1,  # type: ignore[misc]
                    120,
                    f"{name} to return",
                )
                assert _child(process.pid, name).pid != old.pid
            status = subprocess.run(
                [*SHOAL, "status", "--address", address], check=True, capture_output=True, text=True
            ).stdout
            assert "processes" in status
            assert "SIGKILL" in status
            wait_until(lambda: len(client.mesh().workers) == 2, 60, "both workers to report")
            with ThreadPoolExecutor() as pool:
                answer = pool.submit(client.encode, MINILM, ["word " * 200] * 16)
                wait_until(
                    lambda: (
                        answer.done() or any(lane.leased_tokens for lane in client.mesh().lanes)
                    ),
                    60,
                    "the call to be in flight",
                )
                process.send_signal(signal.SIGINT)
                dense = answer.result().dense
            assert dense is not None
            assert dense.shape == (16, 384)
        assert process.wait(120) == 0
    assert {path.name for path in logs.iterdir()} == {
        f"{name}.log" for name in (*NAMES, "worker-1")
    }


def test_kill_9_of_up_leaves_no_process() -> None:
    with up("--port", "0", "--workers", "1") as process:
        _address(process)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == len(NAMES)
        process.kill()
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert len(gone) == len(NAMES)


def test_failed_start_reports_why_and_keeps_its_logs() -> None:
    run = subprocess.run(
        [*SHOAL, "up", "--port", "0"],
        env=os.environ | {"SHOAL_BATCH_ITEMS": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "SHOAL_BATCH_ITEMS" in run.stderr
    assert "Traceback" not in run.stderr
    log = re.search(r"\((\S+/worker-\d+\.log)\)", run.stderr)
    assert log is not None
    assert "SHOAL_BATCH_ITEMS" in Path(log[1]).read_text()
    shutil.rmtree(Path(log[1]).parents[1])


def _address(process: subprocess.Popen[str]) -> str:
    """Return the address once the mesh is up. Later output is read and dropped."""
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "Ctrl-C" in line:
            break
    found = re.search(r"on (127\.0\.0\.1:\d+)", said)
    assert found is not None, said
    threading.Thread(target=process.stderr.read, daemon=True).start()
    return found[1]


def _child(pid: int, name: str) -> psutil.Process:
    """Return a child process of `shoal up`."""
    role, _, number = name.partition("-")
    wanted = "redis" if role == "redis" else f"services.{role}"
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):  # it has just ended
            words = " ".join(child.cmdline())
            if wanted in words and (not number or child.environ().get("SHOAL_WORKER_ID") == name):
                return child
    raise AssertionError(f"{name} does not run")


def _restarts(client: shoal.Client, name: str) -> int:
    """Return the restarts of a running process; 0 if it does not run, or no process can be
    asked.
    """
    try:
        found = {process.name: process for process in client.mesh().processes}
    except shoal.ShoalError:
        return 0
    return found[name].restarts if name in found and found[name].state == "running" else 0


def test_up_reports_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = subprocess.run(
            [*SHOAL, "up", "--port", str(port)], capture_output=True, text=True, check=False
        )
    assert run.returncode == 1
    assert f"port {port}" in run.stderr
    assert "--port" in run.stderr
    assert "Traceback" not in run.stderr


def test_up_reports_a_missing_model_folder() -> None:
    run = subprocess.run(
        [*SHOAL, "up", "--model", "my/model=/nowhere"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "/nowhere" in run.stderr
