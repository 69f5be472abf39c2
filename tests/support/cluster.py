"""A mesh of real processes that a test may kill: Redis with AOF, any number of routers, schedulers
and workers.

With SHOAL_TEST_REDIS=cluster the queue of a mesh without its own Redis is on a Redis Cluster of six
nodes: `SHOAL_TEST_REDIS=cluster make test ARGS=tests/mesh`. The process `redis` then stands for its
nodes: to kill it kills the master with the most keys.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from shoal.v1 import mesh_pb2, mesh_pb2_grpc

from services.local.redis_server import find_redis_server, redis_arguments
from services.local.settings import free_port
from tests.support.redis_cluster import RedisCluster
from tests.support.waiting import wait_until

ON_CLUSTER = "SHOAL_TEST_REDIS"
CLUSTER_SLOTS = 16
_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_MODULES = {"router": "services.router", "scheduler": "services.scheduler", "edge": "services.edge"}
lasting_port = free_port
OFTEN = (("grpc.max_reconnect_backoff_ms", 1000),)
"""Options of a channel to a process that may be starting. By default the pauses between attempts to
connect grow to minutes, longer than the start.
"""


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 60).close()
    except OSError:
        return False
    return True


class Cluster:
    """Processes by name: `redis`, `router-0` …, `scheduler-0` …, `worker-0` …, `edge-0` ….

    Leaving the context kills the processes that still run.

    Args:
        each: further variables of single processes, by name, read when a process is started.
        durable: Redis keeps its data when it is killed.
        redis_port: the TCP port on which Redis listens in addition to its socket; 0 for none.
        starter: a module that starts the services, instead of Python itself.
        start_seconds: the maximum time until each router is ready and sees all workers.
    """

    def __init__(
        self,
        directory: Path,
        *,
        models: str,
        routers: int = 1,
        workers: int = 1,
        schedulers: int = 0,
        edges: int = 0,
        dtype: str = "float32",
        durable: bool = False,
        environment: Mapping[str, str] | None = None,
        each: Mapping[str, Mapping[str, str]] | None = None,
        worker_module: str = "services.worker",
        redis_port: int = 0,
        starter: str = "",
        start_seconds: float = 180.0,
    ) -> None:
        self.directory = directory
        self.ports = [lasting_port() for _ in range(routers)]
        self.workers = [f"worker-{number}" for number in range(workers)]
        self.routers = [f"router-{number}" for number in range(routers)]
        self.schedulers = [f"scheduler-{number}" for number in range(schedulers)]
        self.edges = [f"edge-{number}" for number in range(edges)]
        self.edge_ports = [lasting_port() for _ in range(edges)]
        self._scheduler_ports = [lasting_port() for _ in range(schedulers)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.each = dict(each or {})
        self._durable = durable
        self._redis_port = redis_port
        self._modules = _MODULES | {"worker": worker_module}
        self._starter = [starter] if starter else []
        self._start_seconds = start_seconds
        self._nodes: RedisCluster | None = None
        self._environment = dict(os.environ) | {
            "SHOAL_ROUTERS": ",".join(self.addresses),
            "SHOAL_REDIS_URL": f"unix://{directory / 'redis.sock'}",
            "SHOAL_MODELS": models,
            "SHOAL_STORE_DIR": str(directory / "store"),
            "SHOAL_DTYPE": dtype,
            "SHOAL_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
        }
        wanted = self._environment.pop(ON_CLUSTER, "")
        settings = (environment or {}, *self.each.values())
        has_own_redis = redis_port or any("SHOAL_REDIS_URL" in one for one in settings)
        if wanted == "cluster" and not has_own_redis:
            self._nodes = RedisCluster(is_durable=durable)
            self._environment |= {
                "SHOAL_REDIS_URL": self._nodes.url,
                "SHOAL_QUEUE_SLOTS": str(CLUSTER_SLOTS),
            }

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports]

    @property
    def address(self) -> str:
        return ",".join(self.addresses)

    @property
    def scheduler_addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self._scheduler_ports]

    @property
    def http_addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.edge_ports]

    @property
    def redis_url(self) -> str:
        return self._environment["SHOAL_REDIS_URL"]

    @property
    def queue_slots(self) -> int:
        """The number of slots over which the processes spread the lanes."""
        return int(self._environment.get("SHOAL_QUEUE_SLOTS", "1"))

    def pids(self, *names: str) -> dict[str, int]:
        """Return the process ids by name. On a Redis Cluster each node is `redis-<port>`."""
        found = {name: self.processes[name].pid for name in names if name in self.processes}
        if "redis" in names and self._nodes is not None:
            found |= {f"redis-{port}": pid for port, pid in self._nodes.pids.items()}
        return found

    def __enter__(self) -> Cluster:
        try:
            if self._nodes is not None:
                self._nodes.__enter__()
            else:
                self.start("redis")
            for name in [*self.routers, *self.schedulers, *self.workers, *self.edges]:
                self.start(name)
            for address in self.addresses:
                self.wait_ready(address, self._start_seconds)
            for port in self.edge_ports:
                wait_until(
                    partial(_is_open, port), self._start_seconds, f"the edge at {port} to listen"
                )
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
        self.resume([*self.edges, *self.workers, *self.schedulers, *self.routers])
        for names in (self.edges, self.workers, self.schedulers, self.routers):
            self.signal(names, signal.SIGTERM)
            for name in names:
                self.wait(name)
        if kind is not None:
            print(self.last_words())
        if self._nodes is not None:
            self._nodes.__exit__(kind, error, trace)
        else:
            self.kill("redis")

    def start(self, name: str, more: Mapping[str, str] | None = None) -> None:
        """`more`: variables of this process alone."""
        if name == "redis" and self._nodes is not None:
            self._nodes.restore()
            return
        variables = self._variables(name) | dict(more or {})
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self._command(name), env=variables, stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        """SIGKILL: nothing is finished, nothing is handed back."""
        if name == "redis" and self._nodes is not None:
            self._nodes.kill(self._nodes.fullest_master())
            return
        process = self.processes.get(name)
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()

    def stop(self, name: str, timeout: float = 90.0) -> int | None:
        """SIGTERM; returns the exit status."""
        self.signal([name], signal.SIGTERM)
        return self.wait(name, timeout)

    def wait(self, name: str, timeout: float = 90.0) -> int | None:
        """Wait until the process has ended, and send SIGKILL if it does not end in time. Return the
        exit status.
        """
        process = self.processes.get(name)
        if process is None:
            return None
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return process.returncode

    def signal(self, names: Sequence[str], number: signal.Signals) -> None:
        """Send the signal to those of the processes that run."""
        for name in names:
            process = self.processes.get(name)
            if process is not None and process.poll() is None:
                process.send_signal(number)

    def resume(self, names: Sequence[str]) -> None:
        """SIGCONT; nothing happens to those that were not stopped."""
        self.signal(names, signal.SIGCONT)

    def wait_ready(self, address: str, timeout: float = 180.0) -> None:
        """Wait until the router at `address` serves and sees all workers, and models if they have
        any.
        """
        folders = [
            Path(entry.partition("=")[2] or entry)
            for entry in self._environment["SHOAL_MODELS"].split(":")
            if entry
        ]
        has_models = any(any(folder.rglob("config.json")) for folder in folders)

        def is_serving() -> bool:
            # A router that listens is not serving before its first look at the mesh.
            answer = health.Check(
                health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=timeout
            )
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        def is_seen() -> bool:
            try:
                seen = mesh.GetMesh(mesh_pb2.GetMeshRequest(), timeout=timeout).mesh
            except grpc.RpcError as error:
                if error.code() in _PASSING:
                    return False
                raise
            return len(seen.workers) >= len(self.workers) and (
                bool(seen.models) or not has_models or not self.workers
            )

        with grpc.insecure_channel(address, OFTEN) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            mesh = mesh_pb2_grpc.MeshServiceStub(channel)
            wait_until(is_serving, timeout, f"{address} to serve")
            wait_until(is_seen, timeout, "workers and models to be reported")

    def last_words(self, lines: int = 25) -> str:
        """The end of each process's output."""
        logs = {
            log.name: log.read_text(errors="replace").splitlines()
            for log in sorted(self.directory.glob("*.log"))
        }
        return "\n".join(f"--- {name}\n" + "\n".join(said[-lines:]) for name, said in logs.items())

    def _command(self, name: str) -> list[str]:
        if name == "redis":
            command = redis_arguments(find_redis_server(), self.directory, is_durable=self._durable)
            command[command.index("--port") + 1] = str(self._redis_port)
            return [*command, "--bind", "127.0.0.1"]
        return [sys.executable, "-m", *self._starter, self._modules[name.rpartition("-")[0]]]

    def _variables(self, name: str) -> dict[str, str]:
        return self._own_variables(name) | dict(self.each.get(name, {}))

    def _own_variables(self, name: str) -> dict[str, str]:
        if name.startswith("router"):
            return self._environment | {
                "SHOAL_ADDRESS": self.addresses[self.routers.index(name)],
                "SHOAL_ROUTER_ID": name,
            }
        if name.startswith("scheduler"):
            address = self.scheduler_addresses[self.schedulers.index(name)]
            return self._environment | {
                "SHOAL_SCHEDULER_ADDRESS": address,
                "SHOAL_SCHEDULER_ID": name,
            }
        if name.startswith("edge"):
            return self._environment | {
                "SHOAL_HTTP_ADDRESS": self.http_addresses[self.edges.index(name)],
                "SHOAL_EDGE_ID": name,
            }
        return self._environment | {"SHOAL_WORKER_ID": name}
