"""`shoal up` as a newcomer meets it."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
import shoal
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.errors import InvalidInput
from services.local.settings import MINILM, free_port, layout

SHOAL = [sys.executable, "-m", "shoal"]


@contextmanager
def up(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([*SHOAL, "up", *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def test_up_says_how_to_talk_to_it_answers_and_stops_on_ctrl_c() -> None:
    port = free_port()
    with up("--port", str(port), "--workers", "1") as process:
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
        told = subprocess.run([sys.executable, "-m", *shlex.split(advice)], check=True, capture_output=True, text=True)
        assert "384" in told.stdout
        scaler = re.search(r"scaler\s+(\S+)", text)
        assert scaler is not None
        with grpc.insecure_channel(scaler[1]) as channel:
            ready = health_pb2.HealthCheckRequest(service="liveness")
            answer = health_pb2_grpc.HealthStub(channel).Check(ready, wait_for_ready=True, timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        logs = re.search(r"logs\s+(\S+)", text)
        assert logs is not None


def test_up_with_tls_says_commands_that_work_and_lets_nobody_else_in() -> None:
    with up("--port", "0", "--workers", "1", "--no-scheduler", "--tls") as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line.strip())
            if "Ctrl-C" in line:
                break
        (command,) = (line for line in said if line.startswith("python -c"))
        told = subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True, capture_output=True, text=True)
        assert told.stdout.strip() == "(1, 384)"
        encode, status = (shlex.split(line) for line in said if line.startswith("shoal"))
        assert "384" in subprocess.run([*SHOAL, *encode[1:]], check=True, capture_output=True, text=True).stdout
        assert "worker-0" in subprocess.run([*SHOAL, *status[1:]], check=True, capture_output=True, text=True).stdout
        address = encode[encode.index("--address") + 1]
        with shoal.Client(address, retry=shoal.RetryPolicy(attempts=1)) as nobody, pytest.raises(shoal.errors.CannotConnect):
            nobody.encode(MINILM, "Hello, mesh")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_up_says_which_port_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = subprocess.run([*SHOAL, "up", "--port", str(port)], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert f"port {port}" in run.stderr
    assert "--port" in run.stderr
    assert "Traceback" not in run.stderr


def test_up_names_a_model_folder_that_is_not_there() -> None:
    run = subprocess.run([*SHOAL, "up", "--model", "my/model=/nowhere"], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "/nowhere" in run.stderr


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(InvalidInput, match="cores"):
        layout(1, 4096)
