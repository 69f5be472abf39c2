"""Measure the memory and CPU time that a request costs edge, router, worker and Redis, relative to
its size.

The mesh has separate processes and small checkpoints of every kind that multiplies work or answers.
An input is one tenant's gRPC request (`products.py`), or a number of connections to the edge, by
HTTP or TEI's gRPC, with or without a credential (`http_products.py`). A request of another tenant
follows immediately, and both are observed. If a process exceeds its budget, the mesh is stopped
before the machine runs out of memory, and the input is a finding. Memory that remains after all
connections are closed counts too.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from numpy.typing import NDArray
from shoal.v1 import inference_pb2 as pb

from tests.fuzz import http_products, products, tiny_kinds
from tests.fuzz.http_products import HttpRecipe
from tests.fuzz.http_sending import Liveness, send
from tests.fuzz.package_kinds import write_package_kinds
from tests.fuzz.products import Recipe
from tests.fuzz.target import Broken, Internal, Random, Target, Try
from tests.support.cluster import Cluster, lasting_port
from tests.support.peak import Peak, resident_bytes
from tests.support.waiting import wait_until

_LOOK_SECONDS: Final = 0.02
_CALM_SECONDS: Final = 0.06
"""A process with less CPU time than this during an interval is idle."""
_GOOD_SECONDS: Final = 15.0
GUARDED: Final = "router-1"
"""The router behind the edge; it requires tokens."""
_CORES: Final = len(os.sched_getaffinity(0))
_TICK: Final = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one request for one process: a constant part, and a part per byte of the
    request.

    Attributes:
        sequence_seconds: Additional time per sequence that the model may process, up to the
            request's deadline.
    """

    memory_bytes: int
    memory_per_byte: float
    seconds: float
    seconds_per_megabyte: float
    sequence_seconds: float = 0.0

    def memory(self, size: int) -> float:
        return self.memory_bytes + self.memory_per_byte * size

    def time(self, size: int, recipe: Recipe | HttpRecipe) -> float:
        forward = min(self.sequence_seconds * recipe.sequences, _CORES * recipe.deadline)
        return self.seconds + self.seconds_per_megabyte * size / (1 << 20) + forward


BUDGETS: Final[Mapping[str, Budget]] = {
    "edge-0": Budget(64 << 20, 16, 1.0, 1.0),
    "router-0": Budget(64 << 20, 24, 1.0, 0.5),
    "worker-0": Budget(128 << 20, 64, 1.5, 2.0, 0.002),
    "redis": Budget(32 << 20, 8, 0.5, 0.25),
}
"""Budgets by process. docs/fuzzing.md explains the numbers."""
STRANGERS_BUDGET: Final = Budget(64 << 20, 0, 1.0, 0.5)
"""The budget of an edge or router for input without a valid credential: memory does not depend on
its size.
"""
KEPT_BYTES: Final = 64 << 20
"""The memory that an edge may keep above its idle size `KEPT_SECONDS` after all connections of an
input are closed.
"""
KEPT_SECONDS: Final = 60.0
"""An edge that other processes keep from the cores notices closed connections late."""
LIVEZ_SECONDS: Final = 1.0
"""The longest response time of /livez during an input, on cores shared by sender, edge, router and
worker.
"""
TOKEN: Final = "a-valid-token-0123456789"


