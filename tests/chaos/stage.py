"""The mesh of a run: processes that reach each other over our links, and models that only a store
has.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import struct
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.queue.connection.acl import ROUTER, SCHEDULER
from tests.chaos import machine, models
from tests.chaos.links import Links
from tests.chaos.plan import Servers
from tests.chaos.redis_machine import RedisMachines
from tests.chaos.up import Up
from tests.support.cluster import Cluster, lasting_port
from tests.support.redis_cluster import RedisCluster
from tests.support.sentinels import SentinelSet

ROUTERS, WORKERS, SCHEDULERS, EDGES = 2, 3, 2, 2
DISK_BYTES: Final = 24 << 20
"""Disk of each worker for fetched models: a few dozen small ones."""
LEASE_SECONDS: Final = 3.0
PULL_SECONDS: Final = 2.0
START_SECONDS: Final = 180.0
"""The mesh starts on a machine that others may keep busy; no result depends on this time."""
NODE_TIMEOUT_SECONDS: Final = 2.0
"""`cluster-node-timeout` of the Redis Cluster, `down-after-milliseconds` of Sentinels."""
QUEUE_SLOTS: Final = 16
"""Number of slots with a cluster. The lanes of `models` and `{fleet}` lie on all three masters."""
Nodes = RedisCluster | SentinelSet
TENANTS: Final = {"nobody": 1.0, "acme": 2.0, "zoo": 0.5}
"""Weights."""
_TENANTS_FILE: Final = "tenants: {acme: {weight: 2}, zoo: {weight: 0.5}}\n"


@dataclass
class Stage:
    """The running mesh, its links and its paths."""

    directory: Path
    cluster: Cluster
    links: Links
    store: Path
    machines: RedisMachines
    nodes: Nodes | None = None
    """The nodes of a cluster or under Sentinels; None: the mesh has one Redis."""
    stored: int = 0
    """Models put into the store so far."""

    @property
    def redis_url(self) -> str:
        return self.nodes.url if self.nodes is not None else self.cluster.redis_url

    @property
    def queue_slots(self) -> int:
        return QUEUE_SLOTS if isinstance(self.nodes, RedisCluster) else 1

    @property
    def clients_address(self) -> str:
        return ",".join(self.links.address(f"clients>{router}") for router in self.cluster.routers)

    def listens(self, name: str) -> tuple[str, int]:
        """Return the address of a router, a scheduler or an edge itself, not of a link to it."""
        if name in self.cluster.edges:
            host, _, port = self.cluster.http_addresses[self.cluster.edges.index(name)].rpartition(
                ":"
            )
            return host, int(port)
        names, addresses = (
            (self.cluster.routers, self.cluster.addresses)
            if name in self.cluster.routers
            else (self.cluster.schedulers, self.cluster.scheduler_addresses)
        )
        host, _, port = addresses[names.index(name)].rpartition(":")
        return host, int(port)

    def set_clock(self, name: str, seconds: float) -> None:
        """Shift the wall clock of a process by `seconds`, from now on."""
        path = _clock(self.directory, name)
        path.touch()
        with path.open("r+b") as file:  # not cut short for a moment: the process has it mapped
            file.write(struct.pack("d", seconds))

    async def new_model(self) -> str:
        """Return the id of a model that was not requested before; only the store has it. It answers
        as models.DENSE does.
        """
        self.stored += 1
        model = f"stored/model-{self.stored}"
        original = Path(self.cluster.each[self.cluster.workers[0]]["SHOAL_MODELS"]) / models.DENSE
        await asyncio.to_thread(shutil.copytree, original, self.store / model)
        return model

    def fill_disk(self, worker: str) -> None:
        """Leaves nothing free on the worker's disk."""
        pid, disk = self.cluster.processes[worker].pid, _disk(self.directory, worker)
        seen = Path(f"/proc/{pid}/root{disk}")
        if not seen.is_dir() or seen.stat().st_dev == disk.stat().st_dev:  # it could not be mounted
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            return
        with suppress(OSError), (seen / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1 << 16))

    def free_disk(self, worker: str) -> None:
        """Undoes it; nothing happens if the process is another one by now."""
        pid = self.cluster.processes[worker].pid
        with suppress(OSError):
            resource.prlimit(
                pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
            Path(f"/proc/{pid}/root{_disk(self.directory, worker)}/filler").unlink()


def _clock(directory: Path, name: str) -> Path:
    return directory / f"clock-{name}"


def _disk(directory: Path, worker: str) -> Path:
    return directory / f"disk-{worker}"


@asynccontextmanager
async def running(
    directory: Path, checkpoints: Path, servers: Servers = "single"
) -> AsyncIterator[Stage]:
    """Everything started and reachable. `directory` holds logs, data and sockets, and sockets have
    short names: not too deep.
    """
    machines = RedisMachines(directory)
    async with (
        _nodes(directory / "nodes", servers, machines) as nodes,
        _running(directory, checkpoints, machines, nodes) as stage,
    ):
        yield stage


@asynccontextmanager
async def _nodes(
    directory: Path, servers: Servers, machines: RedisMachines
) -> AsyncIterator[Nodes | None]:
    """Start the nodes of a cluster or under Sentinels. They are durable, as docs/scaling.md
    recommends.
    """
    if servers == "single":
        yield None
        return
    timeout_ms = int(NODE_TIMEOUT_SECONDS * 1000)
    nodes: Nodes = (
        RedisCluster(directory, node_timeout_ms=timeout_ms, is_durable=True)
        if servers == "cluster"
        else SentinelSet(replicas=1, down_ms=timeout_ms, is_durable=True)
    )
    nodes.variables = lambda port: machines.variables(str(port))
    await asyncio.to_thread(nodes.__enter__)
    try:
        yield nodes
    finally:
        await asyncio.to_thread(nodes.__exit__, None, None, None)


@asynccontextmanager
async def _running(
    directory: Path, checkpoints: Path, machines: RedisMachines, nodes: Nodes | None
) -> AsyncIterator[Stage]:
    redis_port = lasting_port()
    cluster = Cluster(
        directory,
        models=str(checkpoints),
        routers=ROUTERS,
        workers=WORKERS,
        schedulers=SCHEDULERS,
        edges=EDGES,
        durable=True,
        redis_port=redis_port,
        starter="tests.chaos.machine",
        start_seconds=START_SECONDS,
        environment=_environment(directory),
    )
    async with Links(_targets(cluster, None if nodes else redis_port)) as links:
        _connect(cluster, links, directory, checkpoints, nodes)
        cluster.each["redis"] = machines.variables("redis")
        stage = Stage(directory, cluster, links, directory / "origin", machines, nodes)
        for name in (*cluster.routers, *cluster.workers):
            stage.set_clock(name, 0.0)
        try:
            await asyncio.to_thread(cluster.__enter__)
            yield stage
        except BaseException:
            for name in cluster.processes:
                cluster.kill(name)
            raise
        await asyncio.to_thread(cluster.__exit__, None, None, None)


@asynccontextmanager
async def running_up(directory: Path, checkpoints: Path) -> AsyncIterator[Stage]:
    """Run the mesh with one `shoal up`; only its clients connect over our links."""
    up = Up(
        directory, models=str(checkpoints), workers=WORKERS, environment=_environment(directory)
    )
    async with Links({"clients>router": up.address}) as links:
        try:
            await asyncio.to_thread(up.__enter__)
            yield Stage(directory, up, links, directory / "origin", RedisMachines(directory))
        except BaseException:
            up.end()
            raise
        await asyncio.to_thread(up.__exit__, None, None, None)


def _environment(directory: Path) -> dict[str, str]:
    (directory / "origin").mkdir()
    (directory / "tenants.yaml").write_text(_TENANTS_FILE)
    return {
        "SHOAL_LEASE_MS": str(int(LEASE_SECONDS * 1000)),
        "SHOAL_HEARTBEAT_SECONDS": "0.5",
        "SHOAL_PULL_WAIT_SECONDS": str(PULL_SECONDS),
        "SHOAL_LOG_LEVEL": os.environ.get("SHOAL_LOG_LEVEL", "INFO"),
        # A job is unlucky here, not poisonous: with the default of 3 an innocent one could be given
        # up.
        "SHOAL_MAX_ATTEMPTS": "100",
        "SHOAL_TENANTS": str(directory / "tenants.yaml"),
        "SHOAL_STORES": f"file://{directory / 'origin'}",
        "OMP_NUM_THREADS": "1",
    }


def _targets(cluster: Cluster, redis_port: int | None) -> dict[str, str]:
    """Return the target address of each link; without `redis_port` none leads to Redis."""
    routers = dict(zip(cluster.routers, cluster.addresses, strict=True))
    to_routers = {
        f"{who}>{router}": address
        for who in ("clients", *cluster.workers)
        for router, address in routers.items()
    }
    if redis_port is None:
        return to_routers
    return to_routers | {
        f"{who}>redis": f"127.0.0.1:{redis_port}" for who in (*cluster.routers, *cluster.schedulers)
    }


def _connect(
    cluster: Cluster,
    links: Links,
    directory: Path,
    checkpoints: Path,
    nodes: Nodes | None,
) -> None:
    """Configure the links, the clock and the disk of each process."""
    for name in (*cluster.routers, *cluster.schedulers):
        if nodes is None:
            cluster.each[name] = {"SHOAL_REDIS_URL": f"redis://{links.address(f'{name}>redis')}/0"}
            continue
        if isinstance(nodes, SentinelSet):
            cluster.each[name] = {"SHOAL_REDIS_URL": nodes.url}
            continue
        user = ROUTER if name in cluster.routers else SCHEDULER
        cluster.each[name] = {
            "SHOAL_REDIS_URL": nodes.url_as(user),
            "SHOAL_QUEUE_SLOTS": str(QUEUE_SLOTS),
        }
    for worker in cluster.workers:
        disk = _disk(directory, worker)
        disk.mkdir()
        cluster.each[worker] = {
            "SHOAL_ROUTERS": ",".join(
                links.address(f"{worker}>{router}") for router in cluster.routers
            ),
            "SHOAL_MODELS": str(checkpoints),
            "SHOAL_STORE_DIR": str(disk),
            machine.DISK: str(disk),
            machine.DISK_BYTES: str(DISK_BYTES),
        }
    for name in (*cluster.routers, *cluster.workers):
        cluster.each[name] = {**cluster.each[name], machine.CLOCK: str(_clock(directory, name))}


def new_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="shoal-chaos-"))


def everybody(cluster: Cluster) -> Sequence[str]:
    return (*cluster.routers, *cluster.workers, *cluster.schedulers)
