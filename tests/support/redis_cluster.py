"""A real Redis Cluster: three masters with a replica each, on ports of 127.0.0.1."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from libs.queue.connection.acl import ROUTER, SCHEDULER, User
from services.local.redis_server import find_redis_server, redis_arguments
from services.local.settings import free_port
from tests.support.acl import PASSWORD
from tests.support.redis import RedisServers
from tests.support.waiting import wait_until

MASTERS = 3
HASH_SLOTS = 16_384
NODE_TIMEOUT_MS = 4000
"""Milliseconds after which the other masters take one for failed; its replica takes over some 2 s
later. A busy machine keeps a node off its cores for one or two seconds, and its cluster must not
fail over by itself.
"""


def free_ports(count: int) -> list[int]:
    """Return ports with free bus ports, which are 10,000 higher: all below 32768, where the kernel
    takes none for outgoing connections.
    """
    ports: set[int] = set()
    while len(ports) < count:
        port = free_port()
        taken = {port, port + 10_000, port - 10_000} & ports
        if port + 10_000 < 32_768 and not taken and _is_bus_free(port):
            ports.add(port)
    return sorted(ports)


def _is_bus_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port + 10_000))
        except OSError:
            return False
    return True


class RedisCluster(RedisServers):
    """Runs while its context is open. The first half of the ports are the masters at the start,
    each with an equal share of the hash slots; the others are their replicas, in order.

    Args:
        masters: The number of masters. A failover needs three.
        directory: Holds the nodes' data and logs, and is kept. None: a temporary one.
        is_durable: The nodes keep their data when they are killed.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        masters: int = MASTERS,
        node_timeout_ms: int = NODE_TIMEOUT_MS,
        is_durable: bool = False,
    ) -> None:
        super().__init__(
            directory or Path(tempfile.mkdtemp(prefix="shoal-cluster-")), free_ports(2 * masters)
        )
        self._masters = masters
        self._is_temporary = directory is None
        self._node_timeout_ms = node_timeout_ms
        self._is_durable = is_durable
        # Those of `shoal redis-acl`, and the user `default` for the tests and for replicas.
        self._users = self.directory / "users.acl"
        users = [user.line(PASSWORD) for user in (ROUTER, SCHEDULER)]
        self.directory.mkdir(exist_ok=True)
        self._users.write_text("\n".join(["user default on nopass ~* &* +@all", *users, ""]))

    @property
    def url(self) -> str:
        return f"redis+cluster://{self._named()}"

    def url_as(self, user: User) -> str:
        """The URL for a user, who has the password of the tests."""
        return f"redis+cluster://{user.name}:{PASSWORD.replace(' ', '%20')}@{self._named()}"

    def master_port(self, key: str) -> int:
        """Return the port of the master that holds the key, as the other nodes see it."""
        slot = key_slot(key.encode())
        for port in self.ports:
            if port not in self._processes:
                continue
            with self.client(port) as node:
                for first, last, master, *_ in node.execute_command("CLUSTER", "SLOTS"):
                    if first <= slot <= last:
                        return int(master[1])
        raise AssertionError(f"no master of {key}")

    def empty(self) -> None:
        """Delete the keys of all masters."""
        for port in self.masters():
            with self.client(port) as node:
                node.flushall()

    def wait_replicated(self, port: int) -> None:
        """Wait until the replica of a master has all its data."""
        with self.client(port) as master:

            def is_level() -> bool:
                state = master.info("replication")
                return bool(state["slave0"]["offset"] >= state["master_repl_offset"])

            wait_until(is_level, 120, "the replica to have the data")

    @contextmanager
    def migrating(self, key: str) -> Iterator[Callable[[], object]]:
        """Move the hash slot of a key to another master, as before Redis 8.4: key by key. Within
        the context one key has moved; the yielded function moves the others and ends it.
        """
        source = self.master_port(key)
        target = next(port for port in self.masters() if port != source)
        with self._migration(key_slot(key.encode()), source, target) as migration:
            migration.move(1)
            yield migration.finish

    def move_slot(self, key: str, target: int) -> int:
        """Move the hash slot of a key to the master at `target` with all its keys, as before
        Redis 8.4, and return their number.
        """
        with self._migration(key_slot(key.encode()), self.master_port(key), target) as migration:
            return migration.finish()

    @contextmanager
    def _migration(self, slot: int, source: int, target: int) -> Iterator[_Migration]:
        with self.client(source) as old, self.client(target) as new:
            ids = [node.execute_command("CLUSTER", "MYID") for node in (old, new)]
            new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
            old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
            yield _Migration(self, old, slot, (target, source), ids[1])

    @contextmanager
    def without_failover(self) -> Iterator[None]:
        """Keep replicas from taking over from a killed master within the context."""
        self.commands("CONFIG", "SET", "cluster-node-timeout", 600_000)
        try:
            yield
        finally:
            # A node that still waits for an answer to an old ping would take the other for failed.
            with suppress(AssertionError):
                wait_until(self._are_pings_answered, 10)
            self.commands("CONFIG", "SET", "cluster-node-timeout", self._node_timeout_ms)

    def _are_pings_answered(self) -> bool:
        """Return whether no running node waits for another running one's answer to a ping."""
        for port in self._processes:
            with self.client(port) as node:
                for line in bytes(node.execute_command("CLUSTER", "NODES")).splitlines():
                    words = line.split()
                    pinged = int(words[1].split(b"@")[0].rsplit(b":", 1)[1])
                    if pinged in self._processes and words[4] != b"0":
                        return False
        return True

    def start(self, port: int) -> None:
        """Start a node, or start it again with its place in the cluster."""
        directory = self.directory / str(port)
        directory.mkdir(parents=True, exist_ok=True)
        command = redis_arguments(find_redis_server(), directory, is_durable=self._is_durable)
        command[command.index("--port") + 1] = str(port)
        unix = command.index("--unixsocket")
        del command[unix : unix + 4]
        command += ["--bind", "127.0.0.1", "--cluster-enabled", "yes"]
        command += ["--cluster-config-file", "nodes.conf"]
        command += ["--cluster-node-timeout", str(self._node_timeout_ms)]
        command += ["--cluster-require-full-coverage", "no"]
        command += ["--aclfile", str(self._users)]
        # A replica takes over however long it was without its master.
        command += ["--cluster-replica-validity-factor", "0"]
        command += ["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"]
        with (directory / "log").open("ab") as log:
            self._processes[port] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.variables(port)
            )
        wait_until(lambda: self._answers(port), 120, f"the node at {port} to answer")

    def restore(self) -> None:
        """Start the nodes that were killed, and wait until each master has its replica again."""
        for port in self.ports:
            if port not in self._processes:
                self.start(port)
        self.wait_whole()

    def wait_whole(self) -> None:
        """Wait until all nodes agree on the masters, and each master has its replica."""
        wait_until(self._is_whole, 120, "the cluster to be whole")

    def fail_over(self, port: int) -> None:
        """Order a planned failover: the replica of the master takes over without a loss."""
        self.order_takeover(self.replica_port(port))
        self.wait_whole()

    def order_takeover(self, replica: int) -> None:
        """Order a replica to take over from its master, and wait until it has."""
        for _ in range(5):  # Redis gives up a planned failover after 5 s
            with suppress(RedisError), self.client(replica) as node:
                node.execute_command("CLUSTER", "FAILOVER")
            with suppress(AssertionError):
                wait_until(lambda: self.role(replica) == "master", 6, "the replica to take over")
                return
        self.wait_takeover(replica)

    def __enter__(self) -> RedisCluster:
        try:
            for port in self.ports:
                self.start(port)
            self._join()
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
        if self._is_temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _join(self) -> None:
        """Make a cluster of the nodes."""
        for number, port in enumerate(self.ports):
            with self.client(port) as node:
                node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                if number < self._masters:
                    bounds = [HASH_SLOTS * part // self._masters for part in (number, number + 1)]
                    node.execute_command("CLUSTER", "ADDSLOTS", *range(*bounds))
                if number:
                    node.execute_command("CLUSTER", "MEET", "127.0.0.1", self.ports[0])
        wait_until(lambda: all(self._known(self.ports)), 120, "the nodes to know each other")
        ids = []
        for port in self.ports[: self._masters]:
            with self.client(port) as node:
                ids.append(node.execute_command("CLUSTER", "MYID"))
        for port, master in zip(self.ports[self._masters :], ids, strict=True):
            with self.client(port) as node:
                node.execute_command("CLUSTER", "REPLICATE", master)
        self.wait_whole()

    def _known(self, ports: Iterable[int]) -> Iterable[bool]:
        """Yield for each node whether it serves and knows all others, with the slots of the
        masters.
        """
        for port in ports:
            with self.client(port) as node:
                lines = bytes(node.execute_command("CLUSTER", "INFO")).split()
            wanted = {
                f"cluster_known_nodes:{len(self.ports)}".encode(),
                f"cluster_slots_assigned:{HASH_SLOTS}".encode(),
                b"cluster_state:ok",
            }
            yield wanted <= set(lines)

    def _is_whole(self) -> bool:
        """Return whether every node knows the same three masters with a replica each, all in
        step.
        """
        known: set[tuple[tuple[int, int, int], ...]] = set()
        for port in self.ports:
            try:
                with self.client(port) as node:
                    ranges = node.execute_command("CLUSTER", "SLOTS")
                    replication = node.info("replication")
            except RedisError:  # it loads its data, or is frozen
                return False
            masters = {master[1] for _, _, master, *_ in ranges}
            if len(masters) != self._masters or any(len(each) != 4 for each in ranges):
                return False
            if replication["role"] == "slave" and replication["master_link_status"] != "up":
                return False
            known.add(tuple(sorted((first, last, at[1]) for first, last, at, *_ in ranges)))
        return len(known) == 1

    def _named(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports[:2])


class _Migration:
    """A hash slot that moves to another master, key by key."""

    def __init__(
        self, cluster: RedisCluster, source: Redis, slot: int, ends: tuple[int, int], target_id: Any
    ) -> None:
        """
        Args:
            ends: The ports of the target and the source.
        """
        self._cluster = cluster
        self._source = source
        self._slot = slot
        self._ends = ends
        self._target_id = target_id

    def move(self, limit: int) -> int:
        """Move at most this number of keys in one step, and return the number that were moved."""
        names = self._source.execute_command("CLUSTER", "GETKEYSINSLOT", self._slot, limit)
        if names:
            target = ("127.0.0.1", self._ends[0], "", 0, 5000)
            self._source.execute_command("MIGRATE", *target, "KEYS", *names)
        return len(names)

    def finish(self) -> int:
        """Move the other keys, declare the target the master of the slot, and return the number
        of these keys.
        """
        moved = 0
        while keys := self.move(1000):
            moved += keys
        for port in (*self._ends, *self._cluster.masters()):
            with self._cluster.client(port) as node:
                node.execute_command("CLUSTER", "SETSLOT", self._slot, "NODE", self._target_id)
        return moved