class Spent:
    """Resources that a process has used since this was constructed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak = Peak(pid)
        self._before = self._seconds()

    @property
    def memory(self) -> int:
        return self._peak.grown

    @property
    def seconds(self) -> float:
        return self._seconds() - self._before

    def _seconds(self) -> float:
        user, system = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) * _TICK


class Watch:
    """Compares one input's resources with its budget."""

    def __init__(self, cluster: Cluster, recipe: Recipe | HttpRecipe, size: int) -> None:
        self._recipe, self._size = recipe, size
        self._budgets = _budgets(recipe)
        self._spent = {name: Spent(cluster.processes[name].pid) for name in self._budgets}
        self._processes = {name: cluster.processes[name] for name in self._budgets}

    def wait(self, call: Any) -> None:
        """Wait for the end of the call. Raises Broken if a process exceeds its budget."""
        over = threading.Event()
        call.add_done_callback(lambda _: over.set())
        while not over.wait(_LOOK_SECONDS):
            self.check()
        self.check()

    def calm(self) -> None:
        """Wait until no process works on the input."""
        still = threading.Event()
        while True:
            before = [spent.seconds for spent in self._spent.values()]
            still.wait(_CALM_SECONDS)
            self.check()
            after = [spent.seconds for spent in self._spent.values()]
            if sum(after) - sum(before) <= 2 * _TICK:
                return

    def check(self) -> None:
        for name, spent in self._spent.items():
            if (code := self._processes[name].poll()) is not None:
                raise Broken(f"{name} has ended with status {code}")
            memory, seconds, budget = spent.memory, spent.seconds, self._budgets[name]
            if memory > budget.memory(self._size):
                usage = (
                    f"{memory >> 20:,} MiB for {self._size:,} bytes; "
                    f"{int(budget.memory(self._size)) >> 20:,} are allowed"
                )
                raise Broken(f"{self._recipe.verb}: the memory of {name} grew by {usage}")
            if seconds > budget.time(self._size, self._recipe):
                allowed = budget.time(self._size, self._recipe)
                usage = f"{seconds:.1f} s for {self._size:,} bytes; {allowed:.1f} are allowed"
                raise Broken(f"{self._recipe.verb}: {name} has computed for {usage}")

    def usage(self) -> dict[str, tuple[float, float]]:
        """Return memory in MiB and seconds per process, to set budgets."""
        return {
            name: (round(spent.memory / (1 << 20), 1), round(spent.seconds, 2))
            for name, spent in self._spent.items()
        }


def _budgets(recipe: Recipe | HttpRecipe) -> Mapping[str, Budget]:
    """Return the budget of each process that an input may reach."""
    if isinstance(recipe, Recipe) or recipe.credential == "valid":
        return BUDGETS
    return {**BUDGETS, "edge-0": STRANGERS_BUDGET, GUARDED: STRANGERS_BUDGET}


