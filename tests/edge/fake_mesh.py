"""FakeMesh: a fake router with a simulated mesh for tests of the console, in states that a real
mesh cannot show on demand.

The gRPC server, its interceptors and the edge are real. Numbers of models are invented; verbs
answer in the real formats.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import numpy as np
from shoal.v1 import (
    caller_pb2_grpc,
    inference_pb2_grpc,
    mesh_pb2,
    mesh_pb2_grpc,
    models_pb2,
    models_pb2_grpc,
)
from shoal.v1 import inference_pb2 as pb

from libs.errors import ModelBroken, ModelNotFound, NoCapacity, PermissionDenied, Unauthenticated
from libs.serving import Security, Service, serving
from services.router.operators.callers import CallerService
from services.router.service import stream_calls
from tests.edge.parts import dense, ragged, scores, sparse, tokenized

Context = grpc.aio.ServicerContext[Any, Any]
MIB = 1 << 20
RESIDENT = models_pb2.MODEL_STATE_RESIDENT
COLD = models_pb2.MODEL_STATE_COLD
NAMES = (
    ("sentence-transformers/all-MiniLM-L6-v2", "bert", 384, 91),
    ("BAAI/bge-m3", "xlm-roberta", 1024, 1166),
    ("intfloat/multilingual-e5-large-instruct", "xlm-roberta", 1024, 1121),
    ("cross-encoder/ms-marco-MiniLM-L6-v2", "bert", 0, 92),
    ("urchade/gliner_medium-v2.1", "deberta-v2", 0, 790),
    ("colbert-ir/colbertv2.0", "bert", 0, 438),
    ("naver/splade-v3", "bert", 0, 440),
    ("Qwen/Qwen3-Embedding-0.6B", "qwen3", 1024, 1192),
    ("nomic-ai/nomic-embed-text-v1.5", "nomic_bert", 768, 547),
    ("jinaai/jina-embeddings-v2-base-code", "jina_bert", 768, 322),
)
GENERATIVE = "Qwen/Qwen3-0.6B"
OTHERS = (
    (GENERATIVE, "qwen3", 0, 1192),
    ("google/siglip2-base-patch16-224", "siglip", 768, 1502),
    ("fastino/gliner2-base-v1", "gliner2", 0, 833),
    ("zai-org/GLM-OCR", "glm_ocr", 0, 1800),
)
"""Models that generate text, read images and follow schemas."""


@dataclass
class FakeMesh:
    """The state and behaviour of the router.

    Attributes:
        tokens: The role of each token; if empty, calls need no token.
        refusal: Raised by every call.
    """

    mesh: mesh_pb2.Mesh = field(default_factory=mesh_pb2.Mesh)
    tokens: Mapping[str, str] = field(default_factory=dict)
    refusal: Exception | None = None
    fails: Mapping[str, Exception] = field(default_factory=dict)
    """Errors by model, raised when it is loaded or called."""
    load_seconds: float = 0.0
    word_seconds: float = 0.0
    """The pause between two words of a streamed answer."""
    is_lively: bool = False
    """Whether numbers change between snapshots."""
    seconds: float = 0.1
    """The interval of snapshots; a real router uses the requested one, 1 s."""
    watchers: int = 0
    most_watchers: int = 0
    calls: list[tuple[str, Any]] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)

    async def enter(self, name: str, request: Any, context: Context, *, role: str) -> None:
        self.calls.append((name, request))
        given = {key: str(value) for key, value in context.invocation_metadata() or ()}
        self.metadata.append(given)
        if self.refusal is not None:
            raise self.refusal
        if not self.tokens:
            return
        found = self.tokens.get(given.get("authorization", "").removeprefix("Bearer "))
        if found is None:
            raise Unauthenticated(
                "this call needs a credential: send the metadata `authorization: Bearer <token>`"
            )
        if role == "admin" and found != "admin":
            raise PermissionDenied(f"role {found} may not call {name}: it needs role admin")

    def model(self, name: str) -> models_pb2.Model:
        for model in self.mesh.models:
            if model.model == name:
                return model
        raise ModelNotFound(f"no worker knows {name}", field="model")

    def set(self, name: str, state: models_pb2.ModelState, **place: Any) -> models_pb2.Model:
        """Set the state of the model on all its workers."""
        model = self.model(name)
        if not model.places:
            model.places.add(worker_id=self.mesh.workers[0].worker_id, bytes=90 * MIB)
        for one in model.places:
            one.state = state
            for key, value in place.items():
                setattr(one, key, value)
        model.state = state
        return model

    def live(self) -> None:
        """Simulate one step of a busy mesh."""
        for at, lane in enumerate(self.mesh.lanes):
            done = random.Random(lane.done_jobs + at).randint(4, 40)
            lane.done_jobs += done
            lane.queued_jobs = max(0, int(30 + 28 * math.sin(lane.done_jobs / 90 + at)))
            lane.queued_tokens = lane.queued_jobs * 210
            lane.leased_tokens = 4096 + 512 * (at % 5)
            lane.oldest_seconds = lane.queued_jobs / 60
        for worker in self.mesh.workers:
            worker.heartbeat_age_seconds = 0.4


class FakeMeshService(mesh_pb2_grpc.MeshServiceServicer):
    def __init__(self, fake: FakeMesh) -> None:
        self.fake = fake

    async def GetMesh(
        self, request: mesh_pb2.GetMeshRequest, context: Context
    ) -> mesh_pb2.GetMeshResponse:
        await self.fake.enter("GetMesh", request, context, role="admin")
        return mesh_pb2.GetMeshResponse(mesh=self.fake.mesh)

    async def WatchMesh(
        self, request: mesh_pb2.WatchMeshRequest, context: Context
    ) -> AsyncIterator[mesh_pb2.WatchMeshResponse]:
        fake = self.fake
        await fake.enter("WatchMesh", request, context, role="admin")
        fake.watchers += 1
        fake.most_watchers = max(fake.most_watchers, fake.watchers)
        try:
            while True:
                if fake.refusal is not None:
                    raise fake.refusal
                yield mesh_pb2.WatchMeshResponse(mesh=fake.mesh)
                await asyncio.sleep(fake.seconds)  # instead of the requested interval
                if fake.is_lively:
                    fake.live()
        finally:
            fake.watchers -= 1

    async def ExplainPlacement(
        self, request: mesh_pb2.ExplainPlacementRequest, context: Context
    ) -> mesh_pb2.ExplainPlacementResponse:
        await self.fake.enter("ExplainPlacement", request, context, role="admin")
        places = [
            place
            for model in self.fake.mesh.models
            if model.model == request.model
            for place in model.places
        ]
        held = {place.worker_id for place in places if place.state == RESIDENT}
        workers = [
            mesh_pb2.PlacementReason(
                worker_id=worker.worker_id,
                pool=worker.pool,
                eligible=not worker.draining,
                reason=_reason(worker, held),
                score=0.0 if worker.draining else 1.0 - at / 10,
            )
            for at, worker in enumerate(self.fake.mesh.workers)
        ]
        summary = (
            f"{request.model} is resident on {len(held)} workers of pool l4; 4,200 tokens wait."
            if workers
            else "there is no worker in pool default"
        )
        plan = "held back: loads are in progress, or the resident models have more work waiting"
        return mesh_pb2.ExplainPlacementResponse(
            workers=workers,
            summary=summary,
            scheduler=self.fake.mesh.scheduler,
            plan=plan if workers else "",
        )


def _reason(worker: mesh_pb2.WorkerStatus, held: set[str]) -> str:
    if worker.draining:
        return "it is draining"
    if worker.worker_id in held:
        return "it holds the model: 573,571,072 bytes, 28,600 tokens/s"
    return (
        "the scheduler may have it load the model when the resident copies would take longer for "
        "the waiting work"
    )


class FakeModelService(models_pb2_grpc.ModelServiceServicer):
    def __init__(self, fake: FakeMesh) -> None:
        self.fake = fake

    async def ListModels(
        self, request: models_pb2.ListModelsRequest, context: Context
    ) -> models_pb2.ListModelsResponse:
        await self.fake.enter("ListModels", request, context, role="client")
        return models_pb2.ListModelsResponse(models=self.fake.mesh.models)

    async def GetModel(
        self, request: models_pb2.GetModelRequest, context: Context
    ) -> models_pb2.GetModelResponse:
        await self.fake.enter("GetModel", request, context, role="client")
        return models_pb2.GetModelResponse(model=self.fake.model(request.model))

    async def LoadModel(
        self, request: models_pb2.LoadModelRequest, context: Context
    ) -> models_pb2.LoadModelResponse:
        fake = self.fake
        await fake.enter("LoadModel", request, context, role="admin")
        if request.model in fake.fails:
            raise fake.fails[request.model]
        if not fake.mesh.workers:
            raise NoCapacity("there is no worker in pool default", field="pool")
        if all(model.model != request.model for model in fake.mesh.models):
            fake.mesh.models.append(make_model(request.model, "bert", 384, 91))
        fake.set(request.model, models_pb2.MODEL_STATE_LOADING)
        await asyncio.sleep(fake.load_seconds)
        return models_pb2.LoadModelResponse(
            model=fake.set(request.model, RESIDENT, load_seconds=1.4)
        )

    async def EvictModel(
        self, request: models_pb2.EvictModelRequest, context: Context
    ) -> models_pb2.EvictModelResponse:
        await self.fake.enter("EvictModel", request, context, role="admin")
        held = [
            place.worker_id
            for place in self.fake.model(request.model).places
            if place.state == RESIDENT
        ]
        self.fake.set(request.model, COLD, pinned=False)
        return models_pb2.EvictModelResponse(worker_ids=held)

    async def PinModel(
        self, request: models_pb2.PinModelRequest, context: Context
    ) -> models_pb2.PinModelResponse:
        await self.fake.enter("PinModel", request, context, role="admin")
        model = self.fake.set(
            request.model, self.fake.model(request.model).state, pinned=request.pinned
        )
        return models_pb2.PinModelResponse(model=model)


TIMINGS = pb.Timings(
    queue_seconds=0.0021,
    prepare_seconds=0.0004,
    wait_seconds=0.0012,
    forward_seconds=0.0063,
    finish_seconds=0.0003,
    total_seconds=0.0118,
)


def _vectors(count: int, width: int) -> np.ndarray:
    """Return rows that resemble their neighbours, so that a heat map has structure."""
    noise = np.random.default_rng(3).standard_normal((count + 1, width)).astype(np.float32)
    return np.abs(noise[:-1]) * 0.6 + np.abs(noise[1:]) * 0.5 + noise[0] * 0.3


class FakeInference(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, fake: FakeMesh) -> None:
        self.fake = fake

    async def _enter(self, name: str, request: Any, context: Context) -> None:
        await self.fake.enter(name, request, context, role="client")
        if request.model in self.fake.fails:
            raise self.fake.fails[request.model]
        if not self.fake.mesh.workers:
            raise NoCapacity("there is no worker in pool default", field="pool")

    async def Encode(self, request: pb.EncodeRequest, context: Context) -> pb.EncodeResponse:
        await self._enter("Encode", request, context)
        reply = pb.EncodeResponse(
            usage=pb.Usage(input_tokens=31), timings=TIMINGS, model_revision="r1"
        )
        count = len(request.items)
        if "colbert" in request.model:
            reply.multi_vector.CopyFrom(ragged(*(_vectors(9 + at, 16) for at in range(count))))
        elif "splade" in request.model:
            rows = [
                {2000 + 37 * at + row: 2.4 / (1 + at / 4) for at in range(18)}
                for row in range(count)
            ]
            reply.sparse.CopyFrom(sparse(*rows, columns=30_522))
        else:
            reply.dense.CopyFrom(dense(_vectors(count, 384)))
        return reply

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        await self._enter("Tokenize", request, context)
        return tokenized(request)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        await self._enter("Detokenize", request, context)
        return pb.DetokenizeResponse(texts=["a text"] * len(request.sequences))

    async def EncodeStream(
        self, request: pb.EncodeRequest, context: Context
    ) -> AsyncIterator[pb.EncodeResponse]:
        yield await self.Encode(request, context)

    async def ExtractStream(
        self, request: pb.ExtractRequest, context: Context
    ) -> AsyncIterator[pb.ExtractStreamResponse]:
        answer = await self.Extract(request, context)
        for word in re.findall(r"\s*\S+", answer.results[0].text):
            yield pb.ExtractStreamResponse(deltas=[pb.ExtractDelta(item=0, text=word)])
            await asyncio.sleep(self.fake.word_seconds)
        yield pb.ExtractStreamResponse(response=answer)

    def Multiplex(self, request_iterator: Any, context: Context) -> Any:
        raise NotImplementedError("the interceptor answers the calls of the stream")

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        await self._enter("Score", request, context)
        seed = random.Random(request.model)
        reply = scores(*(seed.uniform(-4, 9) for _ in request.documents))
        reply.timings.CopyFrom(TIMINGS)
        return reply

    async def Extract(self, request: pb.ExtractRequest, context: Context) -> pb.ExtractResponse:
        await self._enter("Extract", request, context)
        task = request.WhichOneof("task")
        if task == "text":
            return pb.ExtractResponse(
                results=[_written(item, request.text) for item in request.items],
                timings=TIMINGS,
                usage=pb.Usage(input_tokens=24, output_tokens=len(REPLY.split()) + 1),
            )
        return pb.ExtractResponse(
            results=[_found(item.text, task or "", request) for item in request.items],
            timings=TIMINGS,
            usage=pb.Usage(input_tokens=24),
        )


REPLY = (
    "Herring turn as one because each fish follows its neighbours: it keeps a distance, "
    "<b>matches their heading</b> and moves "
    "towards the middle of the group. Many eyes see a predator sooner, and a predator finds it "
    "hard to single out one of thousands."
)
"""It contains markup that would be bold if a page interpreted it as HTML."""


def _written(item: pb.Item, task: pb.TextTask) -> pb.Extraction:
    if item.HasField("image") or item.parts:
        return pb.Extraction(text="INVOICE 4711\nTotal 118.40 EUR")
    if task.json_schema:
        return pb.Extraction(text='{"name": "herring"}')
    return pb.Extraction(text=REPLY, finish_reason=pb.FINISH_REASON_STOP)


def _found(text: str, task: str, request: pb.ExtractRequest) -> pb.Extraction:
    if task == "classify":
        labels = request.classify.labels or ["positive", "negative"]
        return pb.Extraction(
            labels=[
                pb.LabelScore(label=label, score=0.8 / (at + 1)) for at, label in enumerate(labels)
            ]
        )
    wanted = list(request.entities.labels or [one.label for one in request.structure.entities]) or [
        "person"
    ]
    words = [
        ("Marie Curie", 0),
        ("Curie", 0),
        ("Warsaw", 1),
        ("Paris", 1),
        ("the Sorbonne", 2),
        ("1891", 3),
        ("🐟", 0),
    ]
    found = [
        pb.Entity(
            start=text.index(word),
            end=text.index(word) + len(word),
            label=wanted[at % len(wanted)],
            score=0.97,
            text=word,
        )
        for word, at in words
        if word in text
    ]
    if task == "relations":
        pairs = itertools.pairwise(found)
        return pb.Extraction(
            relations=[
                pb.Relation(head=one, tail=two, label=request.relations.labels[0], score=0.7)
                for one, two in pairs
            ]
        )
    moves = [_move(text)] if task == "structure" and "Warsaw" in text else []
    return pb.Extraction(entities=found, structures=moves)


def _move(text: str) -> pb.Structure:
    place = {"start": text.index("Warsaw"), "end": text.index("Warsaw") + 6}
    value = pb.StructureValue(text="Warsaw", score=0.91, **place)
    return pb.Structure(name="move", fields=[pb.StructureField(name="from", values=[value])])


def make_model(
    name: str,
    family: str,
    dimensions: int,
    mib: int,
    state: models_pb2.ModelState = COLD,
    *workers: str,
    **place: Any,
) -> models_pb2.Model:
    """Return a model with its card, in `state` on `workers`."""
    tasks, forms = [models_pb2.TASK_ENCODE, models_pb2.TASK_SCORE], [pb.REPRESENTATION_DENSE]
    token_dimensions, inputs = 0, list[models_pb2.InputKind]()
    if "gliner_" in name:
        tasks, forms = (
            [models_pb2.TASK_ENTITIES, models_pb2.TASK_CLASSIFY, models_pb2.TASK_RELATIONS],
            [],
        )
    elif name == GENERATIVE:
        tasks, forms = [models_pb2.TASK_TEXT], []
    elif "OCR" in name:
        tasks, forms, inputs = (
            [models_pb2.TASK_TEXT],
            [],
            [models_pb2.INPUT_KIND_IMAGE, models_pb2.INPUT_KIND_DOCUMENT],
        )
    elif "gliner2" in name:
        tasks, forms = [models_pb2.TASK_ENTITIES, models_pb2.TASK_STRUCTURE], []
    elif "siglip" in name:
        tasks, inputs = (
            [models_pb2.TASK_ENCODE],
            [models_pb2.INPUT_KIND_TEXT, models_pb2.INPUT_KIND_IMAGE],
        )
    elif "cross-encoder" in name:
        tasks, forms = [models_pb2.TASK_SCORE], []
    elif "colbert" in name:
        forms, token_dimensions = [pb.REPRESENTATION_MULTI_VECTOR], 128
    elif "splade" in name:
        forms = [pb.REPRESENTATION_SPARSE]
    card = models_pb2.ModelCard(
        model=name,
        revision="3f1a9c0",
        family=family,
        tasks=tasks,
        representations=forms,
        dimensions=dimensions,
        multi_vector_dimensions=token_dimensions,
        max_tokens=512,
        bytes=mib * MIB,
        data_type="bfloat16",
        open_labels="gliner" in name,
        inputs=inputs,
    )
    places = [
        models_pb2.ModelPlace(worker_id=worker, state=state, bytes=mib * MIB, **place)
        for worker in workers
    ]
    return models_pb2.Model(model=name, state=state, card=card, places=places)


def make_worker(
    name: str, pool: str, device: str, gib: float, **more: Any
) -> mesh_pb2.WorkerStatus:
    return mesh_pb2.WorkerStatus(
        worker_id=name,
        pool=pool,
        device=device,
        memory_bytes=int(gib * 1024) * MIB,
        heartbeat_age_seconds=0.4,
        device_seconds=812.0,
        **more,
    )


def busy() -> FakeMesh:
    """Return a mesh of four workers in two pools, ten models in all states, lanes with work, and
    supervised processes.
    """
    states = [
        RESIDENT,
        RESIDENT,
        RESIDENT,
        RESIDENT,
        RESIDENT,
        RESIDENT,
        models_pb2.MODEL_STATE_WARM,
        models_pb2.MODEL_STATE_LOADING,
    ]
    states += [COLD, models_pb2.MODEL_STATE_FAILED]
    places = [
        ("l4-0", "l4-1"),
        ("l4-0",),
        ("l4-1",),
        ("l4-0", "cpu-0"),
        ("l4-1",),
        ("l4-0",),
        ("l4-1",),
        ("l4-2",),
        ("cpu-0",),
        ("l4-0",),
    ]
    models = [
        make_model(
            *NAMES[at],
            states[at],
            *places[at],
            load_seconds=1.8,
            tokens_per_second=21_400.0 + 900 * at,
        )
        for at in range(len(NAMES))
    ]
    models[0].places[0].pinned = True
    models[9].last_error = (
        "model.safetensors: tensor encoder.layer.3.output.dense.weight has 768 rows, config.json "
        "says 1024"
    )
    models[9].places[0].last_error = models[9].last_error
    used = dict.fromkeys(("l4-0", "l4-1", "l4-2", "cpu-0"), 0)
    for model in models:
        for place in model.places:
            used[place.worker_id] += place.bytes if place.state == RESIDENT else 0
    workers = [
        make_worker(
            "cpu-0",
            "cpu",
            "Intel Xeon, 16 cores",
            8,
            kernels="avx512_bf16",
            used_bytes=used["cpu-0"],
        ),
        make_worker(
            "l4-0",
            "l4",
            "NVIDIA L4",
            4,
            used_bytes=used["l4-0"] + 210 * MIB,
            host_memory_bytes=64 << 30,
            host_used_bytes=9 << 30,
        ),
        make_worker(
            "l4-1",
            "l4",
            "NVIDIA L4",
            4,
            used_bytes=used["l4-1"],
            preempted_in_seconds=94.0,
            wasted_seconds=41.0,
        ),
        make_worker("l4-2", "l4", "NVIDIA L4", 4, draining=True),
    ]
    lanes = [
        mesh_pb2.LaneStatus(
            pool="cpu" if at == 3 else "l4",
            model=NAMES[at][0],
            adapter="acme/legal" if at == 2 else "",
            queued_jobs=41 - 8 * at,
            queued_tokens=9_200 - 1_700 * at,
            leased_tokens=6_000,
            done_jobs=18_000 + 77 * at,
            enqueued_jobs=18_100 + 77 * at,
            expired_jobs=at % 3,
            dead_jobs=1 if at == 4 else 0,
            oldest_seconds=max(0.0, 0.9 - at / 5),
        )
        for at in range(6)
    ]
    processes = [
        mesh_pb2.ProcessStatus(name="router", state="running"),
        mesh_pb2.ProcessStatus(
            name="worker-0", state="running", restarts=1, detail="killed by SIGKILL"
        ),
        mesh_pb2.ProcessStatus(name="edge", state="running"),
    ]
    pools = [
        mesh_pb2.PoolStatus(pool="l4", desired_workers=4),
        mesh_pb2.PoolStatus(pool="cpu", desired_workers=1),
    ]
    mesh = mesh_pb2.Mesh(
        workers=workers,
        models=[models[at] for at in sorted(range(len(models)), key=lambda at: models[at].model)],
        lanes=lanes,
        router_id="router-7c9f",
        scheduler=mesh_pb2.SchedulerStatus(
            scheduler_id="scheduler-0", plan=(3 << 32) + 112, age_seconds=1.2
        ),
        pools=pools,
        processes=processes,
    )
    broken = ModelBroken(
        "model.safetensors: tensor encoder.layer.3.output.dense.weight has 768 rows, config.json "
        "says 1024"
    )
    return FakeMesh(mesh, is_lively=True, load_seconds=0.3, fails={NAMES[9][0]: broken})


def with_others(fake: FakeMesh) -> FakeMesh:
    """Return the mesh with resident models of OTHERS."""
    worker = fake.mesh.workers[0].worker_id
    fake.mesh.models.extend(
        make_model(*one, RESIDENT, worker, tokens_per_second=2_400.0) for one in OTHERS
    )
    return fake


def many(count: int = 1000) -> FakeMesh:
    """Return a busy mesh with `count` models on 24 workers and a lane for every eighth model."""
    fake = busy()
    workers = [make_worker(f"l4-{at:02}", "l4", "NVIDIA L4", 22) for at in range(24)]
    states = (RESIDENT, models_pb2.MODEL_STATE_WARM, COLD, COLD, COLD)
    models: list[models_pb2.Model] = []
    for at in range(count):
        name, family, dimensions, mib = NAMES[at % len(NAMES)]
        organisation, _, rest = name.partition("/")
        held = (f"l4-{at % 24:02}",)
        models.append(
            make_model(
                f"{organisation}/{rest}-{at:04}", family, dimensions, mib, states[at % 5], *held
            )
        )
        if states[at % 5] == RESIDENT:
            workers[at % 24].used_bytes += mib * MIB
    lanes = [
        mesh_pb2.LaneStatus(
            pool="l4",
            model=model.model,
            queued_jobs=3,
            queued_tokens=500,
            leased_tokens=900,
            done_jobs=100,
        )
        for model in list(models)[::8]
    ]
    mesh = mesh_pb2.Mesh(
        workers=workers,
        models=models,
        lanes=lanes,
        router_id="router-7c9f",
        scheduler=fake.mesh.scheduler,
        pools=fake.mesh.pools,
    )
    return FakeMesh(mesh, is_lively=True, seconds=1.0)


@asynccontextmanager
async def routing(fake: FakeMesh, security: Security | None = None) -> AsyncIterator[str]:
    """Serve the fake's services at the yielded address.

    Args:
        security: The credentials of callers, checked as by a router.
    """
    inference = FakeInference(fake)
    services = [
        Service(
            "shoal.v1.InferenceService",
            partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, inference),
            stream_calls=stream_calls(inference),
        ),
        Service(
            "shoal.v1.CallerService",
            partial(caller_pb2_grpc.add_CallerServiceServicer_to_server, CallerService()),
        ),
        Service(
            "shoal.v1.ModelService",
            partial(models_pb2_grpc.add_ModelServiceServicer_to_server, FakeModelService(fake)),
        ),
        Service(
            "shoal.v1.MeshService",
            partial(mesh_pb2_grpc.add_MeshServiceServicer_to_server, FakeMeshService(fake)),
        ),
    ]
    async with serving("127.0.0.1:0", services, security=security, grace_seconds=0.1) as server:
        await server.set_health(True)
        yield server.address
