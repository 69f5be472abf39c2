"""Measure a mesh under a fivefold overload: `python -m benchmarks.stress.overload`, or `make
bench-overload`.

A real mesh: two routers and one single-threaded worker with a random BERT of MiniLM's size; one
client process for each router.

- capacity: requests per second in a closed loop, before and after
- overload: requests arrive at `--factor` times that rate, whether or not answers arrive (Poisson),
  each with a deadline
- recovery: from the end of the load until three requests in a row take at most twice their time in
  the idle mesh

A request is one text of about 60 tokens. Goodput counts answers within their deadline that arrived
during the load. Clients do not retry: the client library's retries are tested in
`tests/api/test_overload.py`. A worker has a dedicated machine in production; here each has a
dedicated core, and all else shares the others (`--no-pin`: everything shares everything).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, cast

import grpc
import grpc.aio
import psutil
from google.rpc import error_details_pb2, status_pb2
from rich.console import Console
from rich.progress import Progress
from shoal.v1 import inference_pb2, inference_pb2_grpc

from benchmarks.common.report import percentile
from tests.support.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
MODEL = "random/overload"
WORDS = (20, 30)
TARGET = 0.95
RECOVERY_TARGET = 5.0
CAPACITY_CONCURRENCY = 24
"""Requests in flight of each client while capacity is measured: some batches for each worker."""
ENVIRONMENT = {"SHOAL_LOG_LEVEL": "WARNING", "SHOAL_BATCH_TOKENS": "512", "OMP_NUM_THREADS": "1"}


@dataclass
class ClientTally:
    """Observations of one client. Times are seconds of the machine's monotonic clock, which
    processes share.
    """

    offered: int = 0
    in_time: list[float] = field(default_factory=list)
    """Arrival times of the answers within their deadlines."""
    seconds: list[float] = field(default_factory=list)
    """Durations of these answers."""
    late: int = 0
    """Let in, and not answered within the deadline."""
    refused: Counter[str] = field(default_factory=Counter)
    with_retry_info: int = 0
    retry_seconds: list[float] = field(default_factory=list)

    def add(self, other: ClientTally) -> None:
        self.offered += other.offered
        self.in_time += other.in_time
        self.seconds += other.seconds
        self.late += other.late
        self.refused += other.refused
        self.with_retry_info += other.with_retry_info
        self.retry_seconds += other.retry_seconds


class Asker:
    """One router's client: plain stubs, so that nothing is retried and little is computed."""

    def __init__(
        self, address: str, texts: Sequence[str], deadline: float, tenant: str = "default"
    ) -> None:
        self._channel = grpc.aio.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._stub = cast(
            "inference_pb2_grpc.InferenceServiceAsyncStub",
            inference_pb2_grpc.InferenceServiceStub(self._channel),
        )
        self._texts = cycle(texts)
        self._deadline = deadline
        self._metadata = (("x-shoal-tenant", tenant),)

    async def ask(self, tally: ClientTally, deadline: float | None = None) -> None:
        request = inference_pb2.EncodeRequest(
            model=MODEL, items=[inference_pb2.Item(text=next(self._texts))]
        )
        tally.offered += 1
        began = time.monotonic()
        try:
            await self._stub.Encode(
                request, timeout=deadline or self._deadline, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            _note(error, tally)
        else:
            tally.in_time.append(time.monotonic())
            tally.seconds.append(time.monotonic() - began)

    async def closed_loop(self, seconds: float, concurrency: int) -> ClientTally:
        """Let each of this many callers send a request again as soon as it is answered."""
        tally, end = ClientTally(), time.monotonic() + seconds

        async def caller() -> None:
            while time.monotonic() < end:
                await self.ask(tally, 60.0)

        await asyncio.gather(*(caller() for _ in range(concurrency)))
        return tally

    async def open_loop(self, seconds: float, rate: float, seed: int) -> ClientTally:
        """Poisson arrivals, whatever becomes of them."""
        tally, generator, calls = ClientTally(), random.Random(seed), set[asyncio.Task[None]]()
        at = time.monotonic()
        end = at + seconds
        while (at := at + generator.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            call = asyncio.create_task(self.ask(tally))
            calls.add(call)
            call.add_done_callback(calls.discard)
        if calls:
            await asyncio.wait(calls)
        return tally

    async def close(self) -> None:
        await self._channel.close()


def _note(error: grpc.aio.AioRpcError, tally: ClientTally) -> None:
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        tally.late += 1
        return
    details = dict(list(error.trailing_metadata() or ())).get("grpc-status-details-bin", b"")
    reason, retry = error.code().name, error_details_pb2.RetryInfo()
    for detail in status_pb2.Status.FromString(
        details if isinstance(details, bytes) else b""
    ).details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            reason = info.reason
        if detail.Unpack(retry):
            tally.with_retry_info += 1
            tally.retry_seconds.append(retry.retry_delay.ToMicroseconds() / 1e6)
    tally.refused[reason] += 1


async def client(address: str, deadline: float, seed: int) -> None:
    """A client process: takes orders as JSON lines, answers each with a tally."""
    from tests.support.texts import texts

    asker = Asker(address, texts(500, *WORDS, seed=seed), deadline)
    loop = asyncio.get_running_loop()
    print("{}", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        if order["kind"] == "closed":
            tally = await asker.closed_loop(order["seconds"], order["concurrency"])
        else:
            tally = await asker.open_loop(order["seconds"], order["rate"], order["seed"])
        print(json.dumps(vars(tally)), flush=True)
    await asker.close()


class ClientProcess:
    """One `client` in a separate process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, address: str, deadline: float, seed: int) -> ClientProcess:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.stress.overload"),
            *("--client", address, "--deadline", str(deadline), "--seed", str(seed)),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 28,
        )
        started = cls(process)
        await started._read_answer()
        return started

    async def order(self, **order: object) -> ClientTally:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        tally = ClientTally(**await self._read_answer())
        tally.refused = Counter(tally.refused)
        return tally

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _read_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"a client process ended with status {await self._process.wait()}; see its words "
                "above"
            )
        return cast("dict[str, Any]", json.loads(line))


@dataclass
class OverloadResult:
    """Results of one run; rates in requests per second, times in seconds."""

    factor: float
    deadline: float
    load_seconds: float
    capacity_before: float
    capacity_after: float
    offered: int
    answered_in_time: int
    late: int
    goodput: float
    goodput_share: float
    """Goodput as a share of the mean of both capacities."""
    refused: dict[str, int]
    retry_info_share: float
    retry_median: float
    p50: float
    p99: float
    idle_seconds: float
    recovery_seconds: float
    peak_rss_bytes: dict[str, int]
    cores: tuple[dict[str, float], dict[str, float]]
    """Cores that each process used while capacity was first measured, and during the overload: they
    show which process needs more.
    """


async def _together(
    clients: Sequence[ClientProcess], orders: Sequence[dict[str, object]]
) -> ClientTally:
    whole = ClientTally()
    for tally in await asyncio.gather(
        *(one.order(**order) for one, order in zip(clients, orders, strict=True))
    ):
        whole.add(tally)
    return whole


async def _capacity(clients: Sequence[ClientProcess], seconds: float) -> float:
    """Answers per second, without those of the first part, in which batches fill up."""
    began = time.monotonic()
    order = {"kind": "closed", "seconds": seconds, "concurrency": CAPACITY_CONCURRENCY}
    tally = await _together(clients, [order] * len(clients))
    first, last = began + seconds / 4, began + seconds
    return sum(first <= at <= last for at in tally.in_time) / (last - first)


async def _idle(asker: Asker) -> float:
    """The median time of one request at a time."""
    tally = ClientTally()
    for _ in range(15):
        await asker.ask(tally, 30.0)
    return median(tally.seconds)


async def _recovery(asker: Asker, idle: float, since: float, patience: float) -> float:
    """Seconds from `since` until the first of three quick requests in a row began."""
    quick: list[float] = []
    while len(quick) < 3 and time.monotonic() < since + patience:
        began, tally = time.monotonic(), ClientTally()
        await asker.ask(tally, 30.0)
        is_quick = bool(tally.seconds) and tally.seconds[0] <= max(2 * idle, idle + 0.02)
        quick = [*quick, began] if is_quick else []
        if tally.refused:
            await asyncio.sleep(0.02)
    return quick[0] - since if len(quick) == 3 else patience


def _pin(cluster: Cluster) -> None:
    """A core for each worker; the others for this process and all that it has started."""
    cores = sorted(os.sched_getaffinity(0))
    own, others = cores[: len(cluster.workers)], cores[len(cluster.workers) :]
    if not others:
        raise SystemExit(
            f"{len(cores)} cores are too few for {len(cluster.workers)} workers and the rest: "
            "--no-pin"
        )
    cores_of = {
        cluster.processes[name].pid: {core} for name, core in zip(cluster.workers, own, strict=True)
    }
    myself = psutil.Process()
    for process in (myself, *myself.children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, cores_of.get(process.pid, set(others)))


async def measure(
    wanted: argparse.Namespace, directory: Path, progress: Progress
) -> OverloadResult:
    from tests.parity.checkpoints import SentenceFiles, write_checkpoint
    from tests.support.texts import texts

    task = progress.add_task("model", total=5)
    write_checkpoint(
        "bert",
        directory / "models" / MODEL,
        hidden=wanted.hidden,
        layers=6,
        heads=6,
        positions=128,
        sentence=SentenceFiles(),
    )
    progress.update(task, advance=1, description="mesh")
    (directory / "mesh").mkdir()
    environment = {**ENVIRONMENT, "SHOAL_BATCH_TOKENS": str(wanted.batch_tokens)}
    routers, workers = wanted.routers, wanted.workers
    with Cluster(
        directory / "mesh",
        models=str(directory / "models"),
        routers=routers,
        workers=workers,
        environment=environment,
    ) as cluster:
        asker = Asker(cluster.addresses[0], texts(100, *WORDS, seed=7), 30.0)
        clients = [
            await ClientProcess.start(address, wanted.deadline, wanted.seed + number)
            for number, address in enumerate(cluster.addresses)
        ]
        if wanted.pin:
            _pin(cluster)
        peaks: Counter[str] = Counter()

        async def watch() -> None:
            processes = {
                name: psutil.Process(process.pid) for name, process in cluster.processes.items()
            }
            while True:
                for name, process in processes.items():
                    peaks[name] = max(peaks[name], process.memory_info().rss)
                await asyncio.sleep(0.5)

        def cpu_seconds() -> dict[str, float]:
            """Return the CPU seconds by process; the clients together."""
            names = {process.pid: name for name, process in cluster.processes.items()}
            used: defaultdict[str, float] = defaultdict(float)
            for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
                times = process.cpu_times()
                used[names.get(process.pid, "clients")] += times.user + times.system
            return used

        def cores_since(before: dict[str, float], began: float) -> dict[str, float]:
            return {
                name: (now - before[name]) / (time.monotonic() - began)
                for name, now in cpu_seconds().items()
            }

        watching = asyncio.create_task(watch())
        await asker.ask(ClientTally(), 60.0)
        idle = await _idle(asker)
        progress.update(task, advance=1, description="capacity")
        used, began = cpu_seconds(), time.monotonic()
        before = await _capacity(clients, wanted.capacity_seconds)
        cores = cores_since(used, began)
        progress.update(
            task, advance=1, description=f"overload, {wanted.factor:g} x {before:.0f} requests/s"
        )
        await _idle(asker)
        used, began = cpu_seconds(), time.monotonic()
        orders = [
            {
                "kind": "open",
                "seconds": wanted.seconds,
                "rate": wanted.factor * before / routers,
                "seed": wanted.seed + number,
            }
            for number in range(routers)
        ]
        loading = asyncio.create_task(_together(clients, orders))
        await asyncio.sleep(max(0.0, began + wanted.seconds - time.monotonic()))
        loaded_cores = cores_since(used, began)
        recovery = await _recovery(asker, idle, began + wanted.seconds, 30.0)
        tally = await loading
        progress.update(task, advance=1, description="capacity again")
        after = await _capacity(clients, wanted.capacity_seconds)
        progress.update(task, advance=1, description="done")
        watching.cancel()
        await asyncio.gather(*(one.stop() for one in clients))
        await asker.close()
    goodput = sum(at <= began + wanted.seconds for at in tally.in_time) / wanted.seconds
    refused = sum(tally.refused.values())
    return OverloadResult(
        wanted.factor, wanted.deadline, wanted.seconds, before, after, tally.offered,
        len(tally.in_time), tally.late, goodput,
        goodput / ((before + after) / 2), dict(tally.refused),
        tally.with_retry_info / refused if refused else 1.0,
        median(tally.retry_seconds or [0.0]), percentile(tally.seconds, 0.5),
        percentile(tally.seconds, 0.99), idle, recovery,
        dict(peaks), (cores, loaded_cores),
    )  # fmt: skip


def _listed(cores: dict[str, float]) -> str:
    return ", ".join(f"{name} {used:.2f}" for name, used in sorted(cores.items()) if used >= 0.005)


def show(result: OverloadResult, console: Console) -> None:
    refused = sum(result.refused.values())
    reasons = (
        ", ".join(f"{reason} {count:,}" for reason, count in sorted(result.refused.items()))
        or "none"
    )
    admitted = result.answered_in_time + result.late
    memory = ", ".join(
        f"{name} {size / 2**20:.0f}" for name, size in sorted(result.peak_rss_bytes.items())
    )
    lines = (
        (
            f"capacity            {result.capacity_before:.1f} requests/s before, "
            f"{result.capacity_after:.1f} after"
        ),
        (
            f"offered             {result.offered:,} in {result.load_seconds:g} s "
            f"({result.factor:g} x), due in {result.deadline:g} s"
        ),
        (
            f"let in              {admitted:,}; answered in time {result.answered_in_time:,}, late "
            f"{result.late:,}"
        ),
        (
            f"goodput             {result.goodput:.1f} requests/s = {result.goodput_share:.3f} of "
            f"capacity (target {TARGET})"
        ),
        f"refused             {refused:,}: {reasons}",
        f"with RetryInfo      {result.retry_info_share:.1%}, median {result.retry_median:.2f} s",
        (
            f"answered in time    p50 {result.p50:.3f} s, p99 {result.p99:.3f} s (idle "
            f"{result.idle_seconds * 1e3:.0f} ms)"
        ),
        f"cores, at capacity  {_listed(result.cores[0])}",
        f"cores, overloaded   {_listed(result.cores[1])}",
        f"recovery            {result.recovery_seconds:.2f} s (target {RECOVERY_TARGET:g})",
        f"peak memory, MiB    {memory}",
    )
    console.print("\n".join(lines), highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the overload lasts")
    parser.add_argument("--factor", type=float, default=5.0, help="offered / capacity")
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds each request may take")
    parser.add_argument("--capacity-seconds", type=float, default=10.0)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--hidden",
        type=int,
        default=384,
        help="width of the model: a request takes tens of ms with 384",
    )
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pin",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a dedicated core for each worker",
    )
    parser.add_argument(
        "--json", action="store_true", help="one object on stdout; the table goes to stderr"
    )
    parser.add_argument("--client", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.client:
        asyncio.run(client(wanted.client, wanted.deadline, wanted.seed))
        return
    console = Console(stderr=wanted.json)
    with (
        tempfile.TemporaryDirectory(prefix="shoal-overload-") as directory,
        Progress(console=console, transient=True) as progress,
    ):
        result = asyncio.run(measure(wanted, Path(directory), progress))
    show(result, console)
    if wanted.json:
        print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
