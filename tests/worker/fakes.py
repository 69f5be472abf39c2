"""A fast model with configurable failures, and a router with in-memory lanes. Both implement the
real contracts.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
from numpy.typing import NDArray
from shoal.v1 import inference_pb2, tensor_pb2, worker_pb2, worker_pb2_grpc

from libs.catalog.card import Card
from libs.errors import InputTooLong, InvalidInput, ModelBroken, NoCapacity
from libs.models import (
    CancelCheck,
    EncodeResult,
    EncodeWork,
    Head,
    InputSequence,
    Output,
    Prepared,
    Result,
    StoredArray,
    Work,
    YieldPoint,
)
from libs.models.interface.sequences import never_yield
from libs.models.interface.work import never_cancelled
from libs.serving import StreamCall
from libs.serving.calls.interceptor import Interceptor

SERVICE = "shoal.v1.WorkerService"
POISON = "\N{SKULL}"
ENDLESS = "\N{INFINITY}"
SLOW = "\N{TURTLE}"
LAYERED = "\N{ONION}"
CREEPING = "\N{SNAIL}"
LASTING = "\N{HOURGLASS}"
STUCK = "\N{LOCK}"
MAX_TOKENS = 1000
HANG_SECONDS = 120.0
"""Limit of waits that only ends a test that hangs, also on a machine that is much slower."""


class FakeModel:
    """A token is a character; a text's vector is (number of tokens, sum of their code points).

    Special texts:

    - POISON: the forward pass raises.
    - ENDLESS: a text with only this one gives NaN.
    - SLOW: the forward pass waits for `gate`; LAYERED does so between two layers.
    - CREEPING: preparation does not end by itself.
    - LASTING: making the answer takes until the job ends; STUCK waits for `gate` without yielding.
    """

    def __init__(self, name: str = "org/fake", size: int = 100) -> None:
        self.card = Card(
            model=name,
            revision="r1",
            family="fake",
            kind="dense",
            tasks=("encode",),
            representations=("dense",),
            max_tokens=MAX_TOKENS,
        )
        self.bytes = size
        self.host_bytes = 0
        self.activation_bytes_per_token = 0.0
        """The result of `probe`."""
        self.gate = threading.Event()
        self.batches: list[list[int]] = []
        """Tokens of each sequence of each attempted forward pass."""
        self.adapters: dict[str, Path] = {}
        """Adapters by directory. Each takes 10 bytes and adds the length of its name to the code
        points.
        """
        self.started = threading.Event()
        self.creeping = 0
        """Number of texts with CREEPING that are being prepared."""
        self.lasting = 0
        """Number of answers with LASTING or STUCK that are being made."""
        self.fp32_model: FakeModel | None = None
        self.widenings: list[int] = []
        """The thread of each call of `load_fp32_fallback`, which returns `fp32_model`."""

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        if not isinstance(work, EncodeWork):
            raise InvalidInput("only encode")
        for index, text in enumerate(work.texts):
            check_cancelled()
            self.creeping += CREEPING in text
            try:
                while CREEPING in text:
                    time.sleep(0.001)
                    check_cancelled()
            finally:
                self.creeping -= CREEPING in text
            if len(text) > MAX_TOKENS:
                raise InputTooLong(
                    f"{len(text)} tokens, at most {MAX_TOKENS}", field=f"items[{index}].text"
                )
        sequences = [
            InputSequence(np.array([ord(letter) for letter in text], dtype=np.int32))
            for text in work.texts
        ]
        return Prepared(work, "dense", sequences)

    def forward(
        self, head: Head, sequences: list[InputSequence], yield_point: YieldPoint = never_yield
    ) -> list[Output]:
        self.batches.append([sequence.tokens for sequence in sequences])
        self.started.set()
        letters = {chr(token) for sequence in sequences for token in sequence.ids}
        if SLOW in letters:
            self.gate.wait(HANG_SECONDS)
        while LAYERED in letters and not self.gate.wait(0.001):
            yield_point()
        if POISON in letters:
            raise RuntimeError("poisoned")
        return [self._vector(sequence) for sequence in sequences]

    def _vector(self, sequence: InputSequence) -> Output:
        assert not sequence.adapter or sequence.adapter in self.adapters
        total = (
            float("nan")
            if ord(ENDLESS) in sequence.ids
            else float(sequence.ids.sum() + len(sequence.adapter))
        )
        return np.array([sequence.tokens, total], dtype=np.float32)

    def finish(
        self,
        prepared: Prepared,
        outputs: list[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        texts = "".join(prepared.work.texts) if isinstance(prepared.work, EncodeWork) else ""
        self.lasting += LASTING in texts or STUCK in texts
        try:
            while LASTING in texts:
                time.sleep(0.001)
                check_cancelled()
            if STUCK in texts:
                self.gate.wait(HANG_SECONDS)
        finally:
            self.lasting -= LASTING in texts or STUCK in texts
        rows = (
            np.stack(cast("list[NDArray[np.float32]]", outputs))
            if outputs
            else np.zeros((0, 2), np.float32)
        )
        return EncodeResult(dense=StoredArray("float32", rows.shape, rows))

    def add_adapter(self, name: str, directory: Path) -> int:
        if (directory / "broken").exists():
            raise ModelBroken("adapter_model.safetensors: tensor 'w' is odd")
        self.adapters[name] = directory
        return 10

    def remove_adapter(self, name: str) -> None:
        self.adapters.pop(name, None)

    def load_fp32_fallback(self) -> FakeModel | None:
        self.widenings.append(threading.get_ident())
        return self.fp32_model

    def drop_host_copy(self) -> None:
        self.host_bytes = 0

    def park(self) -> FakeParked:
        return FakeParked(self, self.host_bytes or self.bytes)

    def probe(self) -> float:
        return self.activation_bytes_per_token


@dataclass
class FakeParked:
    model: FakeModel
    host_bytes: int

    def resume(self) -> FakeModel:
        return self.model


def vectors(result: worker_pb2.JobResult) -> list[list[float]]:
    tensor = result.encode.dense
    assert tensor.data_type == tensor_pb2.DATA_TYPE_FLOAT32
    rows: list[list[float]] = (
        np.frombuffer(tensor.data, "<f4").reshape(tuple(tensor.shape)).tolist()
    )
    return rows


def vector(text: str) -> list[float]:
    return [float(len(text)), float(sum(map(ord, text)))]


def encode_job(
    job_id: str, *texts: str, seconds: float = 600.0, first_item: int = 0
) -> worker_pb2.Job:
    now = time.time() * 1000
    return worker_pb2.Job(
        job_id=job_id,
        encode=inference_pb2.EncodeRequest(items=[inference_pb2.Item(text=text) for text in texts]),
        first_item=first_item,
        deadline_unix_ms=int(now + seconds * 1000),
        queued_unix_ms=int(now),
    )


@dataclass
class FakeLanes:
    """The state that Redis keeps for routers: queues by model (or `model+adapter`), leases, and
    answers.
    """

    queued: dict[str, deque[tuple[str, bytes]]] = field(default_factory=lambda: defaultdict(deque))
    """Job IDs and payloads."""
    leased: dict[str, set[str]] = field(default_factory=dict)
    given: dict[str, worker_pb2.PullResponse] = field(default_factory=dict)
    """Batches by the IDs that workers choose."""
    answers: dict[str, list[worker_pb2.JobResult]] = field(
        default_factory=lambda: defaultdict(list)
    )
    heartbeats: list[worker_pb2.HeartbeatRequest] = field(default_factory=list)
    on_disk: dict[str, int] = field(default_factory=dict)
    """States of the models on disk, as in the last list."""
    is_disk_known: bool = True
    """Whether the next heartbeat that names its list by a tag finds it."""
    connects: list[tuple[str, worker_pb2.ConnectRequest]] = field(default_factory=list)
    completes: list[worker_pb2.CompleteRequest] = field(default_factory=list)
    pulls: list[worker_pb2.PullRequest] = field(default_factory=list)
    handed_back: list[str] = field(default_factory=list)
    next_response: worker_pb2.HeartbeatResponse = field(
        default_factory=worker_pb2.HeartbeatResponse
    )
    """Sent with the next heartbeat's reply."""
    claimed: set[str] = field(default_factory=set)
    must_beat: bool = False
    """Whether the next pull's reply requests a heartbeat."""
    rung: asyncio.Event = field(default_factory=asyncio.Event)
    ahead_seconds: float = 0.0
    """Seconds by which the routers' clock is ahead of the machine's."""

    def put(self, model: str, *jobs: worker_pb2.Job, adapter: str = "") -> None:
        for job in jobs:
            self.put_payload(model, job.job_id, job.SerializeToString(), adapter)

    def put_payload(self, model: str, job_id: str, payload: bytes, adapter: str = "") -> None:
        self.queued[_lane(model, adapter)].append((job_id, payload))
        self.rung.set()

    def answer_of(self, job_id: str) -> worker_pb2.JobResult:
        """Return the only answer to a job."""
        (result,) = self.answers[job_id]
        return result

    def states(self) -> dict[str, int]:
        """Return the states of the models in the last heartbeat."""
        return (
            self.on_disk | {model.model: model.state for model in self.heartbeats[-1].models}
            if self.heartbeats
            else {}
        )

    def advance_clock(self, seconds: float) -> None:
        """Move the routers' clock ahead, and let the worker know with the reply to a pull. Jobs
        then expire at this point of a test, however long the steps before it took.
        """
        self.ahead_seconds += seconds
        self.must_beat = True
        self.rung.set()

    def lease(self, request: worker_pb2.PullRequest) -> worker_pb2.PullResponse | None:
        response = self._lease(request)
        if response is not None and self.ahead_seconds:
            response.now_unix_ms = int((time.time() + self.ahead_seconds) * 1000)
        return response

    def _lease(self, request: worker_pb2.PullRequest) -> worker_pb2.PullResponse | None:
        if self.must_beat:
            self.must_beat = False
            return worker_pb2.PullResponse(heartbeat_now=True)
        if request.asked_again and self.leased.get(request.batch_id):
            return self.given[request.batch_id]
        for asked in request.lanes:
            jobs = self.queued[_lane(asked.model, asked.adapter)]
            if jobs:
                taken = [jobs.popleft() for _ in range(min(len(jobs), request.budget_jobs))]
                assert request.batch_id not in self.leased
                self.leased[request.batch_id] = {job_id for job_id, _ in taken}
                self.given[request.batch_id] = worker_pb2.PullResponse(
                    lane=asked,
                    batch_id=request.batch_id,
                    jobs=[payload for _, payload in taken],
                    lease_ms=15000,
                )
                return self.given[request.batch_id]
        held = {asked.model for asked in request.lanes}
        cold = [lane for lane, jobs in self.queued.items() if jobs and lane not in self.claimed]
        for lane in cold:
            model, _, adapter = lane.partition("+")
            if request.can_load or (adapter and model in held):
                self.claimed.add(lane)
                return worker_pb2.PullResponse(load_model=model, load_adapter=adapter)
        return None


