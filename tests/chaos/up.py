"""`shoal up` as the mesh of a run (`--target up`): only its supervisor restarts processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

import psutil

from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

START_SECONDS: Final = 120.0
REST_SECONDS: Final = 25.0
"""Time between two faults on one child: `shoal up` gives up a child that ends four times in a
minute.
"""


class Up(Cluster):
    """One `shoal up`. Its children can be killed and frozen by their names; `start` does nothing,
    since it must start them.
    """

    def __init__(
        self, directory: Path, *, models: str, workers: int, environment: Mapping[str, str]
    ) -> None:
        super().__init__(
            directory, models=models, workers=workers, schedulers=1, environment=environment
        )
        self.routers, self.schedulers = ["router"], ["scheduler"]
        self._up: subprocess.Popen[bytes] | None = None
        self._scaler = ""

    @property
    def redis_url(self) -> str:
        (socket,) = self.directory.glob("shoal-*/redis/redis.sock")
        return f"unix://{socket}"

    @property
    def scheduler_addresses(self) -> list[str]:
        return [self._scaler]

    def __enter__(self) -> Up:
        command = [
            sys.executable,
            "-m",
            "shoal",
            "up",
            "--port",
            str(self.ports[0]),
            "--workers",
            str(len(self.workers)),
        ]
        with (self.directory / "up.log").open("ab") as log:
            self._up = subprocess.Popen(
                [
                    *command,
                    "--threads",
                    "1",
                    "--dtype",
                    "float32",
                    "--keep-logs",
                    str(self.directory),
                ],
                env=self._environment | {"TMPDIR": str(self.directory)},
                stdout=log,
                stderr=log,
            )
        wait_until(
            lambda: self._up is None or self._up.poll() is not None or "Ctrl-C" in self._said(),
            START_SECONDS,
            "shoal up",
        )
        if self._up.poll() is not None:
            raise RuntimeError(f"shoal up ended with status {self._up.returncode}:\n{self._said()}")
        self._scaler = next(
            line.split()[1] for line in self._said().splitlines() if line.startswith("scaler")
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raises RuntimeError if the mesh is not whole at the end, or does not stop as it
        should.
        """
        assert self._up is not None
        gone = [
            name
            for name in (*self.routers, *self.schedulers, *self.workers, "redis")
            if self._child(name) is None
        ]
        self.resume(self.workers)
        if self._up.poll() is None:
            self._up.send_signal(signal.SIGINT)
        status = self._up.wait(90)
        if kind is None and (gone or status):
            raise RuntimeError(
                f"at the end {gone or 'nobody'} was gone, and shoal up ended with status "
                f"{status}:\n{self._said()}"
            )

    def start(self, name: str, more: Mapping[str, str] | None = None) -> None:
        return

    def kill(self, name: str) -> None:
        child = self._child(name)
        if child is not None:
            child.kill()
            psutil.wait_procs([child], timeout=10)

    def end(self) -> None:
        """Kills it; its children die with it."""
        if self._up is not None:
            self._up.kill()
            self._up.wait()

    def signal(self, names: Sequence[str], number: signal.Signals) -> None:
        for name in names:
            child = self._child(name)
            if child is not None:
                child.send_signal(number)

    def _child(self, name: str) -> psutil.Process | None:
        assert self._up is not None
        mark = {
            "redis": "redis-server",
            "router": "services.router",
            "scheduler": "services.scheduler",
        }.get(name, "services.worker")
        try:
            children = psutil.Process(self._up.pid).children()
        except psutil.NoSuchProcess:
            return None
        return next((child for child in children if _is(child, mark, name)), None)

    def _said(self) -> str:
        return (self.directory / "up.log").read_text(errors="replace")


def _is(child: psutil.Process, mark: str, name: str) -> bool:
    try:
        is_role = mark in " ".join(child.cmdline())
        return is_role and (
            mark != "services.worker" or child.environ().get("SHOAL_WORKER_ID") == name
        )
    except psutil.Error:  # it has just ended
        return False
