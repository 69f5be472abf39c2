"""Real Sentinels over a master and its replicas, and a fake one that names whatever a test
wants.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from libs.queue.connection.acl import ROUTER, acl_file
from services.local.redis_server import find_redis_server, redis_arguments
from services.local.settings import free_port
from tests.support.redis import RedisServer, RedisServers
from tests.support.waiting import wait_until

SERVICE = "mymaster"
DOWN_MS = 4000
"""Milliseconds without a reply after which a server counts as down. With 1,000, a busy machine let
a healthy server appear down.
"""


class SentinelSet(RedisServers):
    """A master, its replicas and three Sentinels on ports of 127.0.0.1, each a process that a test
    may kill.

    Runs while its context is open.

    Args:
        replicas: the number of replicas.
        down_ms: milliseconds without a reply after which a server counts as down.
        is_durable: the servers keep their data when they are killed.
        password: for the servers' user `default`.
        sentinel_password: for the Sentinels' user `default`.
        users: lines of the servers' ACL in addition to those of `shoal redis-acl`, with the same
            password. Sentinels connect as `sentinel`, replicas as `replica`, and the URL's user is
            the router's.
    """

    def __init__(
        self,
        *,
        password: str = "",
        sentinel_password: str = "",
        users: str = "",
        replicas: int = 2,
        down_ms: int = DOWN_MS,
        is_durable: bool = False,
    ) -> None:
        ports = [free_port() for _ in range(1 + replicas)]
        super().__init__(Path(tempfile.mkdtemp(prefix="shoal-sentinel-")), ports)
        self._down_ms = down_ms
        self._is_durable = is_durable
        self.sentinels = [free_port() for _ in range(3)]
        self.password_file = self.directory / "sentinel.password"
        self.password_file.write_text(sentinel_password)
        self._password, self._sentinel_password = password, sentinel_password
        self._users = self.directory / "users.acl" if users else None
        if self._users is not None:
            self._users.write_text(
                acl_file(router=password, scheduler=password, admin=password) + users
            )

    @property
    def url(self) -> str:
        name = ROUTER.name if self._users else ""
        user = f"{name}:{self._password}@" if self._password else ""
        nodes = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        return f"redis+sentinel://{user}{nodes}/{SERVICE}/0"

    def master(self) -> int:
        """The port of the server that the Sentinels take for the master."""
        with self.client(self.sentinels[0]) as sentinel:
            return int(sentinel.sentinel_get_master_addr_by_name(SERVICE)[1])

    def client(self, port: int) -> Redis:
        password = self._sentinel_password if port in self.sentinels else self._password
        return Redis(port=port, password=password or None, socket_timeout=60.0, protocol=2)

    def replicated(self) -> int:
        """Return the number of replicas that have caught up with the master."""
        with self.client(self.master()) as master:
            known = master.info("replication")
        ends = [known[f"slave{number}"]["offset"] for number in range(known["connected_slaves"])]
        return sum(end >= known["master_repl_offset"] for end in ends)

    def fail_over(self) -> None:
        """Order a failover as an operator does. Returns once the Sentinels name another master."""
        before = self.master()
        with self.client(self.sentinels[0]) as sentinel:
            wait_until(lambda: _is_taken(sentinel), 120, "the Sentinel to take the order")
        self.wait_for_another(before)

    def order_takeover(self, replica: int) -> None:
        """Order a failover to the only replica, and wait until it has taken over."""
        self.fail_over()
        self.wait_takeover(replica)

    def restore(self) -> None:
        """Start the servers and Sentinels that were killed, and wait until all is as at first."""
        for port in self.ports:
            if port not in self._processes:
                self.start(port)
        for port in self.sentinels:
            if port not in self._processes:
                self._start_sentinel(port)
        self.wait_whole()

    def wait_whole(self) -> None:
        """Wait until the Sentinels agree on the master, and the other servers are its replicas."""
        wait_until(self._is_whole, 120, "the Sentinels to know each other and the replicas")

    def wait_for_another(self, before: int) -> None:
        wait_until(
            lambda: self.master() != before and self.role(self.master()) == "master",
            120,
            "another master",
        )

    def start(self, port: int, *more: str) -> None:
        """Again, as it was started first: the Sentinels make a replica of it. `more` of its command
        line.
        """
        directory = self.directory / str(port)
        directory.mkdir(exist_ok=True)
        command = redis_arguments(find_redis_server(), directory, is_durable=self._is_durable)
        command[command.index("--port") + 1] = str(port)
        command += [
            "--bind",
            "127.0.0.1",
            "--repl-diskless-sync",
            "yes",
            "--repl-diskless-sync-delay",
            "0",
        ]
        if self._users is not None:
            command += [
                "--aclfile",
                str(self._users),
                "--masteruser",
                "replica",
                "--masterauth",
                self._password,
            ]
        elif self._password:
            command += ["--requirepass", self._password, "--masterauth", self._password]
        if port != self.ports[0]:
            command += ["--replicaof", "127.0.0.1", str(self.ports[0])]
        self._run(port, [*command, *more])

    def __enter__(self) -> SentinelSet:
        try:
            for port in self.ports:
                self.start(port)
            for port in self.sentinels:
                self._start_sentinel(port)
            self.wait_whole()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for port in list(self._processes):
            self.kill(port)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start_sentinel(self, port: int) -> None:
        """Start a Sentinel, or start it again with its own file about the others."""
        config = self.directory / f"sentinel-{port}.conf"
        if not config.exists():
            self._write_config(config, port)
        self._run(port, [str(find_redis_server()), str(config), "--sentinel"])

    def _write_config(self, config: Path, port: int) -> None:
        lines = [
            f"port {port}",
            "bind 127.0.0.1",
            f"dir {self.directory}",
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.ports[0]} 2",
            f"sentinel down-after-milliseconds {SERVICE} {self._down_ms}",
            f"sentinel failover-timeout {SERVICE} 3000",
            f"sentinel parallel-syncs {SERVICE} 2",
        ]
        if self._password:
            lines.append(f"sentinel auth-pass {SERVICE} {self._password}")
        if self._users is not None:
            lines.append(f"sentinel auth-user {SERVICE} sentinel")
        if self._sentinel_password:
            lines += [
                f"requirepass {self._sentinel_password}",
                f"sentinel sentinel-pass {self._sentinel_password}",
            ]
        config.write_text("\n".join(lines) + "\n")

    def _run(self, port: int, command: Sequence[str]) -> None:
        self._processes[port] = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, env=self.variables(port)
        )
        wait_until(lambda: self._answers(port), 120, "a server to answer")

    def _is_whole(self) -> bool:
        named: set[int] = set()
        for port in self.sentinels:
            try:
                with self.client(port) as sentinel:
                    seen = sentinel.sentinel_master(SERVICE)
                    others = sentinel.sentinel_slaves(SERVICE)
            except RedisError:
                return False
            named.add(int(seen["port"]))
            healthy = sum(
                one.get("master-link-status") == "ok" and not one["is_sdown"] for one in others
            )
            if seen["num-other-sentinels"] < 2 or healthy < len(self.ports) - 1:
                return False
        return len(named) == 1 and self.masters() == [*named]


def _is_taken(sentinel: Redis) -> bool:
    """Return True if a failover was begun: it is refused while another one is under way, or no
    replica is known to be good.
    """
    try:
        return bool(sentinel.execute_command("SENTINEL FAILOVER", SERVICE))
    except RedisError:
        return False


class TcpServer(RedisServer):
    """A redis-server that listens on a port of 127.0.0.1, too."""

    def __init__(self) -> None:
        self.port = free_port()
        super().__init__(arguments=["--port", str(self.port), "--bind", "127.0.0.1"])

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def blocked_clients(self) -> int:
        with self.client() as client:
            return int(client.info("clients")["blocked_clients"])

    def client(self) -> Redis:
        return Redis(port=self.port, protocol=2)


class FakeSentinel:
    """Replies to SENTINEL MASTERS with `master` (host, port), or with `says`, and counts calls.

    Runs in a separate thread.

    Args:
        path: the unix socket on which it listens, instead of a port of 127.0.0.1.
        epoch: that of the last failover it knows.
        delay: seconds before each reply.
    """

    def __init__(
        self,
        master: tuple[str, int],
        *,
        epoch: int = 1,
        path: Path | None = None,
        delay: float = 0.0,
        says: bytes | None = None,
    ) -> None:
        self.master = master
        self.epoch = epoch
        self.asked = 0
        self.port = 0
        self._path, self._delay, self._says = path, delay, says
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[Any]] = set()

    def url(self, user: str = "") -> str:
        return f"redis+sentinel://{user}127.0.0.1:{self.port}/{SERVICE}"

    def __enter__(self) -> FakeSentinel:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(60)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _listen(self) -> None:
        if self._path is not None:
            self._server: asyncio.Server = await asyncio.start_unix_server(self._serve, self._path)
        else:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while line := await reader.readline():
                words = [await self._word(reader) for _ in range(int(line[1:]))]
                self.asked += 1
                await asyncio.sleep(self._delay)
                is_ping = self._says is not None and words[0] == b"PING"
                writer.write(b"+PONG\r\n" if is_ping else self._says or self._reply())
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _word(self, reader: asyncio.StreamReader) -> bytes:
        await reader.readline()
        return (await reader.readline()).strip()

    def _reply(self) -> bytes:
        host, port = self.master
        state = {
            "name": SERVICE,
            "ip": host,
            "port": str(port),
            "flags": "master",
            "num-other-sentinels": "2",
        }
        state["config-epoch"] = str(self.epoch)
        words = [word.encode() for pair in state.items() for word in pair]
        return b"*1\r\n*%d\r\n" % len(words) + b"".join(
            b"$%d\r\n%b\r\n" % (len(word), word) for word in words
        )
