"""One worker with memory for four of forty models under Zipf traffic: all requests are answered,
memory is bounded, and the simulator predicts the cost.

One client sends requests sequentially, so the order of use is the trace's.
`services/scheduler/simulate` then replays them with the measured load seconds. After that, eight
clients send concurrently. SHOAL_ZIPF_SECONDS sets the duration (9 s); from 60 s on the measured
stall is also compared. SHOAL_ZIPF_LRU=1 repeats the requests with LRU on a separate worker.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import grpc
import numpy as np
import psutil
import pytest
import shoal
import torch
from numpy.typing import NDArray
from shoal.v1 import mesh_pb2, mesh_pb2_grpc

from libs.models import EncodeResult, EncodeWork, PackedModel, load_model
from services.scheduler.simulate.engine import SimulatedFleet, simulate
from services.scheduler.simulate.record import Recorder
from services.scheduler.simulate.trace import ModelCost, Trace, TraceRequest
from services.worker.machine.disk import weight_bytes
from tests.models.restoring import restore
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.texts import texts
from tests.support.waiting import wait_until

SECONDS: Final = float(os.environ.get("SHOAL_ZIPF_SECONDS", "9"))
COMPARE_LRU: Final = os.environ.get("SHOAL_ZIPF_LRU", "") == "1"
MODELS: Final = 40
ROOM: Final = 4
SKEW: Final = 1.0
BATCH_TOKENS: Final = 256
ACTIVATION_BYTES: Final = BATCH_TOKENS * 1547
"""Maximum activations of a batch, as the worker measures for the widest model here."""
CROWD: Final = 8
TEXTS: Final = texts(50, shortest=2, longest=12, seed=40)
PHASES: Final = 8
MIN_REQUESTS: Final = 100
"""Minimum requests of each kind, however slow the machine."""
MIN_SAMPLES: Final = 30
"""Minimum samples of the worker during the requests of each kind."""
FLAT: Final = 1.05 if SECONDS >= 60 else 1.25
"""Maximum ratio of memory in the second half to the first. A short run is dominated by loading code
and arenas.
"""
CHECKED: Final = 40
"""Answers that are compared with those of the model alone."""


measured = pytest.mark.skipif(SECONDS < 60, reason="times a machine: SHOAL_ZIPF_SECONDS=60")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and its answer. Times are Unix seconds of this machine."""

    model: str
    text: str
    began: float
    ended: float
    vector: NDArray[np.float32]


@dataclass(slots=True)
class Seen:
    """Samples of the worker during the requests."""

    limit_bytes: int = 0
    peak_bytes: int = 0
    most_resident: int = 0
    samples: int = 0
    rss: list[int] = field(default_factory=list)
    turned: int = 0
    """Number of `rss` samples from the sequential phase."""


@dataclass(frozen=True, slots=True)
class Loaded:
    model: str
    bytes: int
    seconds: float


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make wide models, which use much memory and load fast, and deep ones, the opposite: 1 to 80
    ms a megabyte.
    """
    root = tmp_path_factory.mktemp("forty")
    chance = random.Random(40)
    made = {}
    for number in range(MODELS):
        directory = root / f"m{number:02}"
        hidden, layers, words = [
            (64, 1, chance.randrange(8_000, 24_000)),
            (64, chance.randrange(12, 24), 400),
            (32, chance.randrange(16, 32), 400),
            (64, 1, chance.randrange(8_000, 24_000)),
        ][number % 4]
        if SECONDS < 60:  # load times are compared only in a long run
            layers, words = -(-layers // 2), max(400, words // 2)
        write_checkpoint(
            "bert", directory, seed=number, hidden=hidden, layers=layers, sentence=SentenceFiles(),
            config={"vocab_size": words},
        )  # fmt: skip
        made[f"zipf/m{number:02}"] = directory
    return made


@pytest.fixture(scope="module")
def memory_bytes(checkpoints: dict[str, Path]) -> int:
    """Return memory for four models of average size and a batch's activations."""
    sizes = [weight_bytes(directory, 4) for directory in checkpoints.values()]
    limit = ROOM * sum(sizes) // len(sizes) + ACTIVATION_BYTES
    assert max(sizes) + ACTIVATION_BYTES < limit
    return limit


def started(
    directory: Path, checkpoints: dict[str, Path], memory_bytes: int, policy: str
) -> Cluster:
    environment = {
        "SHOAL_MEMORY_BYTES": str(memory_bytes),
        "SHOAL_BATCH_TOKENS": str(BATCH_TOKENS),
        "SHOAL_EVICTION": policy,
        # oneDNN and ideep keep that many compiled products whatever models are loaded. A worker's
        # 256 would take minutes to fill.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        "LRU_CACHE_CAPACITY": "128",
    }
    shelves = ":".join(f"{name}={path}" for name, path in checkpoints.items())
    return Cluster(directory, models=shelves, environment=environment)


def draws(names: Sequence[str], seed: int) -> Iterator[tuple[str, str]]:
    """Yield model and text forever. A model's popularity is independent of its size."""
    chance = random.Random(seed)
    ranked = chance.sample(names, len(names))
    weights = [(rank + 1) ** -SKEW for rank in range(len(ranked))]
    while True:
        yield chance.choices(ranked, weights)[0], chance.choice(TEXTS)


def ask(client: shoal.Client, model: str, text: str) -> Asked:
    began = time.time()
    dense = client.encode(model, [text]).dense
    assert dense is not None
    return Asked(model, text, began, time.time(), dense[0])


def ask_in_turn(
    client: shoal.Client, wanted: Iterator[tuple[str, str]], goes_on: Callable[[int], bool]
) -> list[Asked]:
    asked = []
    for model, text in wanted:
        asked.append(ask(client, model, text))
        if not goes_on(len(asked)):
            break
    return asked


def ask_at_once(
    client: shoal.Client, wanted: Iterator[tuple[str, str]], goes_on: Callable[[int], bool]
) -> list[Asked]:
    lock, counted = threading.Lock(), itertools.count()

    def one_of_many(_: int) -> list[Asked]:
        asked = []
        while goes_on(next(counted)):
            with lock:
                model, text = next(wanted)
            asked.append(ask(client, model, text))
        return asked

    with ThreadPoolExecutor(CROWD) as pool:
        return [one for own in pool.map(one_of_many, range(CROWD)) for one in own]


@contextmanager
def watching(cluster: Cluster, recorder: Recorder) -> Iterator[Seen]:
    """Sample the mesh and the worker's memory from a thread."""
    seen, over = Seen(), threading.Event()
    process = psutil.Process(cluster.processes["worker-0"].pid)

    def sample(mesh: mesh_pb2_grpc.MeshServiceStub) -> None:
        now = mesh.GetMesh(mesh_pb2.GetMeshRequest()).mesh
        recorder.see(now, time.monotonic())
        worker = now.workers[0]
        seen.limit_bytes = worker.memory_bytes
        seen.peak_bytes = max(seen.peak_bytes, worker.used_bytes)
        seen.most_resident = max(seen.most_resident, len(worker.resident))
        seen.rss.append(process.memory_info().rss)
        seen.samples += 1

    def run() -> None:
        with grpc.insecure_channel(cluster.address) as channel:
            mesh = mesh_pb2_grpc.MeshServiceStub(channel)
            sample(mesh)
            ready.set()
            while not over.wait(0.05):
                sample(mesh)

    ready = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        wait_until(lambda: ready.is_set() or running.done(), 60, "a first look")
        try:
            yield seen
        finally:
            over.set()
            running.result()


def loads(cluster: Cluster) -> list[Loaded]:
    """Return the loads that the worker logged."""
    lines = (cluster.directory / "worker-0.log").read_text().splitlines()
    reported = [json.loads(line) for line in lines if line.startswith("{")]
    return [
        Loaded(one["model"], one["bytes"], one["seconds"])
        for one in reported
        if one["message"] == "model loaded"
    ]