def _lane(model: str, adapter: str) -> str:
    return f"{model}+{adapter}" if adapter else model


class _Counting(grpc.aio.ServerInterceptor):
    """Counts the streams that begin."""

    def __init__(self, router: FakeRouter) -> None:
        self._router = router

    async def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: Any
    ) -> Any:
        self._router.streams += handler_call_details.method.endswith("/Multiplex")
        return await continuation(handler_call_details)


class FakeRouter(worker_pb2_grpc.WorkerServiceServicer):
    """WorkerService over FakeLanes.

    Args of tests: `refuse_completes` makes Complete fail; `is_stopping` ends pulls immediately with
    nothing. `streams` counts the streams for pulls and answers.
    """

    def __init__(self, lanes: FakeLanes) -> None:
        self.lanes = lanes
        self.refuse_completes = False
        self.is_stopping = False
        self.streams = 0
        self.address = ""
        streams = {f"/{SERVICE}/Multiplex": self.stream_calls()}
        interceptors = [_Counting(self), Interceptor([SERVICE], streams=streams)]
        self._server = grpc.aio.server(
            interceptors=interceptors,
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)],
        )

    async def start(self, address: str = "127.0.0.1:0") -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(address)}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Pull(
        self, request: worker_pb2.PullRequest, context: object
    ) -> worker_pb2.PullResponse:
        self.lanes.pulls.append(request)
        if self.is_stopping:
            return worker_pb2.PullResponse()
        try:
            async with asyncio.timeout(request.wait_seconds):
                while (response := self.lanes.lease(request)) is None:
                    self.lanes.rung.clear()
                    await self.lanes.rung.wait()
                return response
        except TimeoutError:
            return worker_pb2.PullResponse()

    def Multiplex(self, request_iterator: object, context: object) -> Any:
        raise NotImplementedError("the interceptor answers the calls of the stream")

    def stream_calls(self) -> dict[str, StreamCall]:
        return {
            "pull": StreamCall("Pull", worker_pb2.PullRequest, self.Pull),
            "complete": StreamCall("Complete", worker_pb2.CompleteRequest, self.Complete),
        }

    async def Complete(
        self, request: worker_pb2.CompleteRequest, context: object
    ) -> worker_pb2.CompleteResponse:
        if self.refuse_completes:
            raise NoCapacity("away")
        self.lanes.completes.append(request)
        lease = self.lanes.leased[request.batch_id]
        for completed in request.jobs:
            lease.discard(completed.job_id)
            self.lanes.answers[completed.job_id].append(
                worker_pb2.JobResult.FromString(completed.result)
            )
        if request.release:
            self.lanes.handed_back.extend(lease)
            lease.clear()
        return worker_pb2.CompleteResponse(accepted=len(request.jobs))

    async def Heartbeat(
        self, request: worker_pb2.HeartbeatRequest, context: object
    ) -> worker_pb2.HeartbeatResponse:
        lanes = self.lanes
        if not request.on_disk_tag:
            lanes.on_disk = {model.model: model.state for model in request.on_disk}
        lanes.heartbeats.append(request)
        response, lanes.next_response = lanes.next_response, worker_pb2.HeartbeatResponse()
        is_known = lanes.is_disk_known if request.on_disk_tag else bool(request.on_disk)
        response.on_disk_tag = "its disk" if is_known else ""
        lanes.is_disk_known = True
        return response

    async def Connect(
        self, request: worker_pb2.ConnectRequest, context: object
    ) -> AsyncIterator[worker_pb2.ConnectResponse]:
        self.lanes.connects.append((self.address, request))
        yield worker_pb2.ConnectResponse()
        await asyncio.Event().wait()


@asynccontextmanager
async def routers(lanes: FakeLanes, count: int = 1) -> AsyncIterator[list[FakeRouter]]:
    running = [FakeRouter(lanes) for _ in range(count)]
    for router in running:
        await router.start()
    try:
        yield running
    finally:
        for router in running:
            await router.stop()


async def until(
    predicate: Callable[[], bool], what: str = "the condition", timeout: float = HANG_SECONDS
) -> None:
    """Wait until `predicate()` is true."""
    end = time.monotonic() + timeout
    while not predicate():
        assert time.monotonic() < end, f"waited {timeout:g} s for {what}"
        await asyncio.sleep(0.005)


def checkpoint(root: Path, model: str) -> Path:
    """Make a directory that is detected as a checkpoint."""
    directory = root / model
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory
