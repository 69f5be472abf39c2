"""A real redis-server for a test, on a separate unix socket."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from services.local.redis_server import find_redis_server, redis_arguments
from tests.support.waiting import wait_until


class RedisServers:
    """Servers on ports of 127.0.0.1, each a process that a test may kill."""

    def __init__(self, directory: Path, ports: Sequence[int]) -> None:
        """
        Args:
            ports: Of the servers that hold data.
        """
        self.directory = directory
        self.ports = list(ports)
        self.variables: Callable[[int], Mapping[str, str]] = lambda port: os.environ
        """Returns the environment of the server at a port."""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the servers that run, by port."""
        return {port: process.pid for port, process in self._processes.items()}

    def client(self, port: int) -> Redis:
        return Redis(port=port, socket_timeout=60.0, protocol=2)

    def role(self, port: int) -> str:
        """Return the role that a server reports, or an empty string if it does not answer."""
        try:
            with self.client(port) as server:
                return str(server.info("replication")["role"])
        except RedisError:
            return ""

    def masters(self) -> list[int]:
        """Return the ports of the servers that report themselves as masters."""
        return [port for port in self._running() if self.role(port) == "master"]

    def fullest_master(self) -> int:
        """Return the port of the master with the most keys."""

        def keys(port: int) -> int:
            with self.client(port) as master:
                return int(master.dbsize())

        return max(self.masters(), key=keys)

    def replica_port(self, port: int) -> int:
        """Return the port of the first replica of a master."""
        with self.client(port) as master:
            return int(master.info("replication")["slave0"]["port"])

    def commands(self, *command: str | int) -> None:
        """Run a command at every server that runs."""
        for port in self._running():
            with self.client(port) as server:
                server.execute_command(*command)

    def kill(self, port: int) -> None:
        """SIGKILL."""
        process = self._processes.pop(port)
        process.kill()
        process.wait()

    @contextmanager
    def suspended(self, port: int) -> Iterator[None]:
        """Within the context a server keeps its connections and answers nothing."""
        process = self._processes[port]
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def wait_takeover(self, replica: int) -> None:
        """Wait until this replica has become a master."""
        wait_until(lambda: self.role(replica) == "master", 120, "the replica to take over")

    def _running(self) -> list[int]:
        return [port for port in self.ports if port in self._processes]

    def _answers(self, port: int) -> bool:
        try:
            with self.client(port) as server:
                return bool(server.ping())
        except RedisError:
            return False

    def refusals(self) -> list[Any]:
        """Return the refusals that the ACLs of running servers logged."""
        reported: list[Any] = []
        for port in self._running():
            with self.client(port) as server:
                reported += server.acl_log()
        return reported


class RedisServer:
    """A redis-server that runs while its context is open.

    Args:
        durable: Keep its data, written through, over `kill` and `start`.
        arguments: Further arguments of the command line.
    """

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
        wait_until(self._answers, 120.0, "redis-server to answer")

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