@dataclass(frozen=True, slots=True)
class Played:
    """The results of the traffic. `limit_bytes` is the worker's memory without a batch's
    activations.
    """

    in_turn: list[Asked]
    at_once: list[Asked]
    loads: list[Loaded]
    """While one client asked."""
    limit_bytes: int
    seen: Seen
    recorded: list[TraceRequest]
    lanes: list[mesh_pb2.LaneStatus]
    log: str

    @property
    def trace(self) -> Trace:
        """The requests of the sequential client with their times, and the mean load seconds by
        model.
        """
        took: dict[str, list[float]] = {}
        for load in self.loads:
            took.setdefault(load.model, []).append(load.seconds)
        size = {load.model: load.bytes for load in self.loads}
        costs = {
            model: ModelCost(model, size[model], statistics.fmean(own))
            for model, own in took.items()
        }
        began = self.in_turn[0].began
        return Trace(
            "zipf", [TraceRequest(one.began - began, one.model, 10) for one in self.in_turn], costs
        )

    @property
    def fleet(self) -> SimulatedFleet:
        answers = statistics.median(one.ended - one.began for one in self.in_turn)
        return SimulatedFleet(
            self.limit_bytes,
            batch_tokens=BATCH_TOKENS,
            batch_seconds=answers / 2,
            clients=1,
            count_seconds=1.0,
        )

    def simulated(self, policy: str) -> float:
        """Return stall seconds, averaged over the phase at which routers count waiting jobs within
        a second.
        """
        trace = self.trace
        late = [
            replace(
                trace, requests=[replace(one, at=one.at + part / PHASES) for one in trace.requests]
            )
            for part in range(PHASES)
        ]
        return statistics.fmean(simulate(one, self.fleet, policy).stall_seconds for one in late)


def read_lanes(address: str) -> list[mesh_pb2.LaneStatus]:
    with grpc.insecure_channel(address) as channel:
        mesh = mesh_pb2_grpc.MeshServiceStub(channel)
        return list(mesh.GetMesh(mesh_pb2.GetMeshRequest()).mesh.lanes)


@pytest.fixture(scope="module")
def played(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path], memory_bytes: int
) -> Played:
    recorder, wanted = Recorder(), draws(list(checkpoints), seed=4)
    with started(tmp_path_factory.mktemp("mesh"), checkpoints, memory_bytes, "cost") as cluster:
        with watching(cluster, recorder) as seen, shoal.Client(cluster.address) as client:

            def until(seconds: float) -> Callable[[int], bool]:
                """Decide whether to go on: for these seconds, and until all is there."""
                end, samples = time.monotonic() + seconds, len(seen.rss) + MIN_SAMPLES

                def goes_on(count: int) -> bool:
                    assert time.monotonic() < end + 600, "the worker is not sampled"
                    is_enough = count >= MIN_REQUESTS and len(seen.rss) >= samples
                    return time.monotonic() < end or not is_enough

                return goes_on

            in_turn = ask_in_turn(client, wanted, until(SECONDS * 2 / 3))
            loaded, seen.turned = loads(cluster), len(seen.rss)
            at_once = ask_at_once(client, wanted, until(SECONDS / 3))
            asked = len(in_turn) + len(at_once)
            wait_until(
                lambda: sum(lane.done_jobs for lane in read_lanes(cluster.address)) >= asked,
                60,
                "the lanes' counters",
            )
            wait_until(lambda: len(recorder.requests) >= asked, 60, "all to be recorded")
        return Played(
            in_turn,
            at_once,
            loaded,
            memory_bytes - ACTIVATION_BYTES,
            seen,
            recorder.requests,
            read_lanes(cluster.address),
            (cluster.directory / "worker-0.log").read_text(),
        )


def test_every_request_is_answered_once_and_nothing_in_flight_is_lost(played: Played) -> None:
    asked = Counter(one.model for one in (*played.in_turn, *played.at_once))
    assert {lane.model: lane.done_jobs for lane in played.lanes} == asked
    assert all(lane.enqueued_jobs == lane.done_jobs for lane in played.lanes)
    assert not any(
        lane.dead_jobs or lane.expired_jobs or lane.cancelled_jobs for lane in played.lanes
    )


