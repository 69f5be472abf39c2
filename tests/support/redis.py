"""A real redis-server for a test, on a separate unix socket."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from services.local.redis_server import find_redis_server, redis_arguments
from tests.support.waiting import wait_until


class RedisServer:
    """Runs while its context is open. `durable`: keeps its data, written through, over `kill` and
    `start`. `arguments`: more of the command line."""

    def __init__(self, *, durable: bool = False, arguments: Sequence[str] = ()) -> None:
        # A socket's path may have 107 characters, and pytest's directories are long.
        self._directory = Path(tempfile.mkdtemp(prefix="shoal-redis-"))
        self._socket = self._directory / "redis.sock"
        self._command = redis_arguments(find_redis_server(), self._directory)
        if durable:
            self._command[self._command.index("--appendonly") + 1] = "yes"
            self._command += ["--appendfsync", "always"]
        self._command += arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self._socket

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> None:
        """Returns once it answers."""
        self._socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        wait_until(self._answers, 60.0, "redis-server to answer")

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP, until `thaw`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            return self._ping().startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def _ping(self) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5.0)
            connection.connect(str(self._socket))
            connection.sendall(b"PING\r\n")
            return connection.recv(4096)
