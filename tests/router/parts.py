"""A worker without models, and what else the router's tests share. The worker speaks WorkerService
over real gRPC.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from shoal.transport import multiplex
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import (
    inference_pb2_grpc,
    mesh_pb2,
    mesh_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
    multiplex_pb2,
    tensor_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

from libs.catalog.overrides import Catalog
from libs.catalog.pools import Pools
from libs.serving.watched import Watched
from libs.versions import WIRE_VERSION
from services.router.admission.routing.routes import Routes
from services.router.admission.tenants import DEFAULT_TENANTS, watch_tenants
from services.router.app import running
from services.router.settings import Settings

MODEL = "tests/embedder"
CALL_SECONDS = 600.0
EMBEDS = (models_pb2.TASK_ENCODE, models_pb2.TASK_SCORE)

Contents = TypeVar("Contents", bound=Message)


def card(
    model: str = MODEL, *, labels: Sequence[str] = (), tasks: Sequence[models_pb2.Task] = EMBEDS
) -> models_pb2.ModelCard:
    """Return the card of an embedding model with 4 dimensions."""
    return models_pb2.ModelCard(
        model=model,
        revision="r1",
        family="fake",
        tasks=tasks,
        labels=labels,
        representations=[pb.REPRESENTATION_DENSE],
        dimensions=4,
        max_tokens=512,
    )


def vector(text: str) -> bytes:
    """Return the fake worker's vector of a text: its length, its first and last character, and
    1.
    """
    return struct.pack("<4f", len(text), ord(text[0]), ord(text[-1]), 1.0)


def encode_answer(request: pb.EncodeRequest) -> pb.EncodeResponse:
    data = b"".join(vector(item.text) for item in request.items)
    dense = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=[len(request.items), 4], data=data
    )
    return pb.EncodeResponse(
        dense=dense, model_revision="r1", usage=pb.Usage(input_tokens=len(request.items))
    )


def score_answer(request: pb.ScoreRequest) -> pb.ScoreResponse:
    """A document's score is its length."""
    data = b"".join(struct.pack("<f", len(item.text)) for item in request.documents)
    scores = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=[len(request.documents)], data=data
    )
    return pb.ScoreResponse(scores=scores, model_revision="r1")


def extract_answer(request: pb.ExtractRequest) -> pb.ExtractResponse:
    """The one label of an item is its text."""
    results = [
        pb.Extraction(labels=[pb.LabelScore(label=item.text, score=1.0)]) for item in request.items
    ]
    return pb.ExtractResponse(results=results, model_revision="r1")


def tokenize_answer(request: pb.TokenizeRequest) -> pb.TokenizeResponse:
    """A token is a character, and its id the character's number."""
    results = []
    for text in request.texts:
        counted = pb.Tokenization(count=len(text), kept_tokens=len(text))
        if not request.count_only:
            counted.ids.extend(map(ord, text))
            counted.starts.extend(range(len(text)))
            counted.ends.extend(range(1, len(text) + 1))
        results.append(counted)
    return pb.TokenizeResponse(
        results=results,
        max_tokens=512,
        model_revision="r1",
        usage=pb.Usage(input_tokens=len(results)),
    )


def detokenize_answer(request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
    """Answer a detokenize job, as tokenize_answer does the inverse."""
    texts = ["".join(map(chr, one.ids)) for one in request.sequences]
    return pb.DetokenizeResponse(
        texts=texts, model_revision="r1", usage=pb.Usage(input_tokens=len(texts))
    )


def answer(job: worker_pb2.Job) -> worker_pb2.JobResult:
    operation = job.WhichOneof("operation")
    if operation == "encode":
        return worker_pb2.JobResult(encode=encode_answer(job.encode))
    if operation == "score":
        return worker_pb2.JobResult(score=score_answer(job.score))
    if operation == "tokenize":
        return worker_pb2.JobResult(tokenize=tokenize_answer(job.tokenize))
    if operation == "detokenize":
        return worker_pb2.JobResult(detokenize=detokenize_answer(job.detokenize))
    return worker_pb2.JobResult(extract=extract_answer(job.extract))


class FakeWorker:
    """Pulls, answers and reports as a worker does.

    Args:
        hold: Keep the batch that is pulled next until `resume`.
        connects: Open the stream by which routers know that the worker lives.
    """

    def __init__(
        self,
        address: str,
        worker_id: str = "w1",
        *,
        models: Iterable[models_pb2.ModelCard] = (),
        on_disk: Iterable[models_pb2.ModelCard] = (),
        can_load: bool = False,
        failure: worker_pb2.Failure | None = None,
        budget_tokens: int = 100_000,
        tokens_per_second: float = 0.0,
        pool: str = "cpu",
        connects: bool = False,
    ) -> None:
        self.worker_id = worker_id
        self.epoch = f"{worker_id}-epoch"
        self.jobs: list[worker_pb2.Job] = []
        self.batches: list[str] = []
        self.cancelled: set[str] = set()
        self.directives: list[worker_pb2.Directive] = []
        self.answer: Callable[[worker_pb2.Job], worker_pb2.JobResult] = answer
        self.load_failure = failure
        self.adapter_failure: worker_pb2.Failure | None = None
        self.preempted_in_seconds: float | None = None
        self.claims: list[tuple[str, str]] = []
        """Models and adapters that pulls asked it to load."""
        self.beats_asked = 0
        self.queued_tokens: dict[str, int] = {}
        self._pool = pool
        self._connects = connects
        self._numbers = itertools.count(1)
        self._adapters: dict[str, set[str]] = defaultdict(set)
        self._failed_adapters: dict[str, dict[str, worker_pb2.Failure]] = defaultdict(dict)
        self._address = address
        self._states = {made.model: (models_pb2.MODEL_STATE_RESIDENT, made) for made in models}
        self._states |= {made.model: (models_pb2.MODEL_STATE_COLD, made) for made in on_disk}
        self._pinned: set[str] = set()
        self._can_load = can_load
        self._budget_tokens = budget_tokens
        self._tokens_per_second = tokens_per_second
        self._held: dict[str, worker_pb2.Lane] = {}
        self._go = asyncio.Event()
        self._go.set()
        self._seq = 0
        self._beats_held = False
        self._regular_beat = asyncio.Lock()

    def hold(self) -> None:
        self._go.clear()

    def resume(self) -> None:
        self._go.set()

    async def hold_beats(self) -> None:
        """Stop regular heartbeats, after the answer to one that is in flight; send one only when
        asked or when something has changed.
        """
        async with self._regular_beat:
            self._beats_held = True

    @asynccontextmanager
    async def working(self) -> AsyncIterator[FakeWorker]:
        async with grpc.aio.insecure_channel(
            self._address, options=[("grpc.max_receive_message_length", -1)]
        ) as channel:
            self._stub = worker_stub(channel)
            await self.beat()
            if self._connects:
                stream = self._stub.Connect(
                    worker_pb2.ConnectRequest(
                        wire_version=WIRE_VERSION, worker_id=self.worker_id, epoch=self.epoch
                    )
                )
                await stream.read()
            tasks = [asyncio.create_task(self._pull()), asyncio.create_task(self._beat())]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def beat(self, *, leaving: bool = False) -> None:
        models = [self._report(name) for name in self._states]
        held = [
            worker_pb2.HeldBatch(lane=lane, batch_id=batch_id)
            for batch_id, lane in self._held.items()
        ]
        response = await self._stub.Heartbeat(
            worker_pb2.HeartbeatRequest(wire_version=WIRE_VERSION,
                worker_id=self.worker_id, epoch=self.epoch, pool=self._pool, device="none",
                memory_bytes=1 << 30,
                models=models, batches=held, batch_tokens=4096, directive_seq=self._seq,
                leaving=leaving,
                preempted_in_seconds=self.preempted_in_seconds,
            )
        )  # fmt: skip
        self.queued_tokens = dict(response.queued_tokens)
        for cancelled in response.cancelled:
            self.cancelled.update(cancelled.job_ids)
        for directive in response.directives:
            if directive.seq <= self._seq:
                continue  # two heartbeats were under way at once, and both have brought it
            self._seq = directive.seq
            self.directives.append(directive)
            if directive.load_model:
                await self.load(directive.load_model)
            if directive.pin_model or directive.unpin_model:
                self._pinned = (self._pinned | {directive.pin_model}) - {directive.unpin_model}
                await self.beat()
            if directive.evict_model:
                self._states[directive.evict_model] = (
                    models_pb2.MODEL_STATE_COLD,
                    card(directive.evict_model),
                )

    async def load(self, model: str) -> None:
        state = (
            models_pb2.MODEL_STATE_FAILED if self.load_failure else models_pb2.MODEL_STATE_RESIDENT
        )
        self._states[model] = (state, card(model))
        await self.beat()

    async def load_adapter(self, model: str, adapter: str) -> None:
        if self.adapter_failure:
            self._failed_adapters[model][adapter] = self.adapter_failure
        else:
            self._adapters[model].add(adapter)
        await self.beat()

    def _report(self, name: str) -> worker_pb2.WorkerModel:
        state, made = self._states[name]
        failed = state == models_pb2.MODEL_STATE_FAILED
        return worker_pb2.WorkerModel(
            model=name, state=state, tokens_per_second=self._tokens_per_second,
            pinned=name in self._pinned,
            card=None if failed else made, failure=self.load_failure if failed else None,
            adapters=sorted(self._adapters[name]), failed_adapters=self._failed_adapters[name],
        )  # fmt: skip

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.3)
            try:
                async with self._regular_beat:
                    if not self._beats_held:
                        await self.beat()
            except grpc.aio.AioRpcError:
                continue

    async def _pull(self) -> None:
        while True:
            try:
                await self._pull_once()
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)

    async def _pull_once(self) -> None:
        resident = [
            name
            for name, (state, _) in self._states.items()
            if state == models_pb2.MODEL_STATE_RESIDENT
        ]
        lanes = [
            (name, adapter) for name in resident for adapter in ("", *sorted(self._adapters[name]))
        ]
        response = await self._stub.Pull(
            worker_pb2.PullRequest(wire_version=WIRE_VERSION,
                worker_id=self.worker_id, epoch=self.epoch, pool=self._pool,
                budget_tokens=self._budget_tokens, budget_jobs=256,
                lanes=[worker_pb2.Lane(pool=self._pool, model=name, adapter=adapter) for name,
                adapter in lanes],
                wait_seconds=5, can_load=self._can_load,
                batch_id=f"{self.epoch}-{next(self._numbers)}",
            )
        )  # fmt: skip
        if response.heartbeat_now:
            self.beats_asked += 1
            await self.beat()
        if response.load_model:
            self.claims.append((response.load_model, response.load_adapter))
            if response.load_model not in resident:
                await self.load(response.load_model)
        if response.load_adapter:
            await self.load_adapter(response.load_model, response.load_adapter)
        if response.batch_id:
            await self._work(response)

    async def _work(self, pulled: worker_pb2.PullResponse) -> None:
        jobs = [worker_pb2.Job.FromString(data) for data in pulled.jobs]
        self.jobs += jobs
        self.batches.append(pulled.batch_id)
        self._held[pulled.batch_id] = pulled.lane
        await self._go.wait()
        done = [
            worker_pb2.CompletedJob(job_id=job.job_id, result=self.answer(job).SerializeToString())
            for job in jobs
        ]
        while pulled.batch_id in self._held:
            try:
                await self._stub.Complete(
                    worker_pb2.CompleteRequest(
                        worker_id=self.worker_id,
                        lane=pulled.lane,
                        batch_id=pulled.batch_id,
                        jobs=done,
                        release=True,
                    )
                )
                del self._held[pulled.batch_id]
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)


class WorkerStub:
    """WorkerService, with a method for each call of its stream too."""

    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        stub = cast(
            "worker_pb2_grpc.WorkerServiceAsyncStub", worker_pb2_grpc.WorkerServiceStub(channel)
        )
        self.Heartbeat = stub.Heartbeat
        self.Connect = stub.Connect
        self.Multiplex = stub.Multiplex
        self._metadata = metadata

    def Pull(self, request: worker_pb2.PullRequest) -> asyncio.Task[worker_pb2.PullResponse]:
        return asyncio.create_task(self._call("pull", request, worker_pb2.PullResponse))

    def Complete(
        self, request: worker_pb2.CompleteRequest
    ) -> asyncio.Task[worker_pb2.CompleteResponse]:
        return asyncio.create_task(self._call("complete", request, worker_pb2.CompleteResponse))

    async def _call(self, kind: str, request: Message, response: type[Contents]) -> Contents:
        stream = multiplex.MultiplexedStream(self.Multiplex(metadata=self._metadata))
        try:
            return response.FromString(
                await stream.call(kind, request.SerializeToString(), CALL_SECONDS)
            )
        finally:
            await stream.close()


def worker_stub(
    channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()
) -> WorkerStub:
    return WorkerStub(channel, metadata)


def mesh_stub(channel: grpc.aio.Channel) -> mesh_pb2_grpc.MeshServiceAsyncStub:
    return cast("mesh_pb2_grpc.MeshServiceAsyncStub", mesh_pb2_grpc.MeshServiceStub(channel))


class Stream:
    """The peer's side of one stream. `service`: the stub that has `Multiplex`."""

    def __init__(self, service: Any, *metadata: tuple[str, str]) -> None:
        self._call: Any = service.Multiplex(metadata=metadata)

    async def send(self, *calls: multiplex_pb2.MultiplexedCall) -> None:
        await self._call.write(multiplex_pb2.MultiplexRequest(calls=calls))

    async def answers(self, count: int) -> dict[int, multiplex_pb2.MultiplexedAnswer]:
        """The next answers, by number."""
        found: dict[int, multiplex_pb2.MultiplexedAnswer] = {}
        async with asyncio.timeout(120):
            while len(found) < count:
                response = await self._call.read()
                assert response is not grpc.aio.EOF, "the stream ended"
                found |= {one.number: one for one in response.answers}
        return found

    async def end(self) -> grpc.StatusCode:
        async with asyncio.timeout(120):
            try:
                while await self._call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError as error:
                code: grpc.StatusCode = error.code()
                return code
            return await self._call.code()

    async def close(self) -> None:
        await self._call.done_writing()

    def cut(self) -> None:
        self._call.cancel()


async def health(channel: grpc.aio.Channel, service: str = "") -> str:
    """SERVING or NOT_SERVING."""
    check: grpc.aio.UnaryUnaryMultiCallable[
        health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
    ] = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    response = await check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


class Client:
    """The three client services of one router."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(
            address,
            options=[("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)],
        )
        self.inference = cast(
            "inference_pb2_grpc.InferenceServiceAsyncStub",
            inference_pb2_grpc.InferenceServiceStub(self.channel),
        )
        self.models = cast(
            "models_pb2_grpc.ModelServiceAsyncStub", models_pb2_grpc.ModelServiceStub(self.channel)
        )
        self.mesh = mesh_stub(self.channel)

    async def encode(
        self,
        *texts: str,
        model: str = MODEL,
        adapter: str = "",
        pool: str = "",
        timeout: float = 60.0,
        request_id: str = "",
    ) -> pb.EncodeResponse:
        metadata = (("x-request-id", request_id),) if request_id else ()
        request = changed(encode_request(*texts, model=model), adapter=adapter, pool=pool)
        return await self.inference.Encode(request, timeout=timeout, metadata=metadata)

    async def lane(
        self, model: str = MODEL, adapter: str = "", pool: str = ""
    ) -> mesh_pb2.LaneStatus:
        """The model's lane (of any pool, unless one is named) as the router saw it last; all zero
        if it is unknown.
        """
        mesh = (await self.mesh.GetMesh(mesh_pb2.GetMeshRequest())).mesh
        named = ((lane, (lane.model, lane.adapter, pool and lane.pool)) for lane in mesh.lanes)
        return next(
            (lane for lane, name in named if name == (model, adapter, pool)), mesh_pb2.LaneStatus()
        )

    async def sees(self, *workers: str) -> None:
        """Returns once the router knows these workers."""

        async def known() -> bool:
            mesh = (await self.mesh.GetMesh(mesh_pb2.GetMeshRequest())).mesh
            return set(workers) <= {worker.worker_id for worker in mesh.workers}

        await until(known, f"workers {workers}")

    async def close(self) -> None:
        await self.channel.close()


def encode_request(*texts: str, model: str = MODEL) -> pb.EncodeRequest:
    return pb.EncodeRequest(model=model, items=[pb.Item(text=text) for text in texts])


def changed(request: Contents, **values: int | float | str | list[int]) -> Contents:
    """The request with these fields, whatever their types say: clients of other languages send any
    number for an enum.
    """
    for name, value in values.items():
        if isinstance(value, list):
            getattr(request, name).extend(value)
        else:
            setattr(request, name, value)
    return request


@asynccontextmanager
async def router(
    redis_url: str,
    router_id: str = "a",
    *,
    max_queued_tokens: int = 20_000_000,
    default_deadline_seconds: float = 60.0,
    lease_ms: int = 15_000,
    max_attempts: int = 3,
    pools: Pools | None = None,
    catalog: Catalog | None = None,
    routes: Watched[Routes] | None = None,
    tenants: Path | None = None,
    in_flight_bytes: int = 1 << 30,
    grace_seconds: float = 5.0,
) -> AsyncIterator[Client]:
    """A client of a router that runs while the context is open."""
    settings = Settings(
        router_id=router_id,
        address="127.0.0.1:0",
        redis_url=redis_url,
        max_queued_tokens=max_queued_tokens,
        default_deadline_seconds=default_deadline_seconds,
        lease_ms=lease_ms,
        max_attempts=max_attempts,
        grace_seconds=grace_seconds,
        routes=routes or Watched.fixed(Routes(pools or Pools(), catalog or Catalog())),
        tenants=Watched.fixed(DEFAULT_TENANTS) if tenants is None else watch_tenants(tenants),
        in_flight_bytes=in_flight_bytes,
    )
    async with running(settings) as address:
        client = Client(address)
        try:
            yield client
        finally:
            await client.close()


class Refusal:
    """Return the details of an error's status."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details() or ""
        trailing = dict(list(error.trailing_metadata() or ()))
        self.request_id = trailing.get("x-request-id", "")
        status = status_pb2.Status.FromString(trailing.get("grpc-status-details-bin", b""))
        self.infos = _unpacked(status, error_details_pb2.ErrorInfo)
        self.reason = self.infos[0].reason if self.infos else ""
        violations = [
            violation
            for bad in _unpacked(status, error_details_pb2.BadRequest)
            for violation in bad.field_violations
        ]
        self.field = violations[0].field if violations else ""
        retries = _unpacked(status, error_details_pb2.RetryInfo)
        self.retry_seconds = retries[0].retry_delay.ToMicroseconds() / 1e6 if retries else 0.0


def _unpacked(status: status_pb2.Status, kind: type[Contents]) -> list[Contents]:
    found = []
    for detail in status.details:
        part = kind()
        if detail.Unpack(part):
            found.append(part)
    return found


async def refused(call: Awaitable[object]) -> Refusal:
    """The error that the call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return Refusal(error)
    raise AssertionError("the call was answered")


async def until(
    predicate: Callable[[], Awaitable[bool] | object],
    what: str = "the condition",
    timeout: float = 60.0,
) -> None:
    """Returns once the predicate (it may be async) is true."""
    end = asyncio.get_running_loop().time() + timeout
    while True:
        value = predicate()
        if await value if isinstance(value, Awaitable) else value:
            return
        assert asyncio.get_running_loop().time() < end, f"waited {timeout:g} s for {what}"
        await asyncio.sleep(0.02)
