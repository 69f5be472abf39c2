"""`shoal top` on a real mesh: one snapshot, a line of JSON per poll, and the live view while its
router is killed and restarted.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from struct import pack
from termios import TIOCSWINSZ
from typing import Any

import pytest
import shoal
from shoal.cli import main
from typer.testing import CliRunner

from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

MODEL = "org/small"
TOP = (sys.executable, "-m", "shoal", "top")
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run a router, a scheduler and a worker."""
    directory = write_checkpoint(
        "bert", tmp_path_factory.mktemp("models") / "small", sentence=SentenceFiles()
    )
    with Cluster(
        tmp_path_factory.mktemp("top"), models=f"{MODEL}={directory}", schedulers=1
    ) as cluster:
        yield cluster


@pytest.fixture
def running(started: Cluster) -> Cluster:
    """Restore the complete mesh, whatever an earlier test did to it."""

    def is_all_there() -> bool:
        seen = client.mesh()
        is_idle = not any(
            lane.queued_tokens or lane.leased_tokens or lane.oldest_seconds for lane in seen.lanes
        )
        return bool(
            seen.lanes and is_idle and seen.pools and seen.workers and seen.workers[0].resident
        )

    with shoal.Client(started.address) as client:
        client.encode(MODEL, ["a text"] * 20, timeout=180)
        wait_until(is_all_there, 60, "worker, model, lane and plan")
    return started


def run(cluster: Cluster, *arguments: str, reach_seconds: float = 60.0) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of a command."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shoal.cli.options.REACH_SECONDS", reach_seconds)
        done = CliRunner().invoke(
            main.build(), ["top", "--address", cluster.address, *arguments], env={"COLUMNS": "80"}
        )
    return done.exit_code, done.stdout, done.stderr


def test_snapshot_as_json(running: Cluster) -> None:
    code, out, _ = run(running, "--once", "--json", "--interval", "0.5")
    seen: dict[str, Any] = json.loads(out)
    assert code == 0
    assert (seen["router_id"], seen["scheduler_id"], seen["address"]) == (
        "router-0",
        "scheduler-0",
        running.address,
    )
    (pool,), (worker,), (lane,) = seen["pools"], seen["workers"], seen["lanes"]
    assert (pool["pool"], pool["workers"], pool["draining"], pool["queued_tokens"]) == (
        "cpu",
        1,
        0,
        0,
    )
    assert pool["desired_workers"] >= 1
    assert (worker["worker_id"], worker["resident"]) == ("worker-0", [MODEL])
    assert (lane["model"], lane["oldest_seconds"]) == (MODEL, 0)
    assert isinstance(lane["tokens_per_second"], float)
    (model,) = seen["models"]
    assert (model["model"], model["state"], model["pools"], model["resident_on"]) == (
        MODEL,
        "resident",
        ["cpu"],
        ["worker-0"],
    )


def test_snapshot_as_text_and_of_one_pool(running: Cluster) -> None:
    code, out, _ = run(running, "--once", "--interval", "0.5", "--pool", "cpu")
    assert code == 0
    for wanted in (
        "router router-0, scheduler scheduler-0 leads",
        "worker-0",
        MODEL,
        "desired",
        "tokens/s",
    ):
        assert wanted in out
    _, out, _ = run(running, "--once", "--interval", "0.5", "--pool", "h100")
    assert "the mesh has no pool 'h100'" in out
    assert "worker-0" not in out


def test_without_a_terminal_and_without_a_router(running: Cluster) -> None:
    code, out, err = run(running)
    assert (code, out) == (2, "")
    assert "--once or --json" in err
    code, out, err = run(running, "--once", "--address", "127.0.0.1:1", reach_seconds=3.0)
    assert (code, out) == (1, "")
    assert "127.0.0.1:1" in err
    assert "shoal up" in err
    assert run(running, "--interval", "0.1", "--once")[0] == 2


def test_watch_prints_a_json_line_per_poll(running: Cluster) -> None:
    command = [*TOP, "--json", "--interval", "0.2", "--address", running.address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert [look["router_id"] for look in looks] == ["router-0"] * 3
    assert (process.returncode, err) == (0, "")


class Terminal:
    """The output of `shoal top` on a terminal of 80 columns and 24 lines."""

    def __init__(self, keyboard: int) -> None:
        self._keyboard = keyboard
        self._drawn = b""
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def screen(self) -> str:
        """Return the last complete screen. Each begins with the same words."""
        pictures = _CONTROL.sub(b"", self._drawn).decode(errors="replace").split("shoal top")
        return pictures[-2] if len(pictures) > 2 else ""

    def press(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def wait_for(self, *words: str, without: str = "") -> None:
        def is_there() -> bool:
            screen = self.screen
            return all(word in screen for word in words) and not (without and without in screen)

        wait_until(is_there, 120.0, f"{words} without {without!r} on the screen")

    def _read(self) -> None:
        try:
            while drawn := os.read(self._keyboard, 65536):
                self._drawn += drawn
        except OSError:
            return  # the process has ended


@contextmanager
def live(cluster: Cluster) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    """Run `shoal top` on a new terminal."""
    keyboard, screen = pty.openpty()
    ioctl(screen, TIOCSWINSZ, pack("HHHH", 24, 80, 0, 0))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
    } | {"TERM": "xterm"}
    command = [*TOP, "--interval", "0.2", "--address", cluster.address]
    with subprocess.Popen(
        command, stdin=screen, stdout=screen, stderr=screen, env=environment
    ) as process:
        os.close(screen)
        try:
            yield process, Terminal(keyboard)
        finally:
            process.kill()
    os.close(keyboard)


def test_live_view_survives_its_router(running: Cluster) -> None:
    with live(running) as (process, terminal):
        terminal.wait_for(
            "router router-0, scheduler scheduler-0 leads",
            "worker-0",
            MODEL,
            "desired",
            without="STALE",
        )
        running.kill("router-0")
        terminal.wait_for("STALE", "cannot reach a router", "worker-0")  # the last screen stays
        running.start("router-0")
        running.wait_ready(running.addresses[0])
        terminal.wait_for("worker-0", MODEL, without="STALE")
        terminal.press(b"xq")
        assert process.wait(60) == 0