class Caller:
    """Tries inputs on a mesh, which is restarted after each finding."""

    def __init__(self, root: Path) -> None:
        self._root = root
        tiny_kinds.write_kinds(root / "models")
        write_package_kinds(root / "models")
        # The state: a healthy mesh, its channel, and its reply to a valid request.
        self._cluster: Cluster | None = None
        self._channel: grpc.Channel
        self._expected: NDArray[np.float32]
        self._idle_bytes = 0
        self._tei_address = ""
        self._starts = 0
        self.last: Watch | None = None

    def one(self, data: bytes) -> None:
        recipe = products.read(data) or http_products.read(data)
        if recipe is None:
            return
        try:
            cluster = self._cluster or self._start()
            if isinstance(recipe, HttpRecipe):
                self._try_http(cluster, recipe)
            else:
                self._try(cluster, recipe)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the mesh without waiting for its work, which may be the finding."""
        if self._cluster is None:
            return
        self._channel.close()
        for name in [*self._cluster.edges, *self._cluster.workers, *self._cluster.routers, "redis"]:
            self._cluster.kill(name)
        self._cluster = None

    def _start(self) -> Cluster:
        self._starts += 1
        directory = self._root / str(self._starts)
        directory.mkdir()
        environment = {"SHOAL_HEARTBEAT_SECONDS": "0.5", "SHOAL_LOG_LEVEL": "WARNING"}
        self._cluster = Cluster(
            directory, models=str(self._root / "models"), environment=environment
        ).__enter__()
        self._start_edge(self._cluster, directory)
        self._channel = grpc.insecure_channel(
            self._cluster.addresses[0], [("grpc.max_receive_message_length", -1)]
        )
        for verb in products.VERBS:
            for adapter in (False, True):
                forms, entities = 3 * (verb in ("encode", "generation")), 2 * (verb == "relations")
                warm = Recipe(
                    verb, shared=("words", 5), labels=2, forms=forms, entities=entities,
                    adapter=adapter, deadline=120.0
                )  # fmt: skip
                self._call(warm.path, warm.body(), "good", warm.deadline).result()
        self._expected = self._vectors(self._good())
        return self._cluster

    def _start_edge(self, cluster: Cluster, directory: Path) -> None:
        """Start an edge in front of a router that requires tokens, in addition to the open router
        for gRPC inputs.
        """
        (directory / "tokens.yaml").write_text(
            f"tokens:\n  - {{token: {TOKEN}, subject: fuzz, role: client, tenant: hostile}}\n"
        )
        cluster.ports.append(lasting_port())
        cluster.routers.append(GUARDED)
        cluster.start(GUARDED, {"SHOAL_TOKENS": str(directory / "tokens.yaml")})
        self._tei_address = f"127.0.0.1:{lasting_port()}"
        cluster.edges.append("edge-0")
        cluster.edge_ports.append(lasting_port())
        doors = f"{self._tei_address}={tiny_kinds.FORMS}"
        cluster.start(
            "edge-0", {"SHOAL_ROUTERS": cluster.addresses[-1], "SHOAL_TEI_GRPC_ADDRESSES": doors}
        )
        warm = HttpRecipe(credential="valid")
        wait_until(
            lambda: send(warm, cluster.http_addresses[0], self._tei_address, TOKEN) == [200],
            60.0,
            "the edge to answer",
        )
        self._idle_bytes = resident_bytes(cluster.processes["edge-0"].pid)

    def _try_http(self, cluster: Cluster, recipe: HttpRecipe) -> None:
        address = cluster.http_addresses[0]
        watch = self.last = Watch(cluster, recipe, recipe.connections * len(recipe.request(TOKEN)))
        with ThreadPoolExecutor(1) as thread, Liveness(address) as liveness:
            sent = thread.submit(send, recipe, address, self._tei_address, TOKEN)
            watch.wait(sent)
            good = self._good()
            watch.wait(good)
            watch.calm()
        if liveness.worst_seconds > LIVEZ_SECONDS:
            raise Broken(f"{recipe.verb}: /livez took {liveness.worst_seconds:.1f} s")
        if 500 in sent.result():
            raise Internal(f"{recipe.path} was answered with 500")
        if (code := good.code()) is not grpc.StatusCode.OK:
            raise Broken(
                f"{recipe.verb}: a good request of another tenant failed beside it: {code.name}: "
                f"{good.details()}"
            )
        self._check_kept(cluster, recipe)

    def _check_kept(self, cluster: Cluster, recipe: HttpRecipe) -> None:
        """Check that the edge returns the memory of closed connections. Raises Broken."""
        until = time.monotonic() + KEPT_SECONDS
        while (
            kept := resident_bytes(cluster.processes["edge-0"].pid) - self._idle_bytes
        ) > KEPT_BYTES:
            if time.monotonic() > until:
                raise Broken(
                    f"{recipe.verb}: the edge keeps {kept >> 20:,} MiB {KEPT_SECONDS:.0f} s after "
                    "its connections are closed"
                )
            time.sleep(_CALM_SECONDS)

    def _try(self, cluster: Cluster, recipe: Recipe) -> None:
        body = recipe.body()
        watch = self.last = Watch(cluster, recipe, len(body))
        call = self._call(recipe.path, body, "hostile", recipe.deadline)
        watch.wait(call)
        good = self._good()
        watch.wait(good)
        watch.calm()
        if (code := call.code()) in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            raise Internal(
                f"{recipe.path} was answered with {code.name}: {(call.details() or '')[:200]}"
            )
        if (code := good.code()) is not grpc.StatusCode.OK:
            raise Broken(
                f"{recipe.verb}: a good request of another tenant failed beside it: {code.name}: "
                f"{good.details()}"
            )
        if not np.allclose(self._vectors(good), self._expected, atol=1e-4):
            raise Broken(f"{recipe.verb}: a good request of another tenant was answered wrongly")

    def _good(self) -> Any:
        request = pb.EncodeRequest(
            model=tiny_kinds.FORMS, items=[pb.Item(text="a text"), pb.Item(text="text text e")]
        )
        return self._call(
            "/shoal.v1.InferenceService/Encode", request.SerializeToString(), "good", _GOOD_SECONDS
        )

    def _call(self, path: str, body: bytes, tenant: str, seconds: float) -> Any:
        call = self._channel.unary_unary(path, bytes, bytes)
        return call.future(
            body, timeout=seconds, metadata=(("x-shoal-tenant", tenant),), wait_for_ready=True
        )

    @staticmethod
    def _vectors(call: Any) -> NDArray[np.float32]:
        dense = pb.EncodeResponse.FromString(call.result()).dense
        return np.frombuffer(dense.data, "<f4").reshape(tuple(dense.shape))


@contextmanager
def _open() -> Iterator[Try]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caller = Caller(Path(folder))
        try:
            yield caller.one
        finally:
            caller.close()


def make(random: Random, known: Sequence[bytes]) -> bytes:
    """Return an input of either kind."""
    return (http_products if random.random() < 0.5 else products).make(random, known)


TARGETS: Final = (
    Target("amplification", make, _open, share=6.0, memory_bytes=64 << 30, hang_seconds=120.0),
)