def test_answers_are_those_of_the_model_alone(played: Played, checkpoints: dict[str, Path]) -> None:
    """Compare a sample of both kinds of traffic."""
    chance = random.Random(0)
    assert played.in_turn
    assert played.at_once
    sample = [
        one
        for asked in (played.in_turn, played.at_once)
        for one in chance.sample(asked, CHECKED // 2)
    ]
    models: dict[str, PackedModel] = {}
    for one in sample:
        if one.model not in models:
            models[one.model] = load_model(
                checkpoints[one.model], one.model, torch.device("cpu"), torch.float32
            )
        np.testing.assert_allclose(
            one.vector, alone(models[one.model], one.text), rtol=1e-4, atol=1e-5
        )


def alone(model: PackedModel, text: str) -> NDArray[np.float32]:
    prepared = model.prepare(EncodeWork([text]))
    result = model.finish(prepared, model.forward(prepared.head, prepared.sequences))
    assert isinstance(result, EncodeResult)
    assert result.dense is not None
    return restore(result.dense)[0]


def test_resident_bytes_never_exceed_the_limit(played: Played, memory_bytes: int) -> None:
    assert played.seen.limit_bytes == memory_bytes
    assert 0.5 * memory_bytes < played.seen.peak_bytes <= memory_bytes
    assert ROOM <= played.seen.most_resident < MODELS / 2
    assert played.seen.samples >= 2 * MIN_SAMPLES
    assert "overcommitted" not in played.log


def test_memory_does_not_grow(played: Played) -> None:
    """Compare the last third of each kind of traffic with the one before, since they use different
    memory.
    """
    turned = played.seen.turned
    for kind, rss in (("in turn", played.seen.rss[:turned]), ("at once", played.seen.rss[turned:])):
        third = len(rss) // 3
        before, after = statistics.fmean(rss[third:-third]), statistics.fmean(rss[-third:])
        print(f"worker's memory, {kind}: {before / 2**20:.0f} MiB, then {after / 2**20:.0f} MiB")
        assert after < FLAT * before


@measured
def test_simulator_predicts_the_stall(played: Played) -> None:
    stall, simulated = sum(load.seconds for load in played.loads), played.simulated("cost")
    print(
        f"stall {stall:.2f} s in {len(played.loads)} loads for {len(played.in_turn)} "
        f"requests; simulated {simulated:.2f} s"
    )
    assert simulated == pytest.approx(stall, rel=0.1)


@measured
def test_default_policy_stalls_at_most_nine_tenths_of_lru(played: Played) -> None:
    cost, lru = played.simulated("cost"), played.simulated("lru")
    print(f"simulated stall: cost {cost:.2f} s, LRU {lru:.2f} s")
    assert cost <= 0.9 * lru


def test_traffic_was_recorded(played: Played) -> None:
    """The simulator's recorder sees the requests from outside, in about their order."""
    asked = Counter(one.model for one in (*played.in_turn, *played.at_once))
    assert Counter(request.model for request in played.recorded) == asked


@pytest.mark.skipif(
    not COMPARE_LRU, reason="SHOAL_ZIPF_LRU=1 runs the requests once more, with LRU"
)
def test_lru_measurably_stalls_longer(
    played: Played,
    checkpoints: dict[str, Path],
    memory_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    wanted = [(one.model, one.text) for one in played.in_turn]
    with (
        started(tmp_path_factory.mktemp("lru"), checkpoints, memory_bytes, "lru") as cluster,
        shoal.Client(cluster.address) as client,
    ):
        asked = ask_in_turn(client, iter(wanted), lambda count: True)
        loaded = loads(cluster)
    again = replace(played, in_turn=asked, loads=loaded)
    cost, lru = sum(load.seconds for load in played.loads), sum(load.seconds for load in loaded)
    simulated = again.simulated("lru")
    print(
        f"stall: cost {cost:.2f} s, LRU {lru:.2f} s in {len(loaded)} loads; "
        f"simulated LRU {simulated:.2f} s"
    )
    assert simulated == pytest.approx(lru, rel=0.1)
    assert cost <= 0.9 * lru
